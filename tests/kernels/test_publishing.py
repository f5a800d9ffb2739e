"""Messages of ranks laid out and met over in one launch: processes that share memory, by the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparkchat.kernels.ranks import publish

PROGRAM = Path(__file__).with_name("publishing_rank.py")


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_reads_what_all_have_written(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), "12", str(tmp_path)],
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
    flags = [torch.from_file(str(tmp_path / f"pads-{r}"), size=4, dtype=torch.int32) for r in range(ranks)]
    assert all(int(one.abs().sum()) == 0 for one in flags)


def test_sizes_are_checked() -> None:
    words, bytes_, pads = torch.zeros(8), torch.zeros(3, dtype=torch.int8), torch.zeros(2, dtype=torch.int64)
    for x, mine in ((words[:7], words), (words.view(2, 4).T, words), (bytes_, bytes_)):
        with pytest.raises(ValueError, match="multiples of 4"):
            publish(x, mine, pads, 0)
