"""What the engine sees of a model: a flattened batch goes in, hidden rows and logits come out.

Shapes: N rows of the batch, R requests, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sparkchat.models.kv_cache import KVCache
from sparkchat.models.layers import Embedding
from sparkchat.models.shape import DecoderShape

__all__ = ["ForwardBatch", "KVCache", "ModelConfig", "TargetModel"]


@dataclass(frozen=True)
class ForwardBatch:
    """Ragged rows of several requests, side by side; every request is one contiguous span."""

    token_ids: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64; consecutive within a span, starting at the request's cached length."""
    cache_rows: tuple[int, ...]
    """[R] the cache row of each span; no row comes twice."""
    row_starts: tuple[int, ...]
    """[R+1] span r is rows row_starts[r]:row_starts[r+1]; no span is empty."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """[R] rows of each span."""
        return tuple(b - a for a, b in zip(self.row_starts, self.row_starts[1:], strict=False))

    def part(self, spans: list[int]) -> tuple[ForwardBatch, Tensor]:
        """Return the batch of these spans alone, and the row indices [n] they have in this one."""
        rows = torch.cat([torch.arange(self.row_starts[r], self.row_starts[r + 1]) for r in spans])
        starts = [0]
        for r in spans:
            starts.append(starts[-1] + self.counts[r])
        rows = rows.to(self.token_ids.device)
        cache_rows = tuple(self.cache_rows[r] for r in spans)
        return ForwardBatch(self.token_ids[rows], self.positions[rows], cache_rows, tuple(starts)), rows


@dataclass(frozen=True)
class ModelConfig:
    """What is known of a loaded target."""

    architecture: str
    decoder: DecoderShape
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, else config.json, else the GGUF header; may be empty."""
    tie_word_embeddings: bool
    dtype_name: str = ""
    """Format of the layer weights in memory: float32, bfloat16, float8 or q4_1."""
    linear_kernel: str = ""
    """Which matrix product runs in a decode step."""
    kv_dtype: torch.dtype = torch.float32

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers; layers with a sliding window stop growing."""
        return self.decoder.num_layers * 2 * self.decoder.kv_width * self.kv_dtype.itemsize


class TargetModel(Protocol):
    """A decoder that yields the law of the next token."""

    config: ModelConfig
    embedding: Embedding

    def new_cache(self, max_rows: int, context: int, max_block: int) -> KVCache:
        """Room for ``max_rows`` requests of ``context`` positions and spans of ``max_block`` rows."""
        ...

    def forward(
        self, batch: ForwardBatch, cache: KVCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the spans and keep their keys and values.

        Returns hidden [N, d] after the final norm, and with ``tap_layers`` the raw outputs of those decoder
        layers [N, len(tap_layers) * d] in the order given (-1 is the embedding), else None.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V] float32."""
        ...
