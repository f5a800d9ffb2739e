"""Which stretches of memory are asked for before they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkchat.kernels.ahead import MOST_PIECES, Lane, pieces
from sparkchat.kernels.ahead.kernel import STRETCH, launch_call_ahead
from sparkchat.kernels.launch import started_by


def asked(sizes: list[int]) -> list[set[int]]:
    """The bytes of each weight that the programs' threads ask for."""
    started: list[tuple[int, tuple[Any, ...]]] = []
    with started_by(lambda kernel, grid, *arguments, **options: started.append((grid[0], arguments))):
        launch_call_ahead(pieces([torch.zeros(size, dtype=torch.int8) for size in sizes]))
    found: list[set[int]] = [set() for _ in range(MOST_PIECES)]
    for programs, arguments in started:
        lengths, ends = arguments[4:8], [*arguments[8:11], programs]
        for program in range(programs):
            which = next(i for i, end in enumerate(ends) if program < end)
            first = program - (ends[which - 1] if which else 0)
            for thread in range(32):
                at = max(0, min((32 * first + thread) * STRETCH, lengths[which] - STRETCH))
                found[which] |= set(range(at, at + STRETCH, 16))
    return found[: len(sizes)]


@pytest.mark.parametrize("sizes", [[64 * 2048], [65 * 2048 + 16, 40 * 2048, 5000], [2048, 2048, 70000, 100000]])
def test_all_of_every_weight_is_asked_for(sizes: list[int]) -> None:
    for size, found in zip(sizes, asked(sizes), strict=True):
        # The last bytes of a weight that is no whole unit of 16 come with what lies before them.
        assert found == set(range(0, size // 16 * 16, 16)) or found == set(range(size // 16 * 16 % 16, size - 15, 16))


def test_what_is_too_small_or_not_there_is_left_out() -> None:
    assert asked([100]) == [set()]
    assert pieces([None, torch.zeros(3)]) == []
    with pytest.raises(ValueError, match="at most 4"):
        pieces([torch.zeros(16)] * 5)
    with pytest.raises(ValueError, match="one piece"):
        pieces([torch.zeros(16, 16).T])


def test_without_a_stream_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKCHAT_WEIGHTS_AHEAD", "1")
    lane = Lane.of(torch.device("cpu"))
    lane.call(torch.zeros(1 << 20))
    lane.join()
