"""How the columns of the streams are shared out among programs, and how those meet.

``programs`` and ``warps`` decide in what order a row's sums are added and follow from the width alone; the meeting is
speed. What was measured: benchmarks/results/2026-11-30-v4-streams.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

LEAST_COLUMNS = 32
MOST_STREAMS = 4
"""A thread has all numbers of a combination in registers."""


class Meeting(IntEnum):
    """How a program learns the sums of all others."""

    LAUNCH = 0
    """They were written by a launch before."""
    COUNT = 1
    """Programs count themselves, and wait for the count."""
    WORDS = 2
    """Every sum lies beside the number of its round in one word of 8 bytes, so that whoever reads it knows."""


@dataclass(frozen=True)
class ConnectPlan:
    """One way to connect streams."""

    programs: int = 64
    """At most; a power of two."""
    warps: int = 2
    meeting: Meeting = Meeting.COUNT
    """Where all programs fit on the card at once; two launches where not."""
    is_quick: bool = False
    """Whether few rows (``ranks.exchange.MOST_ROWS``) take the launch that adds over the ranks and balances late."""

    def of_width(self, hidden_size: int) -> ConnectPlan:
        """With as many programs as the width has pieces of some columns."""
        programs = 1
        while programs < self.programs and hidden_size % (2 * programs * LEAST_COLUMNS) == 0:
            programs *= 2
        return replace(self, programs=programs)


PLAN = ConnectPlan()
QUICK = ((64, 2), (64, 4), (32, 4), (128, 2))
"""Programs and warps of the quick launch that are worth timing."""
TRIED = (
    PLAN,
    ConnectPlan(meeting=Meeting.WORDS),
    *(ConnectPlan(programs, warps, is_quick=True) for programs, warps in QUICK),
)
REGISTERS = 256 * 32
"""Of a warp, at most; a multiprocessor has 65536."""


def rows_of_program(rows: int, plan: ConnectPlan, processors: int) -> int | None:
    """Rows that each program takes so that all programs run at once on so many multiprocessors; None where too many."""
    room = processors * (65536 // (REGISTERS * plan.warps)) // (plan.programs + 1)
    return -(-rows // room) if room else None


def words_of(streams: int) -> tuple[int, int]:
    """Sums of a row and program, in powers of two: those that what is read is made of, and those of the next mix."""
    needed = streams + streams * (streams + 1) // 2, streams + streams * streams
    return 1 << (needed[0] - 1).bit_length(), 1 << (needed[1] - 1).bit_length()
