"""How the columns of the streams are shared out among programs.

Programs and warps decide in what order a row's sums are added and follow from the width alone. What was measured:
benchmarks/results/2026-11-30-v4-streams.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

LEAST_COLUMNS = 32
MOST_STREAMS = 4
"""A thread has all numbers of a combination in registers."""


@dataclass(frozen=True)
class ConnectPlan:
    """One way to connect streams."""

    programs: int = 32
    """At most; a power of two."""
    warps: int = 2
    tile_rows: int = 8
    """Of many rows: how many a program takes one after the other. Changes no bit."""

    def of_width(self, hidden_size: int) -> ConnectPlan:
        """With as many programs as the width has pieces of some columns."""
        programs = 1
        while programs < self.programs and hidden_size % (2 * programs * LEAST_COLUMNS) == 0:
            programs *= 2
        return replace(self, programs=programs)


PLAN = ConnectPlan()
TRIED = (PLAN, ConnectPlan(64, 2), ConnectPlan(64, 4), ConnectPlan(16, 8), ConnectPlan(32, 4))
TRIED_OF_MANY = tuple(ConnectPlan(warps=warps, tile_rows=rows) for rows, warps in ((8, 2), (8, 4), (4, 2), (16, 2)))


def words_of(streams: int) -> tuple[int, int]:
    """Sums of a row and program, in powers of two: those that what is read is made of, and those of the next mix."""
    needed = streams + streams * (streams + 1) // 2, streams + streams * streams
    return 1 << (needed[0] - 1).bit_length(), 1 << (needed[1] - 1).bit_length()
