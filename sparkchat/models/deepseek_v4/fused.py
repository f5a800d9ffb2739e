"""Decoder layers of DeepSeek V4 by ``sparkchat.kernels``, for rows that lie on the device.

A sub-block leaves its output in parts (those of all ranks, or of all experts of a row), and the launch that merges it
into the streams adds them up, makes what the next sub-block reads of the streams, and norms it.

Shapes: N rows, S streams, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.kernels.hyper import PartList, StreamWeights, connect_streams
from sparkchat.kernels.hyper.plan import MOST_STREAMS, PLAN
from sparkchat.kernels.ranks.exchange import Sent
from sparkchat.models.deepseek_v4.config import SPARSE_RATIO, DeepseekV4Config
from sparkchat.models.deepseek_v4.hyper import HyperHead
from sparkchat.models.deepseek_v4.packed import MOST_ROWS
from sparkchat.models.deepseek_v4.row_pass import RowPass, RowRoom
from sparkchat.models.deepseek_v4.stack import Stack
from sparkchat.models.layers import RMSNorm
from sparkchat.models.parallel import Group


def takes(config: DeepseekV4Config, has_roundings: bool = False) -> bool:
    """Whether the kernels take a model's sizes."""
    size, columns = config.hc_mult, config.hidden_size // PLAN.of_width(config.hidden_size).programs
    powers = [size, columns, config.head_dim, config.index_head_dim]
    plain = config.head_dim - config.rope_dim
    is_rounded = not has_roundings or plain % 64 == 0 or (plain < 64 and plain & (plain - 1) == 0)
    ratios = set(config.compress_ratios)
    return (
        all(n & (n - 1) == 0 for n in powers)
        and min(columns, config.head_dim) >= 16
        and size <= MOST_STREAMS
        and is_rounded
        and (SPARSE_RATIO not in ratios or (config.index_head_dim >= 16 and config.index_num_heads <= 128))
    )


class FusedStack:
    """A ``Stack`` and the head behind it, over one filled cache."""

    def __init__(self, stack: Stack, head: HyperHead, norm: RMSNorm, room: RowRoom, group: Group) -> None:
        self.room, self._stack, self._norm, self._group = room, stack, norm, group
        self._streams = [layer.stream_weights() for layer in stack.layers]
        """Of the attention and of the experts of every layer"""
        self._head = head.kernel_weights()
        width = self._head.fn.shape[1] // self._head.streams
        self._exchanges = group.exchange(1, width) is not None
        for layer in stack.layers:
            layer.attention.join_pools()

    def run(
        self, streams: Tensor, token_ids: Tensor, rows: RowPass, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """streams [N, S, d], consumed -> what the head reads of them [N, d], the same normed, the streams behind the
        last layer, and the means of the streams behind the layers ``taps``, each named once, side by side
        [N, taps, d]."""
        count, size, width = streams.shape
        mix = torch.empty((count, size + size * size), device=streams.device)
        normed = torch.empty((count, width), dtype=streams.dtype, device=streams.device)
        spare, output = torch.empty_like(streams), None
        # In the type that a drafter multiplies, as what the vocabulary is multiplied by: rounded where it is made.
        tapped = torch.empty((count, len(taps), width), dtype=streams.dtype, device=streams.device)
        means = {layer: tapped[:, place] for place, layer in enumerate(taps)}

        def read(weights: StreamWeights, norm: RMSNorm, tapped: int, out: Tensor, taken: Tensor | None = None) -> None:
            nonlocal streams, spare
            connect_streams(
                streams,
                weights,
                self.room.streams,
                output=output,
                mix=mix,
                merged=None if output is None else spare,
                next_mix=None if weights.is_head else mix,
                norm=norm.weight,
                norm_eps=norm.eps,
                out=out,
                taken=taken,
                tap=means.get(tapped),
            )
            if output is not None:
                streams, spare = spare, streams

        for index, (layer, weights) in enumerate(zip(self._stack.layers, self._streams, strict=True)):
            before_attention, before_experts = layer.norms
            read(weights[0], before_attention, index - 1, normed)
            # Whether the sum is made in parts decides its bits, and must not follow from how few rows there are.
            may_be_parts = self._group.size == 1 or (self._exchanges and count <= MOST_ROWS)
            output = self._parts(layer.attention.by_kernels(normed, index, rows, may_be_parts))
            # The streams between the two sub-blocks of a layer are nobody's tap.
            read(weights[1], before_experts, -2, normed)
            may_be_parts = self._group.size == 1 or self._group.adds_parts
            output = self._parts(layer.experts.own_part(normed, token_ids, may_be_parts))
        taken = torch.empty_like(normed)
        hidden = torch.empty_like(normed)
        read(self._head, self._norm, len(self._stack.layers) - 1, hidden, taken)
        return taken, hidden, streams, tapped

    def _parts(self, part: Tensor) -> Tensor | PartList | Sent:
        """Of all ranks: part [N, d], or partial sums of it [P, N, d]."""
        if self._group.size == 1:
            return part
        exchange = self._group.exchange(*part.shape[-2:]) if self._exchanges else None
        if exchange is not None:
            return Sent(part, exchange)
        parts = self._group.parts(part) if part.dim() == 2 else self._group.parts_of_sum(part)
        return PartList(tuple(parts), self._group.addresses(parts))
