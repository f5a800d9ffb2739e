"""A rank of test_publishing.py: publishes messages into memory that several processes share, by the interpreter.

python publishing_rank.py RANK RANKS MESSAGES FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.hyper import StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.hyper.reference import connect_streams_reference
from sparkchat.kernels.ranks import Meeting, num_pads, publish, publish_sum
from sparkchat.kernels.ranks.exchange import Exchange, Sent, inbox_words, no_turns
from sparkchat.kernels.ranks.rows import look_up
from sparkchat.kernels.ranks.rows_kernel import launch_spread_rows

SIZES = (6 * 64, 2048, 5000)
MOST = 4 * max(SIZES)


def main(rank: int, ranks: int, messages: int, folder: str) -> None:
    def shared(name: str, count: int) -> torch.Tensor:
        return torch.from_file(f"{folder}/{name}", shared=True, size=count, dtype=torch.int32)

    slots = [[shared(f"slot{turn}-{r}", MOST // 4) for r in range(ranks)] for turn in range(2)]
    flags = [shared(f"pads-{r}", num_pads(MOST, ranks)) for r in range(ranks)]
    pads = torch.tensor([one.data_ptr() for one in flags])

    def room(turn: int, other: int, size: int) -> torch.Tensor:
        return slots[turn][other][:size]

    def check(number: int, size: int, wanted: Callable[[int], torch.Tensor]) -> None:
        for other in range(ranks):
            assert torch.equal(room(number % 2, other, size), wanted(other)), (rank, other, number)

    for number in range(messages):
        turn, size = number % 2, SIZES[number % len(SIZES)]
        counted = torch.arange(size, dtype=torch.int32)
        if number % 4 < 2:
            publish(counted * (rank + 1) + number, room(turn, rank, size), pads, rank)
            check(number, size, lambda other: counted * (other + 1) + number)  # noqa: B023
        else:
            parts = torch.stack([counted.float() * rank, torch.full((size,), float(number))])
            publish_sum(parts, room(turn, rank, size).view(torch.float32), pads, rank)
            check(number, size, lambda other: (counted.float() * other + number).view(torch.int32))  # noqa: B023
    # A product whose last act is the meeting: two programs, of two rows.
    weight = TiledFp8.of(torch.eye(64, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))
    counted = torch.arange(256).view(2, 128) % 32
    x = counted.half() * 2 ** -(rank + 1)
    for number in range(messages, messages + 2):
        out = room(number % 2, rank, 128).view(torch.float32).view(2, 64)
        launch_fp8_linear(x * (number + 1), weight, out, 1, False, meeting=Meeting(pads, rank))
        wanted = counted[:, :64].float() * (number + 1)
        check(number, 128, lambda other: (wanted * 2 ** -(other + 1)).flatten().view(torch.int32))  # noqa: B023
    # Rows of a table that ranks share: 3 of them each, and an id that is nobody's.
    table, ids = torch.arange(12.0).view(3, 4) + 100 * rank, torch.tensor([1, 3 * ranks - 1, 0, 99])
    mine = room(0, rank, 16).view(torch.float32).view(4, 4)
    look_up(table, ids, 3 * rank, mine, Meeting(pads, rank))
    parts, out = [room(0, other, 16).view(torch.float32).view(4, 4) for other in range(ranks)], torch.empty(4, 2, 4)
    launch_spread_rows(parts, torch.tensor([part.data_ptr() for part in parts]), out)
    wanted = torch.stack([table[1] % 100, table[2] % 100 + 100 * (ranks - 1), table[0] % 100, torch.zeros(4)])
    assert torch.equal(out, wanted.unsqueeze(1).expand(4, 2, 4)), (rank, out)
    for number in range(3):
        exchange_rows(rank, ranks, number, shared)
    print("all alike")


def exchange_rows(rank: int, ranks: int, number: int, shared: Callable[[str, int], torch.Tensor]) -> None:
    """Streams merged with the sum of what all ranks have for them, turn after turn."""
    rows, size, width = 2, 4, 64
    inboxes = [shared(f"inbox-{r}", 2 * inbox_words(ranks, width)) for r in range(ranks)]
    turns = shared(f"turns-{rank}", no_turns(torch.device("cpu")).numel()).view_as(no_turns(torch.device("cpu")))
    exchange = Exchange(torch.tensor([inbox.data_ptr() for inbox in inboxes]), turns, rank)
    generator = torch.Generator().manual_seed(number)
    parts = torch.randint(-9, 9, (ranks, 3, rows, width), generator=generator).float()
    streams = torch.randn(rows, size, width, generator=generator)
    mix, merged = torch.randn(rows, 20, generator=generator), torch.full_like(streams, float("nan"))
    weights = StreamWeights(torch.zeros(24, size * width), torch.zeros(24), torch.zeros(24), size, 1e-6, 1e-6, 3)
    launch_connect_streams(
        streams, weights, hyper_workspace(rows, width, mix.device), Sent(parts[rank], exchange), mix, merged,
        torch.empty_like(mix), None, 0.0, None, None, None,
    )  # fmt: skip
    wanted = torch.empty_like(merged)
    connect_streams_reference(streams, weights, parts.sum((0, 1)), mix, wanted, None, None, 0.0, None, None, None)
    torch.testing.assert_close(merged, wanted)
    assert turns[:rows, :2].tolist() == [[number + 1] * 2] * rows, turns[:rows, :3]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
