"""One request's cache in two: layers with a window and full layers have keys of different sizes."""

from __future__ import annotations

import torch

from sparkchat.models.gemma4.config import Gemma4Config
from sparkchat.models.kv_cache import KVCache


class TwoCaches:
    """Behaves as one ``KVCache`` whose calls reach both; a row holds as many positions in each."""

    def __init__(
        self,
        config: Gemma4Config,
        *,
        max_rows: int,
        context: int,
        max_span: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rows, self.context = max_rows, context

        def make(is_full: bool) -> KVCache:
            kind = config.full if is_full else config.sliding
            return KVCache(
                [kind.window] * config.is_full.count(is_full),
                kind.num_kv_heads,
                kind.head_dim,
                max_rows=max_rows,
                context=context,
                max_span=max_span,
                dtype=dtype,
                device=device,
            )

        self.sliding, self.full = make(False), make(True)

    @property
    def _both(self) -> tuple[KVCache, KVCache]:
        return self.sliding, self.full

    def allocate(self) -> int:
        row = self.sliding.allocate()
        assert self.full.allocate() == row
        return row

    def fill(self) -> None:
        for cache in self._both:
            cache.fill()

    def free(self, row: int) -> None:
        for cache in self._both:
            cache.free(row)

    def length(self, row: int) -> int:
        return self.full.length(row)

    def can_truncate(self, row: int, length: int) -> bool:
        return all(cache.can_truncate(row, length) for cache in self._both)

    def truncate(self, row: int, length: int) -> None:
        """Raises ValueError where ``can_truncate`` says no."""
        if not self.can_truncate(row, length):
            raise ValueError(f"cache row {row} holds {self.length(row)} positions and cannot go back to {length}")
        for cache in self._both:
            cache.truncate(row, length)

    def reserve(self, row: int, count: int) -> int:
        start = self.sliding.reserve(row, count)
        assert self.full.reserve(row, count) == start
        return start

    def mark_written(self, row: int, end: int) -> None:
        for cache in self._both:
            cache.mark_written(row, end)

    def advance(self, row: int, end: int) -> None:
        for cache in self._both:
            cache.advance(row, end)

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self._both)
