"""Attention and the two products behind it in one launch, against the three by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.latent_rows import NAN, Rows, latents_of, rope_of, rows_of
from kernels.test_fp8_linear import half, weight_of
from kernels.test_latent_attention import ROPE, SHAPE, SIZE, WINDOW
from sparkchat.kernels.fp8 import TiledFp8, fp8_linear
from sparkchat.kernels.latent_attention import LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import launch_latent_attention
from sparkchat.kernels.latent_attention.output import PLAN, OutputWeights, attend_to_output, output_reference
from sparkchat.kernels.latent_attention.output_kernel import launch_attend_to_output

HEADS, GROUPS, MID, OUTS = 8, 2, 128, 32


class Layer:
    """Rows behind their latents, and weights."""

    def __init__(self, spans: list[tuple[int, int, int]], device: torch.device, ratio: int, topk: int = 0) -> None:
        self.rows, kind = rows_of(spans, WINDOW, device), half(device)
        self.context, self.shape = max(s + n for _, s, n in spans), replace(SHAPE, ratio=ratio, topk=topk)
        self.cache = latents_of(spans, SHAPE.ring, ratio, SIZE, device, kind)
        self.rope, self.sinks = rope_of(self.context, ROPE, device), torch.randn(HEADS, device=device)
        self.q = torch.randn(len(self.rows.rows), HEADS * SIZE, device=device).to(kind)
        small = [weight_of(out, size, device) for out, size in ((MID, HEADS * SIZE // GROUPS), (OUTS, MID))]
        small = [TiledFp8(w.tiles, w.scales * 0.03) for w in small]
        self.weights = OutputWeights(*small, GROUPS)
        self.chosen = None
        if topk:
            self.chosen = torch.full((len(self.q), topk), 10**6, dtype=torch.int32, device=device)
            for n, position in enumerate(self.rows.positions.tolist()):
                if (position + 1) // ratio > topk:
                    self.chosen[n] = torch.randperm((position + 1) // ratio, device=device)[:topk].int()

    def given(self, some: slice) -> tuple[Tensor, ...]:
        rows: Rows = self.rows
        cut = [t[some] for t in (rows.rows, rows.positions, rows.first_seen, rows.ends)]
        return self.q[some], self.cache, *cut, self.rope, self.sinks

    def space(self, shape: LatentShape):  # type: ignore[no-untyped-def]
        space = latent_workspace(len(self.q), HEADS, SIZE, latent_spans(shape, self.context), self.q.device)
        space.mixed.fill_(NAN)
        return space

    def run(self, some: slice = slice(None), launches: tuple[tuple[int, int], ...] = ((0, 3),)) -> Tensor:
        given = self.given(some)
        out = torch.full((len(given[0]), OUTS), NAN, device=self.q.device)
        chosen = None if self.chosen is None else self.chosen[some]
        launch_attend_to_output(
            *given, self.weights, out, self.space(self.shape), self.shape, self.context, chosen, None,
            replace(PLAN, launches=launches),
        )  # fmt: skip
        return out


@pytest.mark.parametrize(("ratio", "topk"), [(0, 0), (4, 6)])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_against_the_reference(ratio: int, topk: int, is_rounded: bool, device: torch.device) -> None:
    layer = Layer([(2, 0, 1), (0, 31, 2), (1, 61, 1)], device, ratio, topk)
    layer.weights = replace(layer.weights, is_rounded=is_rounded)
    got, want = layer.run(), torch.full((4, OUTS), NAN, device=device)
    output_reference(*layer.given(slice(None)), layer.weights, want, layer.shape, layer.chosen)
    # A number on the edge between two roundings may fall to either side.
    assert (got - want).norm() < (0.02 if is_rounded else 2e-3) * want.norm()


def test_as_the_launches_by_themselves(device: torch.device) -> None:
    layer = Layer([(2, 0, 1), (0, 31, 2)], device, 4)
    heads = torch.full((3, HEADS, SIZE), NAN, dtype=layer.q.dtype, device=device)
    q, *rest = layer.given(slice(None))
    launch_latent_attention(q, *rest, heads, layer.space(layer.shape), layer.shape, layer.context, None)
    inner = torch.full((3, MID), NAN, dtype=layer.q.dtype, device=device)
    out = torch.full((3, OUTS), NAN, device=device)
    fp8_linear(heads.flatten(1), layer.weights.inner, inner, groups=GROUPS)
    fp8_linear(inner, layer.weights.output, out)
    together = layer.run()
    torch.testing.assert_close(together, out, atol=2e-3, rtol=2e-3)
    assert torch.equal(layer.run(launches=((0, 1), (2, 3))), together)
    # A row does not depend on those beside it.
    torch.testing.assert_close(layer.run(slice(1, 2)), together[1:2], atol=1e-4, rtol=1e-4)


def test_the_call_leaves_what_the_reference_leaves() -> None:
    layer = Layer([(0, 5, 2)], torch.device("cpu"), 0)
    outs = torch.full((2, 2, OUTS), NAN)
    given, space = layer.given(slice(None)), layer.space(layer.shape)
    attend_to_output(*given, layer.weights, outs[0], space, layer.shape, context=layer.context)
    output_reference(*given, layer.weights, outs[1], layer.shape, None)
    assert torch.equal(outs[0], outs[1]) and not outs.isnan().any()
