"""Sequential heads and the confidence head (paper sections 3.2 and 3.3; bias terms as in the published weights).

Shapes: R requests, d hidden size, r Markov rank, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparkchat.models.linear import Linear, make_lanes
from sparkchat.models.weights import TensorSource


class SequentialHead(Protocol):
    """Turns the previously drafted token into a bias on the next draft's logits."""

    embedding: Tensor
    """[V, r] W1, a row per target token."""

    def initial_state(self, count: int) -> Tensor:
        """[R, r] for heads that carry one, else [R, 0]."""
        ...

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """previous [R] target ids, hidden [R, d] -> bias [R, Vd] float32, the next state."""
        ...


class VanillaHead:
    """B = W2 W1[x]"""

    def __init__(self, w1: Tensor, w2: Linear, w2_rows: Tensor | None) -> None:
        """w2_rows [Vd, r] is W2 unpacked, for biases of chosen tokens alone; None where none are asked for."""
        self.embedding, self.w2, self.w2_rows = w1, w2, w2_rows

    def initial_state(self, count: int) -> Tensor:
        return torch.zeros((count, 0), device=self.embedding.device)

    def vector(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 is applied to, [R, r], and the next state."""
        return self.embedding[previous], state

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        e, state = self.vector(previous, hidden, state)
        return self.w2(e.to(self.w2.dtype)).float(), state

    def rows_of(self, columns: Tensor) -> Tensor:
        """columns [...] draft ids -> their rows of W2 [..., r] float32."""
        assert self.w2_rows is not None
        return self.w2_rows.index_select(0, columns.flatten()).view(*columns.shape, -1).float()


class GatedHead(VanillaHead):
    """B = W2 (sigmoid(gate [h; e]) * e), e = W1[x]"""

    def __init__(self, w1: Tensor, w2: Linear, w2_rows: Tensor | None, gate: Linear) -> None:
        super().__init__(w1, w2, w2_rows)
        self._gate = gate

    def vector(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embedding[previous].float()
        gate = self._gate(torch.cat([hidden.float(), e], dim=-1).to(self._gate.dtype)).float().sigmoid()
        return gate * e, state


class RnnHead(VanillaHead):
    """[gate, cand, out] = joint [s; e; h]; B = W2 tanh(out); s' = sig(gate) s + (1 - sig(gate)) tanh(cand)"""

    def __init__(self, w1: Tensor, w2: Linear, w2_rows: Tensor | None, joint: Linear) -> None:
        super().__init__(w1, w2, w2_rows)
        self._joint = joint

    def initial_state(self, count: int) -> Tensor:
        return torch.zeros((count, self.embedding.shape[1]), device=self.embedding.device)

    def vector(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        e = self.embedding[previous].float()
        joint = self._joint(torch.cat([state, e, hidden.float()], dim=-1).to(self._joint.dtype)).float()
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()


class ConfidenceHead:
    """logit of P(draft accepted | those before it accepted) = w . [h; W1[x]] + b, in float32"""

    def __init__(self, weight: Tensor, bias: Tensor | None, embedding: Tensor | None) -> None:
        """weight [d] or [d + r] float32; ``embedding`` W1 goes with the longer form."""
        size = weight.shape[0] - (0 if embedding is None else embedding.shape[1])
        self._on_hidden, self._on_markov = weight[:size], weight[size:]
        self._bias, self._embedding = bias, embedding

    @property
    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight [d] or [d + r] and bias [1] or None, float32."""
        bias = None if self._bias is None else self._bias.reshape(1)
        return torch.cat([self._on_hidden, self._on_markov]).contiguous(), bias

    def __call__(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """previous [R] target ids, hidden [R, d] -> [R]"""
        logit = (hidden.float() * self._on_hidden).sum(-1)
        if self._embedding is not None:
            logit += (self._embedding[previous].float() * self._on_markov).sum(-1)
        return logit if self._bias is None else logit + self._bias


def load_head(
    source: TensorSource, kind: str, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> VanillaHead:
    """Take the head's tensors. ``sizes`` are V, Vd, d, r. Raises DamagedFile."""
    vocab, draft_vocab, d, r = sizes

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        weight = source.take(f"markov_head.{name}.weight", outputs, inputs)
        has_bias = f"markov_head.{name}.bias" in source
        bias = source.take(f"markov_head.{name}.bias", outputs) if has_bias else None
        return make_lanes(weight, bias, device=device, dtype=dtype)

    w1 = source.take("markov_head.markov_w1.weight", vocab, r).to(device=device, dtype=dtype)
    # Biases of chosen tokens alone pay on the CPU only.
    w2_weight = source.take("markov_head.markov_w2.weight", draft_vocab, r)
    rows = w2_weight.to(dtype) if device.type == "cpu" else None
    w2 = linear("markov_w2", draft_vocab, r)
    if kind == "gated":
        return GatedHead(w1, w2, rows, linear("gate_proj", r, d + r))
    if kind == "rnn":
        return RnnHead(w1, w2, rows, linear("joint_proj", 3 * r, 2 * r + d))
    return VanillaHead(w1, w2, rows)


def load_confidence(source: TensorSource, d: int, embedding: Tensor | None, device: torch.device) -> ConfidenceHead:
    """Take the confidence head's tensors; float32, because calibration works on its logits. Raises DamagedFile.

    Numbers that are none are let through: a confidence is only advice, and the engine does without it.
    """
    width = d + (0 if embedding is None else embedding.shape[1])
    weight = source.take("confidence_head.proj.weight", 1, width, allow_nan=True)[0].float().to(device)
    bias = None
    if "confidence_head.proj.bias" in source:
        bias = source.take("confidence_head.proj.bias", 1, allow_nan=True)[0].float().to(device)
    return ConfidenceHead(weight, bias, embedding)
