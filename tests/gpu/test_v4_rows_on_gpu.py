"""Streams, latents, compressed entries and the choice among them on a GPU, at the shapes of DeepSeek-V4-Flash.

``tests/kernels`` runs on a GPU as well, where there is one. Needs torch, triton and pytest, and no other package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.latent_rows import FIRST_SLOT, Rows, latents_of, rope_of, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CUDA, HALF = torch.device("cuda"), torch.bfloat16
D, STREAMS, SIZE, ROPE, WINDOW, RING = 4096, 4, 512, 64, 128, 256
SPANS = [(0, 65000, 6), (1, 0, 3), (2, 2043, 8), (3, 4094, 1)]
"""Cache row, position of the first row, rows: long, first tokens, around the first choice among entries, one row."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def error(got: Tensor, want: Tensor) -> float:
    """Relative size of the difference."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def normal(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


# Streams


def streams_call(rows: int) -> tuple[dict[str, Any], Any]:
    from sparkchat.kernels.hyper import StreamWeights

    width = STREAMS * D
    fn = torch.randn(24, width, device=CUDA) * width**-0.5
    weights = StreamWeights(fn, normal(24, dtype=torch.float32), torch.ones(24, device=CUDA), STREAMS, 1e-6, 1e-6, 20)
    mix = torch.randn(rows, 20, device=CUDA)
    return {
        "streams": normal(rows, STREAMS, D),
        "output": normal(3, rows, D, dtype=torch.float32),
        "mix": mix,
        "merged": torch.empty(rows, STREAMS, D, device=CUDA, dtype=HALF),
        "next_mix": torch.full_like(mix, float("nan")),
        "norm": torch.rand(D, device=CUDA),
        "norm_eps": 1e-6,
        "out": torch.empty(rows, D, device=CUDA, dtype=HALF),
        "taken": torch.empty(rows, D, device=CUDA, dtype=HALF),
        "tap": torch.empty(rows, D, device=CUDA),
    }, weights


@pytest.mark.parametrize("rows", [1, 6, 20, 33, 384])
def test_streams(rows: int) -> None:
    from sparkchat.kernels.hyper import hyper_workspace
    from sparkchat.kernels.hyper.kernel import launch_connect_streams
    from sparkchat.kernels.hyper.reference import connect_streams_reference
    from sparkchat.kernels.launch import overlap

    call, weights = streams_call(rows)
    connect_streams_reference(weights=weights, **call)
    wanted = {name: call[name].clone() for name in ("merged", "next_mix", "out", "taken", "tap")}
    found = []
    space = hyper_workspace(rows, D, CUDA)
    # Round after round; started early, twice.
    for starts_early in (False, False, True, True):
        for name in wanted:
            call[name].fill_(float("nan"))
        with overlap(starts_early):
            launch_connect_streams(weights=weights, workspace=space, **call)
        found.append({name: call[name].clone() for name in wanted})
        for name, want in wanted.items():
            assert error(call[name], want) < 4e-3, name
            assert torch.equal(call[name], found[0][name]), name
    # By itself in one launch, whether those beside it took one or two.
    row = rows - 1
    alone = {
        n: v[:, row:] if n == "output" else v[row:] for n, v in call.items() if isinstance(v, Tensor) and n != "norm"
    }
    alone = {name: value.contiguous() for name, value in alone.items()}
    launch_connect_streams(weights=weights, workspace=space, norm=call["norm"], norm_eps=1e-6, **alone)
    assert all(torch.equal(alone[name][0], call[name][row]) for name in wanted)


# Attention


def attention_call(rows: Rows, heads: int, ratio: int, topk: int) -> tuple[dict[str, Any], Tensor | None]:
    from sparkchat.kernels.latent_attention import LatentShape

    cache = latents_of(SPANS, RING, ratio, SIZE, CUDA, HALF)
    chosen = None
    if topk:
        chosen = torch.zeros(len(rows.rows), topk, dtype=torch.int32, device=CUDA)
        for n, position in enumerate(rows.positions.tolist()):
            seen = (position + 1) // ratio
            if seen > topk:
                chosen[n] = torch.randperm(seen, device=CUDA)[:topk].sort().values.int()
    return {
        "q": normal(len(rows.rows), heads * SIZE),
        "cache": cache,
        "rows": rows.rows,
        "positions": rows.positions,
        "first_seen": rows.first_seen,
        "ends": rows.ends,
        "rope": rope_of(65536, ROPE, CUDA),
        "sinks": torch.randn(heads, device=CUDA),
        "shape": LatentShape(FIRST_SLOT, RING, ratio, ROPE, 1e-6, topk),
    }, chosen


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(("ratio", "topk"), [(0, 0), (4, 512), (128, 0)])
def test_attention(heads: int, ratio: int, topk: int) -> None:
    from sparkchat.kernels.latent_attention import latent_attention, latent_spans, latent_workspace
    from sparkchat.kernels.latent_attention.reference import latent_attention_reference

    rows = rows_of(SPANS, WINDOW, CUDA)
    call, chosen = attention_call(rows, heads, ratio, topk)
    want = torch.empty(len(rows.rows), heads, SIZE, device=CUDA)
    latent_attention_reference(**call, out=want, chosen=chosen)

    def attend(call: dict[str, Any], chosen: Tensor | None) -> Tensor:
        count = len(call["rows"])
        space = latent_workspace(count, heads, SIZE, latent_spans(call["shape"], 65536), CUDA)
        space.mixed.fill_(float("nan"))
        out = torch.full((count, heads, SIZE), float("nan"), device=CUDA, dtype=HALF)
        latent_attention(**call, out=out, workspace=space, context=65536, chosen=chosen)
        return out

    together = attend(call, chosen)
    for n in range(len(rows.rows)):
        assert error(together[n], want[n]) < 1e-2, n
        alone = {name: call[name][n : n + 1] for name in ("q", "rows", "positions", "first_seen", "ends")}
        one = attend({**call, **alone}, None if chosen is None else chosen[n : n + 1])
        assert torch.equal(one[0], together[n]), n
    # Many rows are cut in other ways, by which no row changes.
    for times in (2, 8):
        index = torch.arange(len(rows.rows), device=CUDA).repeat(times)
        more = {name: call[name][index] for name in ("q", "rows", "positions", "first_seen", "ends")}
        many = attend({**call, **more}, None if chosen is None else chosen[index])
        assert torch.equal(many, together[index]), times


def test_a_captured_attention_follows_the_positions() -> None:
    from sparkchat.kernels.latent_attention import latent_attention, latent_spans, latent_workspace
    from sparkchat.kernels.latent_attention.reference import latent_attention_reference
    from sparkchat.kernels.launch import overlap

    rows = rows_of(SPANS, WINDOW, CUDA)
    call, _ = attention_call(rows, 32, 128, 0)
    space = latent_workspace(len(rows.rows), 32, SIZE, latent_spans(call["shape"], 65536), CUDA)
    out = torch.empty(len(rows.rows), 32, SIZE, device=CUDA, dtype=HALF)
    graph = torch.cuda.CUDAGraph()
    latent_attention(**call, out=out, workspace=space, context=65536)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), overlap():
        latent_attention(**call, out=out, workspace=space, context=65536)
    for back in (0, 1, 100):
        for name, least in (("positions", 0), ("ends", 1), ("first_seen", -WINDOW)):
            call[name].sub_(back).clamp_(min=least)
        graph.replay()
        want = torch.empty(len(rows.rows), 32, SIZE, device=CUDA)
        latent_attention_reference(**call, out=want, chosen=None)
        seen = torch.isfinite(want).all(dim=(1, 2))
        assert int(seen.sum()) >= 14 and error(out[seen], want[seen]) < 1e-2


@pytest.mark.parametrize("has_roundings", [False, True])
def test_latents_and_low_ranks(has_roundings: bool) -> None:
    from sparkchat.kernels.latent_attention import LatentShape, write_latents
    from sparkchat.kernels.latent_attention.reference import write_latents_reference

    rows = rows_of(SPANS, WINDOW, CUDA)
    shape = LatentShape(FIRST_SLOT, RING, 0, ROPE, 1e-6, has_roundings=has_roundings)
    product = normal(4, len(rows.rows), 1536, dtype=torch.float32)
    made = []
    for call in (write_latents, write_latents_reference):
        cache = torch.zeros(4, FIRST_SLOT + RING, SIZE, device=CUDA, dtype=HALF)
        out = torch.empty(len(rows.rows), 1024, device=CUDA, dtype=HALF)
        norms = torch.linspace(0.5, 1.5, SIZE, device=CUDA), torch.linspace(0.5, 1.5, 1024, device=CUDA)
        fixed = (product[..., 1024:], norms[0], rows.positions, rows.rows, rope_of(65536, ROPE, CUDA), cache, shape)
        if call is write_latents:
            call(*fixed, low_rank=product[..., :1024], low_rank_norm=norms[1], out=out)
        else:
            call(*fixed, product[..., :1024], norms[1], out)  # type: ignore[call-arg]
        made.append((cache, out))
    assert all(error(got, want) < (2e-2 if has_roundings else 4e-3) for got, want in zip(*made, strict=True))


# Entries


@pytest.mark.parametrize(("ratio", "overlaps"), [(4, True), (128, False)])
@pytest.mark.parametrize("has_roundings", [False, True])
def test_entries(ratio: int, overlaps: bool, has_roundings: bool) -> None:
    from sparkchat.kernels.compressor import Pool, PoolShape, compress_rows
    from sparkchat.kernels.compressor.reference import compress_rows_reference
    from sparkchat.models.deepseek_v4.rounding import hadamard

    halves, count = 1 + overlaps, 7
    spans = [(0, 4091, count), (1, 0, count), (2, 250, count)]
    rows, rope = rows_of(spans, WINDOW, CUDA), rope_of(65536, ROPE, CUDA)
    shape = PoolShape(ratio, overlaps, ROPE, 1e-6)

    def pool(width: int, is_index: bool) -> Pool:
        product = normal(2, len(rows.rows), 2 * halves * width, dtype=torch.float32)
        kv, scores = product.chunk(2, dim=-1)
        rotation = hadamard(width, CUDA) if is_index and has_roundings else None
        ring = normal(4, halves * ratio + 15, 2 * halves * width, dtype=torch.float32)
        entries = torch.zeros(4, 1100, width, device=CUDA, dtype=HALF)
        bias, norm = normal(ratio, halves * width, dtype=torch.float32), torch.rand(width, device=CUDA) + 0.5
        return Pool(kv, scores, bias, norm, ring, entries, 0, is_index, rotation, has_roundings)

    pools = [pool(SIZE, False), *([pool(128, True)] if overlaps else [])]
    wanted = [replace(p, raw=p.raw.clone(), entries=p.entries.clone()) for p in pools]
    compress_rows(pools, rows.positions, rows.rows, rows.starts, rows.span_starts, rope, shape)
    for got, want in zip(pools, wanted, strict=True):
        compress_rows_reference(want, rows.positions, rows.rows, rows.starts, rope, shape)
        assert error(got.raw, want.raw) < 1e-6 and bool(want.entries.any())
        assert error(got.entries, want.entries) < (5e-2 if has_roundings else 4e-3)


@pytest.mark.parametrize("context", [4096, 65536, 131072])
def test_choice(context: int) -> None:
    from sparkchat.kernels.indexer import IndexShape, choose_entries, index_scores_of
    from sparkchat.kernels.indexer.reference import choose_entries_reference

    shape = IndexShape(64, 128, ROPE, 4, 512)
    spans = [(0, context - 7, 6), (1, 0, 3), (2, 2043, 8), (3, context // 2, 1)]
    rows = rows_of(spans, WINDOW, CUDA)
    count = len(rows.rows)
    batch = {
        "q": normal(count, 64 * 128),
        "weights": normal(count, 64, dtype=torch.float32),
        "keys": normal(4, context // 4, 128),
        "positions": rows.positions,
        "rows": rows.rows,
        "starts": rows.starts,
        "rope": rope_of(context, ROPE, CUDA),
        "shape": shape,
    }

    def choose(batch: dict[str, Any], most: int) -> tuple[Tensor, Tensor]:
        scores = index_scores_of(len(batch["rows"]), context, shape, CUDA).fill_(float("nan"))
        chosen = torch.full((len(batch["rows"]), 512), -1, dtype=torch.int32, device=CUDA)
        choose_entries(**batch, scores=scores, chosen=chosen, context=context, most_per_request=most)
        return scores, chosen

    scores, chosen = choose(batch, 8)
    want_scores, want = torch.full_like(scores, float("nan")), torch.full_like(chosen, -1)
    choose_entries_reference(**batch, scores=want_scores, chosen=want, rotation=None)
    for n, position in enumerate(rows.positions.tolist()):
        seen = (position + 1) // 4
        if seen <= 512:
            assert bool((chosen[n] == -1).all())
            continue
        assert error(scores[n, :seen], want_scores[n, :seen]) < 1e-2
        # Of its own scores the choice is exact.
        order = scores[n, :seen].argsort(descending=True, stable=True)[:512].sort().values
        assert torch.equal(chosen[n].long(), order)
    cut = {name: batch[name][5:6] for name in ("q", "weights", "positions", "rows")}
    starts = torch.tensor([0, 1], dtype=torch.int32, device=CUDA)
    assert torch.equal(choose({**batch, **cut, "starts": starts}, 1)[1][0], chosen[5])
