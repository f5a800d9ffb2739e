"""DeepSeek V4 as a target: embedding, layers, head. See ``TargetModel`` in base.py for the calls.

Shapes: N rows, S residual streams, d hidden size, V vocabulary, m tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from sparkchat.models.attention import open_spans
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.fused import FusedStack, takes
from sparkchat.models.deepseek_v4.hyper import HyperHead
from sparkchat.models.deepseek_v4.rope import Ropes
from sparkchat.models.deepseek_v4.row_pass import RowPass, RowRoom
from sparkchat.models.deepseek_v4.row_sight import RowSight, repeat_last
from sparkchat.models.deepseek_v4.scope import Scope, TensorReader
from sparkchat.models.deepseek_v4.sight import Sight
from sparkchat.models.deepseek_v4.stack import Stack
from sparkchat.models.deepseek_v4.vocabulary import VocabularyHead, VocabularyRows
from sparkchat.models.parallel import ALONE, Group
from sparkchat.models.rows import RowBatch


class DeepseekV4:
    """The trunk. ``embedding``, ``head``, ``ropes`` and ``config`` are shared with its drafter."""

    def __init__(
        self,
        reader: TensorReader,
        config: DeepseekV4Config,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_roundings: bool = False,
        is_packed: bool = False,
        group: Group = ALONE,
    ) -> None:
        """``reader`` gives the tensors of ``trunk_layout``, plain or as scaled codes. ``dtype``: of projections.

        ``has_roundings``: round activations, latents and index keys as the published model was trained.
        ``is_packed``: keep weights as they are stored, and unpack them for every use.
        ``group``: the ranks that share the model; ``reader`` gives this one's parts, and all ranks make the same calls.
        """
        self.device, self._dtype = device, dtype
        self.is_packed, self.group, self.has_roundings = is_packed, group, has_roundings
        self._fused: FusedStack | None = None
        # What the published model caches is bf16; float32 keeps rows independent of each other on the CPU.
        self.kv_dtype = torch.float32 if device.type == "cpu" else dtype
        scope = Scope(reader, device, dtype, has_roundings=has_roundings, is_packed=is_packed, group=group)
        self.embedding = VocabularyRows(scope.table("embed.weight", dtype), group)
        self.stack = Stack(scope.within("layers"), config, config.compress_ratios, num_hashed=config.num_hash_layers)
        self._streams_head = HyperHead(scope, config)
        self._norm = scope.norm("norm", config.rms_eps)
        head = scope.linear("head", dtype=torch.float32 if device.type == "cpu" else dtype)
        self.head = VocabularyHead(head, group)
        self.num_heads = config.num_heads // group.size
        """Attention heads of this rank."""
        self.ropes = Ropes(config, device)
        self.config = replace(
            config,
            dtype_name=packed_name(config) if is_packed else str(dtype).removeprefix("torch."),
            linear_kernel=self.stack.layers[0].attention.kernel,
            kv_dtype=self.kv_dtype,
        )

    def new_cache(self, max_rows: int, context: int, max_block: int) -> StateCache:
        return StateCache(
            self.config,
            self.config.compress_ratios,
            max_rows=max_rows,
            context=context,
            max_span=max_block,
            dtype=self.kv_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: StateCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """As ``TargetModel.forward``; a tap is the mean of a layer's streams.

        The layer behind the last one, ``num_layers``, taps all streams of the last, [N, S*d] (for a classic MTP block).
        """
        spans = open_spans(batch.cache_rows, batch.row_starts, cache)  # type: ignore[arg-type]
        sight = Sight(cache, spans, batch.positions, self.ropes, self.num_heads)
        outputs = self._run(batch.token_ids, sight, tap_layers)
        sight.advance()
        return outputs

    @torch.inference_mode()
    def decode_rows(
        self, rows: RowBatch, cache: StateCache, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """As ``forward``, for rows that lie on the device with all that is known of them; the cache keeps no count.

        Positions must be below what ``prepare`` was given, and the cache filled.
        """
        if self._fused is not None and self._fused.room.cache is cache:
            return self._run_fused(self._fused, RowPass.of(self._fused.room, rows, repeats_last=True), tap_layers)
        rows = repeat_last(rows)
        return self._run(rows.token_ids, RowSight(cache, rows, self.ropes, self.num_heads), tap_layers)

    def fuse(self, cache: StateCache, most_rows: int, most_per_request: int) -> None:
        """Run ``decode_rows`` over this filled cache by the kernels of ``sparkchat.kernels`` from now on.

        Where those do not take the model's sizes, layers stay what they are; ``is_fused`` tells.
        """
        if not self.can_fuse:
            return
        room = self.row_room(cache, most_rows, most_per_request)
        self._fused = FusedStack(self.stack, self._streams_head, self._norm, room, self.group)

    @property
    def can_fuse(self) -> bool:
        """Whether the kernels take the sizes of this model, which are those of its drafter."""
        return takes(self.config, self.has_roundings)

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def row_room(self, cache: StateCache, most_rows: int, most_per_request: int) -> RowRoom:
        """Room for passes over this cache, or over that of a drafter of this model."""
        return RowRoom(
            cache,
            self.config,
            self.ropes,
            num_heads=self.num_heads,
            most_rows=most_rows,
            most_per_request=most_per_request,
            has_roundings=self.has_roundings,
        )

    def _run_fused(self, fused: FusedStack, rows: RowPass, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        last = self.config.num_layers
        means = tuple(dict.fromkeys(layer for layer in tap_layers if layer != last))
        streams = self.streams(rows.token_ids)
        _, hidden, streams, tapped = fused.run(streams, rows.token_ids, rows, means)
        if not tap_layers:
            return hidden, None
        if means == tap_layers:
            return hidden, tapped.flatten(1)
        taps = dict(zip(means, tapped.unbind(1), strict=True)) | {last: streams.flatten(1)}
        return hidden, torch.cat([taps[layer] for layer in tap_layers], dim=-1)

    def prepare(self, end: int) -> None:
        """Positions of ``decode_rows`` will lie below ``end``."""
        self.ropes.prepare(end)

    def _run(self, token_ids: Tensor, sight: Sight, tap_layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        streams = self.streams(token_ids)
        taps: dict[int, Tensor] = {}
        on_layer = _tapper(tap_layers, taps)
        on_layer(-1, streams)
        streams = self.stack.run(streams, token_ids, sight, on_layer)
        taps[self.config.num_layers] = streams.flatten(1)
        hidden = self._norm(self._streams_head(streams).float(), torch.float32)
        return hidden, torch.cat([taps[layer] for layer in tap_layers], dim=-1) if tap_layers else None

    def streams(self, token_ids: Tensor) -> Tensor:
        """token_ids [N] -> [N, S, d]: the embedding in every stream."""
        return self.embedding.streams(token_ids, self.config.hc_mult, self._dtype)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V] float32"""
        return self.head(hidden.to(self.head.dtype))

    @torch.inference_mode()
    def draft_logits(self, hidden: Tensor) -> Tensor:
        """As ``logits``, of a drafter's rows: maybe by a head in 8 bits (vocabulary.py says why that is right)."""
        return self.draft_head(hidden.to(self.head.dtype))

    @cached_property
    def draft_head(self) -> VocabularyHead:
        """What drafters multiply by; it must be made before anything is captured."""
        return self.head.for_drafts() if self.is_packed else self.head


def packed_name(config: DeepseekV4Config) -> str:
    """How the layer weights are stored: fp4+fp8 or fp8."""
    return "+".join(dict.fromkeys((config.expert_format, "fp8")))


def _tapper(tap_layers: tuple[int, ...], taps: dict[int, Tensor]) -> Callable[[int, Tensor], None]:
    def keep(layer: int, streams: Tensor) -> None:
        if layer in tap_layers:
            taps[layer] = streams.float().mean(dim=1)

    return keep
