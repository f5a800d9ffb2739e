"""Which kernels may start while the one before them runs, as launches are captured."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from sparkchat.kernels.launch import BEHIND, EARLY, LATE, ORDINARY, READY, Overlap, launch, overlap, started_by


@pytest.mark.parametrize(
    ("which", "is_streaming", "lets_next", "expected", "is_programmatic"),
    [
        (Overlap.NONE, False, None, ORDINARY, False),
        (Overlap.NONE, True, True, ORDINARY, False),
        (Overlap.SMALL, False, None, EARLY, True),
        # It starts late itself, but lets the small kernel behind it start.
        (Overlap.SMALL, True, None, EARLY, False),
        (Overlap.ALL, True, False, EARLY, True),
        (Overlap.BEHIND, True, None, BEHIND, True),
        (Overlap.BEHIND, True, False, LATE, True),
        (Overlap.BEHIND, False, None, LATE, True),
        (Overlap.BEHIND, False, True, READY, True),
    ],
)
def test_launches_say_when_the_next_may_start(
    which: Overlap, is_streaming: bool, lets_next: bool | None, expected: int, is_programmatic: bool
) -> None:
    seen: list[dict[str, Any]] = []

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        seen.append(options)

    with started_by(start), overlap(which):
        launch("kernel", (1,), is_streaming=is_streaming, lets_next=lets_next, SIZE=4)
    (options,) = seen
    assert options.pop("PDL") == expected
    assert options.pop("launch_pdl", False) == is_programmatic
    assert options == {"SIZE": 4}
