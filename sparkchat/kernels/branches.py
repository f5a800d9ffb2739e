"""Launches that need nothing of each other, side by side in a CUDA graph: a second stream, forked and joined by events.

    with branch("shared", x) as shared:
        with shared.aside():
            ...             # behind all that was launched so far, beside what follows
        ...
        shared.join()       # what follows is behind both; the end of the block joins what was not

Only a stream that is being captured is forked. Elsewhere, and where a branch is not asked for, the same lines run in
the order in which they stand, on one stream; ``is_beside`` tells, for what is one launch unless it is taken apart.

What a branch reads or writes must be held until it is joined: memory that is given back is handed out again on the
stream on which it was taken. What is taken within ``aside`` may be given back behind the join, for the next ``aside``
begins behind everything that was launched before it. Ranks meet on the stream that computes alone, all in one order;
a kernel whose programs wait for each other may run beside one that ends by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from sparkchat.errors import UsageError

SWITCH = "SPARKCHAT_BRANCHES"
"""In the environment: 0 for none, 1 for all, or names with commas between them; else those of ``USED``."""
BRANCHES = {
    "shared": (1, 24),
    "queries": (1, 24),
    "state": (2, 24),
    "features": (1, 24),
}
"""By name: the least and the most rows of a batch that are taken apart. What they are: models/deepseek_v4/fused.py."""
USED = frozenset({"shared", "queries", "features"})


class Branch:
    """Some launches of a block, beside the others where there is a stream for them."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        self._side, self._done = side, None

    @property
    def is_beside(self) -> bool:
        return self._side is not None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The launches within it begin behind those before it, and what is behind it does not wait for them."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield
            self._done = self._side.record_event()

    def join(self) -> None:
        """What is launched from now on is behind what was launched aside."""
        if self._done is not None and self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._done)
        self._done = None


@contextmanager
def branch(name: str, x: Tensor) -> Iterator[Branch]:
    """The branch ``name`` of ``BRANCHES`` for a batch of the rows of ``x`` [N, ...], joined at the end."""
    opened = Branch(_side_of(x.device) if _is_taken_apart(name, x) else None)
    yield opened
    opened.join()


def _is_taken_apart(name: str, x: Tensor) -> bool:
    least, most = BRANCHES[name]
    if not (x.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return False
    # A machine without a GPU may have no triton, which this import brings in.
    from sparkchat.kernels.launch import starts_early

    # Who starts early waits for the launch before it on its own stream, and trusts that all others have ended with it.
    is_wanted = least <= x.shape[0] <= most and name in wanted(os.environ.get(SWITCH))
    return is_wanted and not starts_early(is_streaming=False)


@cache
def _side_of(device: torch.device) -> torch.cuda.Stream:
    """One for all branches: those that are open together follow each other on it."""
    return torch.cuda.Stream(device)


def wanted(said: str | None) -> frozenset[str]:
    """The names that ``SWITCH`` asks for. Raises UsageError."""
    if said is None or said in ("0", "1"):
        return USED if said is None else frozenset(BRANCHES if said == "1" else ())
    names = frozenset(filter(None, said.split(",")))
    if unknown := names - BRANCHES.keys():
        raise UsageError(
            f"{SWITCH}={said}: there is no branch {min(unknown)}; give 0, 1 or some of {', '.join(BRANCHES)}"
        )
    return names
