"""The published roundings: each against its definition, and all of them in their places in a whole trunk."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.deepseek_v4.trunks import Trunk, make_trunk, random_ids, run_chunks
from sparkchat.errors import UsageError
from sparkchat.models.deepseek_v4.rounding import hadamard, round_e2m1, round_e4m3

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES: dict[str, Any] = {
    "compress_ratios": [0, 4, 8, 4],
    "num_hidden_layers": 4,
    "hidden_size": 160,
    "head_dim": 96,
    "index_head_dim": 64,
    "moe_intermediate_size": 144,
}


def fp8_by_definition(x: Tensor, block: int) -> Tensor:
    out = []
    for part in x.split(block, dim=-1):
        scale = torch.exp2((part.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil())
        out.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(out, dim=-1)


def fp4_by_definition(x: Tensor, block: int) -> Tensor:
    out = []
    for part in x.split(block, dim=-1):
        scale = torch.exp2((part.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6).log2().ceil())
        nearest = ((part / scale).abs().unsqueeze(-1) - FP4).abs().argmin(-1)
        out.append(FP4[nearest] * part.sign() * scale)
    return torch.cat(out, dim=-1)


@pytest.mark.parametrize("width", [128, 64, 200, 7])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_eight_bits(width: int, size: float) -> None:
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(width)) * size
    assert torch.equal(round_e4m3(x, 64), fp8_by_definition(x, 64))
    assert torch.equal(round_e4m3(torch.zeros(2, width), 64), torch.zeros(2, width))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e8])
def test_four_bits(size: float) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * size
    assert torch.equal(round_e2m1(x, 32), fp4_by_definition(x, 32))
    assert torch.equal(round_e2m1(torch.zeros(2, 64), 32), torch.zeros(2, 64))


def test_rounding_again_changes_nothing() -> None:
    x = torch.randn(20, 128)
    for rounded in (round_e4m3(x, 64), round_e2m1(x, 32)):
        assert not torch.equal(rounded, x)
    assert torch.equal(round_e4m3(round_e4m3(x, 64), 64), round_e4m3(x, 64))


def test_the_largest_of_a_block_keeps_its_place_in_the_range() -> None:
    """448 and 6 are exact: the scale is the smallest power of two that reaches them, not the next one."""
    assert round_e4m3(torch.tensor([448.0, 1.0]), 2).tolist() == [448.0, 1.0]
    assert round_e4m3(torch.tensor([449.0, 1.0]), 2)[0] == 448.0
    assert round_e2m1(torch.tensor([6.0, 0.5]), 2).tolist() == [6.0, 0.5]
    assert round_e2m1(torch.tensor([6.1, 0.5]), 2).tolist() == [6.0, 0.0]


def test_hadamard_is_orthogonal_and_its_own_inverse() -> None:
    matrix = hadamard(64, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix, torch.eye(64), atol=1e-6)
    signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)])
    assert torch.allclose(matrix, signs / 8)
    with pytest.raises(ValueError, match="power of two"):
        hadamard(48, torch.device("cpu"))


def test_roundings_need_an_index_head_that_can_be_rotated() -> None:
    with pytest.raises(UsageError, match="power of two"):
        make_trunk(**{**SIZES, "index_head_dim": 48}, has_roundings=True)


class ByDefinition:
    """A trunk over a whole text at once, from the published description; no cache, no batching."""

    def __init__(self, trunk: Trunk, is_rounded: bool) -> None:
        self.w, self.c, self.is_rounded = trunk.weights, trunk.ours.config, is_rounded

    def logits(self, ids: Tensor) -> Tensor:
        c, w = self.c, self.w
        x = w["embed.weight"][ids].unsqueeze(1).repeat(1, c.hc_mult, 1)
        for layer, ratio in enumerate(c.compress_ratios):
            p = f"layers.{layer}."
            for kind in ("attn", "ffn"):
                pre, post, comb = self.stream_weights(x, f"{p}hc_{kind}", c.hc_width)
                u = self.norm(torch.einsum("nj,njd->nd", pre, x), f"{p}{kind}_norm")
                y = self.attention(u, f"{p}attn.", ratio) if kind == "attn" else self.experts(u, f"{p}ffn.", ids)
                x = torch.einsum("nk,nd->nkd", post, y) + torch.einsum("njk,njd->nkd", comb, x)
        pre, _, _ = self.stream_weights(x, "hc_head", c.hc_mult)
        return self.norm(torch.einsum("nj,njd->nd", pre, x), "norm") @ w["head.weight"].T

    def stream_weights(self, x: Tensor, name: str, width: int) -> tuple[Tensor, Tensor, Tensor]:
        c, w = self.c, self.w
        flat, s = x.flatten(1), c.hc_mult
        m = flat @ w[f"{name}_fn"].T * (flat.square().mean(-1, keepdim=True) + c.rms_eps) ** -0.5
        scale, base = w[f"{name}_scale"], w[f"{name}_base"]
        pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + c.hc_eps
        if width == s:
            return pre, pre, pre
        post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
        comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s).softmax(-1) + c.hc_eps
        for turn in range(c.hc_sinkhorn_iters):
            if turn:
                comb = comb / (comb.sum(2, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + c.hc_eps)
        return pre, post, comb

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.c.rms_eps) ** -0.5 * self.w[f"{name}.weight"]

    def fp8(self, x: Tensor, name: str) -> Tensor:
        x = fp8_by_definition(x, 128) if self.is_rounded else x
        return x @ self.w[f"{name}.weight"].T

    def turn(self, x: Tensor, positions: Tensor, ratio: int, sign: float = 1.0) -> Tensor:
        """x [n, ..., c]"""
        size = self.c.rope_dim
        theta = 160000.0 if ratio else 10000.0
        angles = theta ** (-torch.arange(0, size, 2).double() / size)
        if ratio:
            dims = [size * math.log(65536 / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in (32, 1)]
            low, high = max(math.floor(dims[0]), 0), min(math.ceil(dims[1]), size - 1)
            ramp = ((torch.arange(size // 2) - low) / (high - low)).clamp(0, 1)
            angles = angles * (1 - ramp) + angles / 16 * ramp
        turns = torch.polar(torch.ones(()).double(), sign * positions.double().unsqueeze(-1) * angles)
        pairs = torch.view_as_complex(x[..., -size:].double().unflatten(-1, (-1, 2)).contiguous())
        turns = turns.view(len(positions), *[1] * (x.dim() - 2), size // 2)
        return torch.cat([x[..., :-size], torch.view_as_real(pairs * turns).flatten(-2).float()], -1)

    def rounded_latent(self, x: Tensor) -> Tensor:
        size = x.shape[-1] - self.c.rope_dim
        return torch.cat([fp8_by_definition(x[:, :size], 64), x[:, size:]], -1) if self.is_rounded else x

    def rotated(self, x: Tensor) -> Tensor:
        return fp4_by_definition(x @ hadamard(x.shape[-1], x.device), 32) if self.is_rounded else x

    def entries(self, x: Tensor, p: str, ratio: int) -> Tensor:
        w = self.w
        kv, gate = x @ w[f"{p}wkv.weight"].T, x @ w[f"{p}wgate.weight"].T
        width, out = w[f"{p}norm.weight"].shape[0], []
        for entry in range(len(x) // ratio):
            values, scores = [], []
            for back in range(-ratio if ratio == 4 else 0, ratio):
                t = entry * ratio + back
                if t >= 0:
                    part = slice(0, width) if back < 0 else slice(kv.shape[1] - width, None)
                    values.append(kv[t, part])
                    scores.append((gate[t] + w[f"{p}ape"][t % ratio])[part])
            out.append((torch.stack(scores).softmax(0) * torch.stack(values)).sum(0))
        pooled = self.norm(torch.stack(out), f"{p}norm")
        return self.turn(pooled, torch.arange(len(out)) * ratio, ratio)

    def attention(self, x: Tensor, p: str, ratio: int) -> Tensor:
        c, w, positions = self.c, self.w, torch.arange(len(x))
        low_rank = self.norm(self.fp8(x, f"{p}wq_a"), f"{p}q_norm")
        q = self.fp8(low_rank, f"{p}wq_b").unflatten(-1, (c.num_heads, c.head_dim))
        q = self.turn(q * (q.square().mean(-1, keepdim=True) + c.rms_eps) ** -0.5, positions, ratio)
        keys = self.rounded_latent(self.turn(self.norm(self.fp8(x, f"{p}wkv"), f"{p}kv_norm"), positions, ratio))
        distance = positions.unsqueeze(1) - positions
        seen = (distance >= 0) & (distance < c.window)
        if ratio:
            keys = torch.cat([keys, self.rounded_latent(self.entries(x, f"{p}compressor.", ratio))])
            closed = torch.arange(len(x) // ratio) < (positions.unsqueeze(1) + 1) // ratio
            if ratio == 4:
                closed = closed & self.picked(x, low_rank, f"{p}indexer.", positions, closed)
            seen = torch.cat([seen, closed], dim=1)
        scores = torch.einsum("nhc,tc->nht", q, keys) / c.head_dim**0.5
        scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf).exp()
        total = scores.sum(-1, keepdim=True) + w[f"{p}attn_sink"].exp().unsqueeze(-1)
        o = self.turn(torch.einsum("nht,tc->nhc", scores / total, keys), positions, ratio, -1.0)
        o = o.flatten(1).unflatten(-1, (c.o_groups, -1))
        o = torch.einsum("ngd,grd->ngr", o, w[f"{p}wo_a.weight"].unflatten(0, (c.o_groups, -1)))
        return self.fp8(o.flatten(1), f"{p}wo_b")

    def picked(self, x: Tensor, low_rank: Tensor, p: str, positions: Tensor, closed: Tensor) -> Tensor:
        c = self.c
        q = self.fp8(low_rank, f"{p}wq_b").unflatten(-1, (c.index_num_heads, c.index_head_dim))
        q, k = self.rotated(self.turn(q, positions, 4)), self.rotated(self.entries(x, f"{p}compressor.", 4))
        weights = x @ self.w[f"{p}weights_proj.weight"].T * (c.index_head_dim * c.index_num_heads) ** -0.5
        scores = (torch.einsum("nhc,tc->nht", q, k).relu() * weights.unsqueeze(-1)).sum(1)
        best = scores.masked_fill(~closed, -math.inf).topk(min(c.index_topk, closed.shape[1])).indices
        return torch.zeros_like(closed).scatter_(1, best, True)

    def experts(self, x: Tensor, p: str, ids: Tensor) -> Tensor:
        c, w = self.c, self.w
        s = torch.nn.functional.softplus(x @ w[f"{p}gate.weight"].T).sqrt()
        if f"{p}gate.tid2eid" in w:
            chosen = w[f"{p}gate.tid2eid"][ids]
        else:
            chosen = (s + w[f"{p}gate.bias"]).topk(c.num_experts_per_token).indices
        weights = s.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c.routed_scale
        rows = []
        for n in range(len(x)):
            y = self.expert(x[n : n + 1], f"{p}shared_experts.", 1.0)
            for e, weight in zip(chosen[n].tolist(), weights[n], strict=True):
                y = y + self.expert(x[n : n + 1], f"{p}experts.{e}.", weight)
            rows.append(y)
        return torch.cat(rows)

    def expert(self, x: Tensor, p: str, weight: Tensor | float) -> Tensor:
        limit = self.c.swiglu_limit
        gate, up = self.fp8(x, f"{p}w1").clamp(max=limit), self.fp8(x, f"{p}w3").clamp(-limit, limit)
        return self.fp8(torch.nn.functional.silu(gate) * up * weight, f"{p}w2")


def logits_of(trunk: Trunk, ids: Tensor) -> Tensor:
    cache = trunk.ours.new_cache(1, 64, 64)
    return run_chunks(trunk.ours, cache, cache.allocate(), ids, (len(ids),))


def test_the_definition_agrees_without_roundings() -> None:
    trunk, ids = make_trunk(**SIZES), random_ids(30)
    wanted = ByDefinition(trunk, False).logits(ids)
    assert (logits_of(trunk, ids) - wanted).norm() / wanted.norm() < 1e-5


def test_roundings_are_where_the_definition_has_them() -> None:
    """A last bit that differs may round to the neighbour, so rows are compared one by one: most agree closely."""
    rounded, plain, ids = make_trunk(**SIZES, has_roundings=True), make_trunk(**SIZES), random_ids(30)
    wanted = ByDefinition(rounded, True).logits(ids)
    ours = logits_of(rounded, ids)
    error = (ours - wanted).norm(dim=1) / wanted.norm(dim=1)
    apart = (logits_of(plain, ids) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.median() < 1e-5 and (error < 1e-4).sum() >= 24
    assert apart.min() > 0.02
