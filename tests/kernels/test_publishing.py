"""Messages of ranks laid out and met over in one launch: processes that share memory, by the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkchat.kernels.ranks import Meeting, publish, publish_sum
from sparkchat.kernels.ranks.rows import join_columns, look_up, spread_rows
from sparkchat.kernels.ranks.rows_kernel import launch_join_columns, launch_spread_rows

PROGRAM = Path(__file__).with_name("publishing_rank.py")


def test_every_rank_reads_what_all_have_written(tmp_path: Path) -> None:
    ranks = 3
    command = [sys.executable, str(PROGRAM)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), "3", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [one.communicate(timeout=120)[0] for one in running]
    finally:
        for one in running:
            one.kill()
    assert all(text.startswith("all alike") for text in said), "\n".join(text[-2000:] for text in said)
    # Every rank was told by all others as often as it met, program by program.
    counts = [torch.from_file(str(tmp_path / f"pads-{r}"), size=3 * ranks, dtype=torch.int32) for r in range(ranks)]
    first = counts[0].view(-1, ranks)
    assert all(torch.equal(one, counts[0]) for one in counts) and bool((first == first[:, :1]).all())
    assert first[0, 0] == 3 + 2 + 1 and 0 < first[2, 0] < first[1, 0] <= first[0, 0]


def test_sizes_are_checked() -> None:
    words, bytes_, pads = torch.zeros(8), torch.zeros(3, dtype=torch.int8), torch.zeros(2, dtype=torch.int64)
    for x, mine in ((words[:7], words), (words.view(2, 4).T, words), (bytes_, bytes_)):
        with pytest.raises(ValueError, match="multiples of 4"):
            publish(x, mine, pads, 0)
    for parts, total in (
        (words.view(2, 4), words),
        (words.view(2, 4).half(), words[:4]),
        (words.view(4, 2).T, words[:4]),
    ):
        with pytest.raises(ValueError, match="cannot be added"):
            publish_sum(parts, total, pads, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_parts_are_spread_and_joined_where_they_lie(dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.randn(3, 1100, device=device).to(dtype) for _ in range(3)]
    addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
    for by_kernel, by_torch, shape in (
        (launch_spread_rows, spread_rows, (3, 4, 1100)),
        (launch_join_columns, join_columns, (3, 3300)),
    ):
        outs = torch.full((2, *shape), float("nan"), device=device)
        by_kernel(parts, addresses, outs[0])
        by_torch(parts, addresses, outs[1])
        assert torch.equal(outs[0], outs[1]) and not outs.isnan().any()
    with pytest.raises(ValueError, match="looked up"):
        look_up(torch.zeros(4, 8), torch.zeros(2).long(), 0, torch.zeros(2, 8).half(), Meeting(addresses, 0))
