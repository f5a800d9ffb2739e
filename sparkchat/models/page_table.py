"""Which pages of a shared storage hold the positions of each cache row.

The table lies on the device, where captured steps read it; who holds what is decided here, on the host. Changes reach
the device with ``publish``, in the order of the stream and without waiting: what was launched before still reads the
table as it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PAGE_SIZE = 64
"""Positions of a page: the longest tile of the attention kernel, and what its spans begin at multiples of, so that a
tile reads one page's number (docs/decisions/0013-paged-cache.md)."""
BLANK = 0
"""The page of positions that no page was taken for: always zeros, as what is masked is multiplied all the same."""


def pages_of(positions: int) -> int:
    """Pages that positions below ``positions`` touch."""
    return -(-positions // PAGE_SIZE)


class PageTable:
    """Rows of ``width`` entries over pages 1 to ``num_pages``."""

    def __init__(self, rows: int, width: int, num_pages: int, device: torch.device) -> None:
        self.width, self.num_pages = width, num_pages
        self._free = list(range(num_pages, 0, -1))
        self._held: dict[int, list[int]] = {row: [] for row in range(rows)}
        self._used: set[int] = set()
        """Pages that were held before: whoever gets them next must find zeros."""
        self._stale: set[int] = set()
        """Pages to be made zeros with the next ``publish``."""
        with torch.inference_mode(False):
            self._host = torch.full((rows, width), BLANK, dtype=torch.int32)
            self.numbers = self._host.to(device, copy=True)
            """[rows, width] int32 on the device"""
        self._changed: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def held(self, row: int) -> list[int]:
        """The row's pages, in the order of their positions."""
        return self._held[row]

    def missing(self, row: int | None, positions: int) -> int:
        """Pages that a row (None: one that holds none) lacks for positions below ``positions``."""
        return max(0, pages_of(positions) - (0 if row is None else len(self._held[row])))

    def take(self, row: int, positions: int) -> None:
        """Give the row pages for positions below ``positions``. Raises ValueError when too few are free."""
        count = self.missing(row, positions)
        if count > len(self._free):
            raise ValueError(f"cache row {row} needs {count} pages more, and {len(self._free)} are free")
        held = self._held[row]
        for _ in range(count):
            page = self._free.pop()
            self._host[row, len(held)] = page
            held.append(page)
            (self._stale if page in self._used else self._used).add(page)
        if count:
            self._changed.add(row)

    def give_back(self, row: int, positions: int = 0) -> None:
        """Take from the row the pages behind those of positions below ``positions``."""
        held, keep = self._held[row], pages_of(positions)
        if len(held) > keep:
            self._host[row, keep : len(held)] = BLANK
            self._free += reversed(held[keep:])
            del held[keep:]
            self._changed.add(row)

    def fold(self, row: int, pages: Iterable[int]) -> None:
        """Let a row that is nobody's lie in these pages, again and again over its whole width."""
        chosen = torch.tensor(list(pages), dtype=torch.int32)
        self._host[row] = chosen.repeat(-(-self.width // len(chosen)))[: self.width]
        self._used |= set(chosen.tolist())
        self._changed.add(row)

    def free_pages(self, most: int) -> list[int]:
        """Up to ``most`` pages that nobody holds."""
        return self._free[-most:] if most > 0 else []

    def publish(self) -> list[int]:
        """Bring the device's table up to date; returns the pages that must be made zeros before they are used."""
        if self._changed:
            rows = sorted(self._changed)
            # The first column says which row it is: one copy, from memory that is kept until the copy is done.
            update = torch.cat([torch.tensor(rows, dtype=torch.int32)[:, None], self._host[rows]], dim=1)
            update = to_device(update, self.numbers.device)
            self.numbers.index_copy_(0, update[:, 0].long(), update[:, 1:])
            self._changed.clear()
        stale = sorted(self._stale)
        self._stale.clear()
        return stale


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nobody waits for; on the CPU the numbers themselves."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
