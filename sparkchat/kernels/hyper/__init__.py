"""Residual streams between two sub-blocks: what the one wrote is merged, what the other reads is made and normed.

Shapes: N rows, S streams, d hidden size, P parts of an output, Q = 2 S + S^2 numbers of a connection (S of a head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.kernels.hyper.plan import PLAN, ConnectPlan, words_of
from sparkchat.kernels.hyper.reference import connect_streams_reference
from sparkchat.kernels.ranks.exchange import Sent


@dataclass(frozen=True)
class StreamWeights:
    """How numbers are made of all streams of a row."""

    fn: Tensor
    """[Q, S*d] float32"""
    base: Tensor
    """[Q] float32"""
    scale: Tensor
    """[Q] float32"""
    streams: int
    """S"""
    rms_eps: float
    eps: float
    """Added to what is read of a stream, and in the balancing of the combination."""
    iterations: int
    """Of the balancing of a combination."""

    @property
    def is_head(self) -> bool:
        """Whether it only reads."""
        return self.fn.shape[0] == self.streams


@dataclass(frozen=True)
class PartList:
    """Parts of one output that lie anywhere the device can read, as those of other ranks do: added in this order."""

    tensors: tuple[Tensor, ...]
    """[N, d] each, of one dtype and row stride"""
    addresses: Tensor
    """[P] int64, on the device"""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PartList:
        """Raises ValueError where the tensors are not laid out alike."""
        if len({(t.dtype, t.stride(), t.shape[1]) for t in tensors}) != 1 or tensors[0].stride(1) != 1:
            raise ValueError("the parts of an output must have one dtype and one layout")
        where = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
        return cls(tuple(tensors), where.to(tensors[0].device))


@dataclass(frozen=True)
class HyperWorkspace:
    """Sums of some columns of every row, and how many rounds there have been."""

    sums: Tensor
    """[N, programs * words] int64: a float32, and above it the number of the round that it was made in"""
    rounds: Tensor
    """[N] int32"""


def hyper_workspace(
    max_rows: int, hidden_size: int, device: torch.device, streams: int = 4, plan: ConnectPlan = PLAN
) -> HyperWorkspace:
    """Room for ``max_rows`` rows. One workspace serves all connections of a stream of launches, one after the other."""
    words = plan.of_width(hidden_size).programs * sum(words_of(streams))
    return HyperWorkspace(
        torch.zeros((max_rows, words), dtype=torch.int64, device=device),
        torch.zeros(max_rows, dtype=torch.int32, device=device),
    )


def connect_streams(
    streams: Tensor,
    weights: StreamWeights,
    workspace: HyperWorkspace,
    *,
    output: Tensor | PartList | Sent | None = None,
    mix: Tensor | None = None,
    merged: Tensor | None = None,
    next_mix: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    out: Tensor | None = None,
    taken: Tensor | None = None,
    tap: Tensor | None = None,
) -> None:
    """Merge the output of the sub-block before, and read the input of the next one.

    streams [N, S, d] before the sub-block; output [N, d], partial sums [P, N, d] that are added in order, or parts
    anywhere, or of this rank to be added to those of others; mix [N, S + S^2] float32 as the call before left it in
    ``next_mix`` (which may be the same tensor), numbers that become a mix when they are merged by; merged [N, S, d],
    not the streams themselves, receives the streams behind the sub-block. Without an output the streams are read as
    they are. norm [d] float32.

    Receive: out [N, d] what is read, normed; taken [N, d] the same before the norm; tap [N, d] (row stride free) the
    mean of the streams that are read. Raises ValueError for shapes that no kernel takes.
    """
    if not streams.is_cuda:
        assert not isinstance(output, Sent), "ranks exchange rows on GPUs"
        connect_streams_reference(
            streams, weights, output, mix, merged, next_mix, norm, norm_eps, out, taken, tap
        )  # fmt: skip
        return
    from sparkchat.kernels.hyper.kernel import launch_connect_streams

    launch_connect_streams(
        streams, weights, workspace, output, mix, merged, next_mix, norm, norm_eps, out, taken, tap
    )  # fmt: skip
