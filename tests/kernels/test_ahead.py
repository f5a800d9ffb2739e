"""Which stretches of memory are asked for before they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from sparkchat.kernels.ahead import Lane, kernel, pieces
from sparkchat.kernels.ahead.kernel import PROGRAMS, STRETCH, launch_call_ahead

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what a card is asked for cannot be seen")


@interpreted
@pytest.mark.parametrize("sizes", [[PROGRAMS * STRETCH], [65 * 2048 + 16, 40 * STRETCH, 48], [16, 3 * STRETCH + 7]])
def test_all_of_every_weight_is_asked_for_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def note(at: Any, size: Any, lane: Any) -> None:
        asked.append((int(at.handle.data[0]), int(size.handle.data[0])))

    monkeypatch.setattr(kernel, "call_bytes", note)
    weights = [torch.zeros(size, dtype=torch.int8) for size in sizes]
    launch_call_ahead(pieces(weights))
    for weight in weights:
        begin, end = weight.data_ptr(), weight.data_ptr() + len(weight) // 16 * 16
        mine = sorted(one for one in asked if begin <= one[0] < end)
        # One after the other, without a gap.
        assert [at for at, _ in mine] == [begin, *(at + size for at, size in mine)][:-1]
        assert sum(mine[-1]) == end and all(size % 16 == 0 for _, size in mine)


def test_what_is_not_there_is_left_out() -> None:
    launch_call_ahead(pieces([None, torch.zeros(3)]))
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
