"""What drafters showed lately: survivals of the newest blocks by kind of sampling, fading.

Kept by the engine, told of finished steps alone. Requests whose seed the user chose neither look at it nor add to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

PRIOR = 0.75
"""Chance of a draft of a drafter of which nothing is known; chats showed 0.74 to 0.77 at every position (paper,
figure 2)."""
_PRIOR_BLOCKS = 8
"""As many blocks outweigh it."""
_WINDOW = 32
"""Blocks after which one counts for a third."""
_LEAST, _MOST = 32, 128
"""Blocks of a sample."""
_FORGOTTEN = 0.01
_MOST_NOTED = 64
"""Blocks of a kind that wait to be weighed: a step notes them in a microsecond, weighing takes fifty."""


class RecentBlocks:
    """Of each kind the steps in which blocks were seen, each with its weight; all weights of a kind are 1 together."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[float, np.ndarray]]] = {}
        self._seen: dict[str, int] = {}
        self._means: dict[str, np.ndarray] = {}
        self._noted: dict[str, tuple[list[float], list[int]]] = {}
        """Blocks behind one another, and how long each is: two objects for the collector to look at, whatever comes."""

    def knows(self, kind: str) -> bool:
        """Whether blocks of this kind were seen."""
        return kind in self._steps or kind in self._noted

    def add(self, kind: str, rows: Sequence[Sequence[float]]) -> None:
        """Blocks of one step, as survivals of their drafts: rows [n][g], g may differ."""
        values, lengths = self._noted.setdefault(kind, ([], []))
        for row in rows:
            values += row
            lengths.append(len(row))
        if len(lengths) >= _MOST_NOTED:
            self._weigh_noted()

    def _weigh_noted(self) -> None:
        noted, self._noted = self._noted, {}
        for kind, (values, lengths) in noted.items():
            ends = list(accumulate(lengths))
            self._weigh(kind, [values[end - length : end] for end, length in zip(ends, lengths, strict=True)])

    def _weigh(self, kind: str, rows: Sequence[Sequence[float]]) -> None:
        if kind not in self._steps:
            self._steps[kind], self._seen[kind] = deque([(1.0, _prior(1))]), _PRIOR_BLOCKS
        weight = max(1.0 - (1.0 - 1.0 / _WINDOW) ** len(rows), len(rows) / (self._seen[kind] + len(rows)))
        kept = [(old * (1.0 - weight), blocks) for old, blocks in self._steps[kind]]
        self._keep(kind, [*kept, (weight, _matrix(self._lengthened(kind, rows)))], self._seen[kind] + len(rows))

    def _lengthened(self, kind: str, rows: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Shorter blocks, as of requests that chose so, go on as longer ones of their kind did: they say nothing of
        what lies behind them."""
        width = max(blocks.shape[1] for _, blocks in self._steps[kind])
        if all(len(row) >= width for row in rows):
            return rows
        means = self.expected(kind, width)
        # Where nothing ever passed, nothing passes behind it.
        return [[*row, *(row[-1] * mean / (means[len(row) - 1] or 1.0) for mean in means[len(row) :])] for row in rows]

    def replace(self, kind: str, rows: Sequence[Sequence[float]]) -> None:
        """Forget what was known of a kind: only these blocks count."""
        self._weigh_noted()
        self._keep(kind, [(1.0, _matrix(rows))], len(rows))

    def _keep(self, kind: str, steps: Sequence[tuple[float, np.ndarray]], seen: int) -> None:
        kept = [step for step in steps if step[0] >= _FORGOTTEN]
        whole = sum(weight for weight, _ in kept)
        # The kind told last is the last of the dictionary.
        self._steps.pop(kind, None)
        self._steps[kind] = deque((weight / whole, blocks) for weight, blocks in kept)
        self._seen[kind] = seen
        self._means.pop(kind, None)

    def expected(self, kind: str, block: int) -> tuple[float, ...]:
        """Mean survivals of a block of which nothing is known but its kind."""
        self._weigh_noted()
        if kind not in self._means or len(self._means[kind]) < block:
            steps = self._of(kind)
            self._means[kind] = sum((weight * _widened(b, block).mean(axis=0)[:block] for weight, b in steps), 0.0)
            if kind not in self._steps:
                return tuple(self._means.pop(kind).tolist())
        return tuple(self._means[kind][:block].tolist())

    def sample(self, kinds: Mapping[str, int], block: int, requests: int) -> np.ndarray:
        """Blocks [m, g] as those of so many ``requests``, of these kinds by their numbers, will be like."""
        self._weigh_noted()
        whole = sum(kinds.values())
        steps = [
            (weight * count / whole, _widened(blocks, block)[:, :block])
            for kind, count in kinds.items()
            for weight, blocks in self._of(kind)
        ]
        return _drawn(steps, min(max(requests, _LEAST), _MOST))

    def _of(self, kind: str) -> Sequence[tuple[float, np.ndarray]]:
        """Of a kind of which nothing is known: what was told last of any other."""
        found = self._steps.get(kind) or next(reversed(self._steps.values()), None)
        return found or [(1.0, _prior(1))]


def sample_of(rows: Sequence[Sequence[float]], block: int) -> np.ndarray:
    """These blocks alone [n, g]."""
    return _widened(_matrix(rows), block)[:, :block]


def _drawn(steps: Sequence[tuple[float, np.ndarray]], size: int) -> np.ndarray:
    """``size`` blocks, evenly by weight."""
    blocks = np.concatenate([found for _, found in steps])
    lengths = [len(found) for _, found in steps]
    ends = np.cumsum(np.repeat([weight / n for (weight, _), n in zip(steps, lengths, strict=True)], lengths))
    places = (np.arange(size) + 0.5) / size * ends[-1]
    return blocks[np.searchsorted(ends, places).clip(max=len(blocks) - 1)]


def _prior(width: int) -> np.ndarray:
    return np.cumprod(np.full((1, width), PRIOR), axis=1)


def _matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    width = max(len(row) for row in rows)
    if all(len(row) == width for row in rows):
        return np.array(rows, dtype=np.float64)
    return np.concatenate([_widened(np.array([row], dtype=np.float64), width) for row in rows])


def _widened(blocks: np.ndarray, width: int) -> np.ndarray:
    """Shorter blocks go on as one does of which nothing is known."""
    more = width - blocks.shape[1]
    return blocks if more <= 0 else np.concatenate([blocks, blocks[:, -1:] * _prior(more)], axis=1)
