"""Where packed rows stand: against torch, with rows of nobody and requests without rows."""

from __future__ import annotations

import pytest
import torch

from sparkchat.kernels.row_places import RowPlaces, place_rows
from sparkchat.kernels.row_places.kernel import launch_place_rows


@pytest.mark.parametrize("starts", [[0, 6], [0, 1, 1, 4], [0, 0], [0, *range(1, 71)], [0, 3, 90]])
@pytest.mark.parametrize("spare", [0, 3])
def test_against_torch(starts: list[int], spare: int, device: torch.device) -> None:
    count = starts[-1] + spare
    if count == 0:
        return
    given = [torch.randint(0, 9000, (count,), device=device) for _ in range(4)]
    given[2] = given[2].int()
    where = torch.tensor(starts, dtype=torch.int32, device=device)
    for is_block in (False, True):
        for repeats_last in (False, True):
            kind = {"window": 128, "is_block": is_block, "repeats_last": repeats_last}
            want = place_rows(*(t.cpu() for t in given), where.cpu(), **kind)
            got = RowPlaces(*(torch.empty_like(t) for t in (*given, given[1], given[1])))
            launch_place_rows(*given, where, got, 128, is_block, repeats_last)
            for name in vars(want):
                assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
