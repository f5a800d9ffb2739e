"""Which launches must be behind which: forks and joins of branches followed on a CPU, and what each launch touches.

A launch is a call of what is watched. What it wrote is found by looking at its tensors before and behind it; a tensor
of which nothing changed counts as read. Two launches without an order between them, of which one wrote what the other
touched, are a race. What is read and written within one tensor by one launch is taken for written alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparkchat.kernels import branches

Clock = dict[str, int]


@dataclass(frozen=True)
class Launch:
    """One of them, as far as others matter."""

    name: str
    lane: str
    number: int
    behind: Clock
    """Of each lane, how many launches are surely before this one."""
    reads: list[tuple[int, int]]
    """Addresses from the first to behind the last."""
    writes: np.ndarray
    """Addresses of numbers"""

    def races(self, other: Launch) -> bool:
        return self._spoils(other) or other._spoils(self)

    def _spoils(self, other: Launch) -> bool:
        inside = any(((self.writes >= low) & (self.writes < high)).any() for low, high in other.reads)
        return bool(inside or np.intersect1d(self.writes, other.writes).size)


class LaunchOrder:
    """Launches in the order in which they were made, on the stream that computes and beside it."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.lane, self.clocks = "main", {"main": {"main": 0, "side": 0}, "side": {"main": 0, "side": 0}}
        self._held: list[Tensor] = []

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Note every call of ``owner.name``."""
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            taken = list(tensors_of((given, named)))
            before = [t.clone() for t in taken]
            made = inner(*given, **named)
            self._note(name, taken, before, list(tensors_of(made)))
            return made

        patch.setattr(owner, name, call)

    def _note(self, name: str, taken: list[Tensor], before: list[Tensor], made: list[Tensor]) -> None:
        reads, writes = [], [addresses(t)[torch.ones(t.shape, dtype=torch.bool)] for t in made]
        for now, then in zip(taken, before, strict=True):
            is_changed = bits(now) != bits(then)
            if is_changed.any():
                writes.append(addresses(now)[is_changed])
            elif now.numel():
                where = addresses(now)
                reads.append((int(where.min()), int(where.max()) + 1))
        clock = self.clocks[self.lane]
        clock[self.lane] += 1
        written = np.concatenate([w.numpy() for w in writes]) if writes else np.empty(0, np.int64)
        self.launches.append(Launch(name, self.lane, clock[self.lane], dict(clock), reads, written))
        # What is given back would be taken again, and look like a race.
        self._held += taken + made

    def join(self, seen: Clock, into: str) -> None:
        clock = self.clocks[into]
        clock.update({lane: max(count, seen[lane]) for lane, count in clock.items()})

    def races(self) -> list[tuple[str, str]]:
        """Names of launches of which neither is surely before the other, and which should be."""
        return [
            (a.name, b.name)
            for at, b in enumerate(self.launches)
            for a in self.launches[:at]
            if b.behind[a.lane] < a.number and a.races(b)
        ]


def fork(patch: pytest.MonkeyPatch, order: LaunchOrder, names: str) -> None:
    """Take branches apart on any device, and follow their forks and joins."""

    class Followed(branches.Branch):
        seen: Clock | None = None

        @contextmanager
        def aside(self) -> Iterator[None]:
            if not self.is_beside:
                yield
                return
            before = order.lane
            order.join(order.clocks[before], "side")
            order.lane = "side"
            yield
            self.seen, order.lane = dict(order.clocks["side"]), before

        def join(self) -> None:
            if self.seen is not None:
                order.join(self.seen, order.lane)
                self.seen = None

    patch.setattr(branches, "Branch", Followed)
    patch.setattr(branches, "_side_of", lambda device: object())
    patch.setattr(branches, "_is_taken_apart", lambda name, x: name in branches.wanted(names))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All that are in what a launch is given."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors_of([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def addresses(x: Tensor) -> Tensor:
    """[*x] int64: where each number of x begins."""
    found = torch.full((), x.data_ptr(), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found = found.unsqueeze(-1) + torch.arange(size) * (stride * x.element_size())
    return found.expand(x.shape)


def bits(x: Tensor) -> Tensor:
    """Whole numbers that tell all values apart, those that are none as well."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
