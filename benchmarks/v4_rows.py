"""What benchmarks/kernels.py times of streams, latents, entries and choices of DeepSeek-V4-Flash on one of two GPUs.

Bytes are those of distinct inputs; what is read for several rows is counted once. A case of less than a few MB is found
in the L2 cache, where the step of a whole model would not find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from kernel_inputs import Case, Maker, Run
from torch import Tensor
from v4_small import V4_SMALL_GROUPS

from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.kernel import Tile as PoolTile
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.hyper import HyperWorkspace, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.hyper.plan import TRIED, TRIED_OF_MANY
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.indexer.kernel import HALF_TILE as SCORE_TILE
from sparkchat.kernels.indexer.kernel import Tile as ScoreTile
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.latent_attention import LatentRows, LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import (
    HALF_TILE,
    Tile,
    launch_latent_attention,
    launch_write_latents,
)
from sparkchat.kernels.launch import overlap
from sparkchat.kernels.ranks.exchange import MOST_ROWS

D, STREAMS, LATENT, ROPE, HEADS, RING, WINDOW, TOPK = 4096, 4, 512, 64, 32, 256, 128, 512
INDEX_HEADS, INDEX = 64, 128
MOST_SETS = 40


def both(run: Run) -> dict[str, Run]:
    """As it is, and started before what precedes it has ended."""

    def overlapped(i: int) -> None:
        with overlap():
            run(i)

    return {"used": run, "overlapped": overlapped}


def where(make: Maker, requests: int, rows: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, cache rows and starts of requests with the same number of rows, the last one below ``context``."""
    positions = make.ints(*[context - rows + i for _ in range(requests) for i in range(rows)]).long()
    owners = make.ints(*[r for r in range(requests) for _ in range(rows)])
    return positions, owners, make.ints(*range(0, requests * rows + 1, rows))


def stream_cases(make: Maker) -> Iterator[Case]:
    for rows in (1, 6, 24, 96, 384):
        each = 4 * 24 * STREAMS * D
        count = min(MOST_SETS, make.sets(each))
        weights = [
            StreamWeights(make.floats(24, STREAMS * D, scale=0.01), make.floats(24), make.floats(24), STREAMS, 1e-6,
                          1e-6, 20)
            for _ in range(count)
        ]  # fmt: skip
        streams, parts = make.half(rows, STREAMS, D, scale=1.0), make.floats(4, rows, D)
        merged, mix, norm = torch.empty_like(streams), make.floats(rows, STREAMS * (STREAMS + 1)), make.floats(D)
        out, fixed = make.half(rows, D), (parts, mix, merged, mix, norm, 1e-6)
        variants: dict[str, Run] = {}
        for plan in TRIED if rows <= MOST_ROWS else TRIED_OF_MANY:
            space = hyper_workspace(rows, D, make.device, plan=plan)
            tile = "" if rows <= MOST_ROWS else f", {plan.tile_rows} rows"
            variants[f"{plan.programs} programs, {plan.warps} warps{tile}"] = partial(
                _connect, streams=streams, weights=weights, space=space, fixed=(*fixed, out, None, None, plan)
            )
        yield Case(f"v4 streams {rows} rows", each + rows * D * (4 * STREAMS + 16 + 2), count, variants)


def _connect(
    i: int,
    streams: Tensor,
    weights: list[StreamWeights],
    space: HyperWorkspace,
    fixed: tuple,
) -> None:
    launch_connect_streams(streams, weights[i], space, *fixed)


TILES = {
    "used": HALF_TILE,
    "a program a span": replace(HALF_TILE, many_rows=1 << 30),
    "a program a row": replace(HALF_TILE, many_rows=1),
    "a program a row, 16 heads": replace(HALF_TILE, many_rows=1, many_heads=16),
    "a program a row, stages 3": replace(HALF_TILE, many_rows=1, many_stages=3),
    "a program a span, keys after queries": replace(HALF_TILE, many_rows=1 << 30, reads_ahead=False),
    "spans of 32": replace(HALF_TILE, keys=32, warps=4, span=32),
}
CONTEXTS = ((1, 2200, 1), (1, 2200, 6), (1, 65536, 6), (16, 2200, 4), (16, 2200, 1))
"""Requests, context, rows of each."""


def attention_cases(make: Maker) -> Iterator[Case]:
    for ratio in (0, 4, 128):
        for requests, context, rows in CONTEXTS:
            shape = LatentShape(16, RING, ratio, ROPE, 1e-6, TOPK if ratio == 4 else 0)
            entries = context // ratio if ratio else 0
            slots, seen = 16 + RING + entries, min(entries, TOPK) if ratio == 4 else entries
            each = requests * (WINDOW + rows - 1 + seen) * LATENT * 2
            count = min(MOST_SETS, make.sets(requests * slots * LATENT * 2))
            caches = [make.half(requests, slots, LATENT, scale=1.0) for _ in range(count)]
            total = requests * rows
            positions, owners, _ = where(make, requests, rows, context)
            q, out = make.half(total, HEADS * LATENT, scale=1.0), make.half(total, HEADS, LATENT)
            chosen = torch.linspace(0, max(entries - 2, 0), TOPK, device=make.device).int().repeat(total, 1)
            space = latent_workspace(total, HEADS, LATENT, latent_spans(shape, context), make.device)
            fixed = (
                owners,
                positions,
                positions - WINDOW + 1,
                positions + 1,
                make.floats(context, ROPE),
                make.floats(HEADS),
            )

            picked = chosen if shape.topk else None
            run = partial(_attend, q=q, caches=caches, fixed=(*fixed, out, space, shape, context, picked))
            variants: dict[str, Run] = {label: partial(run, tile=tile) for label, tile in TILES.items()}
            name = f"v4 attention /{ratio} {requests}x{context}, {rows} rows"
            yield Case(name, each, count, variants if ratio else both(variants["used"]))


def _attend(i: int, q: Tensor, caches: list[Tensor], fixed: tuple, tile: Tile) -> None:
    launch_latent_attention(q, caches[i], *fixed, tile)


def latent_cases(make: Maker) -> Iterator[Case]:
    for rows in (1, 6, 64):
        positions, owners, _ = where(make, 1, rows, 2048)
        product, cache = make.floats(4, rows, 1024 + LATENT), make.half(1, 16 + RING, LATENT)
        fixed = (make.floats(LATENT), positions, owners, make.floats(2048, ROPE), cache)
        low, shape = (make.floats(1024), make.half(rows, 1024)), LatentShape(16, RING, 0, ROPE, 1e-6)
        run = partial(_write_latents, product=product, fixed=fixed, shape=shape, low=low)
        yield Case(f"v4 latents {rows} rows", rows * 1536 * (4 * 4 + 2), 1, both(run))


def _write_latents(_: int, product: Tensor, fixed: tuple, shape: LatentShape, low: tuple) -> None:
    launch_write_latents(product[..., 1024:], *fixed, shape, product[..., :1024], *low)


def pool_cases(make: Maker) -> Iterator[Case]:
    for ratio, requests, rows in ((4, 1, 6), (4, 64, 6), (128, 1, 6), (128, 64, 6)):
        halves, total = 2 if ratio == 4 else 1, requests * rows
        # The last row closes an entry.
        positions, owners, starts = where(make, requests, rows, 2048)
        spans = positions.view(requests, rows)[:, :1].repeat(1, rows).flatten()

        def pool(width: int, is_index: bool, halves=halves, total=total, requests=requests, ratio=ratio) -> Pool:
            kv, scores = make.floats(total, 2 * halves * width).chunk(2, dim=-1)
            raw = make.floats(requests, halves * ratio + 16, 2 * halves * width)
            entries = make.half(requests, 1024, width)
            bias, norm = make.floats(ratio, halves * width), make.floats(width)
            return Pool(kv, scores, bias, norm, raw, entries, 0, is_index)

        pools = [pool(LATENT, False), *([pool(INDEX, True)] if ratio == 4 else [])]
        width = sum(p.norm.shape[0] for p in pools) * halves
        each = 4 * 2 * width * (requests * ratio + 2 * total)
        fixed = (
            pools,
            positions,
            owners,
            starts,
            spans,
            make.floats(2048, ROPE),
            PoolShape(ratio, ratio == 4, ROPE, 1e-6),
        )
        name = f"/{ratio} {requests}x{rows} rows"
        for what, beside in (("entries", None), ("entries and latents", _latent_rows(make, total, ratio, requests))):
            run = partial(_compress, fixed=(*fixed, beside))
            pooled = {f"{t} tokens, {w} warps": partial(run, tile=PoolTile(t, w)) for t, w in ((8, 4), (8, 8), (16, 8))}
            yield Case(f"v4 {what} {name}", each, 1, {**both(run), **pooled})


def _latent_rows(make: Maker, rows: int, ratio: int, requests: int) -> LatentRows:
    product, cache = make.floats(4, rows, 1024 + LATENT), make.half(requests, 16 + RING, LATENT)
    shape, low = LatentShape(16, RING, ratio, ROPE, 1e-6), product[..., :1024]
    norms = make.floats(LATENT), make.floats(1024)
    return LatentRows(product[..., 1024:], norms[0], cache, shape, low, norms[1], make.half(rows, 1024))


def _compress(_: int, fixed: tuple, tile: PoolTile | None = None) -> None:
    launch_compress_rows(*fixed, tile)


SCORE_TILES = {
    "used": SCORE_TILE,
    "64 entries": ScoreTile(64, 4, 2),
    "256 entries, 8 warps": ScoreTile(256, 8, 2),
    "1024 scores a warp": replace(SCORE_TILE, held=1024),
    "512 scores a warp": replace(SCORE_TILE, held=512),
    "64 entries, 512 scores": ScoreTile(64, 4, 2, 512),
}


def choice_cases(make: Maker) -> Iterator[Case]:
    for requests, context, rows in (
        (1, 2200, 1),
        (1, 2200, 6),
        (16, 2200, 4),
        (1, 65536, 6),
        (1, 65536, 1),
        (16, 16384, 4),
    ):
        shape, total, entries = IndexShape(INDEX_HEADS, INDEX, ROPE, 4, TOPK), requests * rows, context // 4
        each = requests * entries * INDEX * 2
        count = min(MOST_SETS, make.sets(each))
        keys = [make.half(requests, entries, INDEX, scale=1.0) for _ in range(count)]
        positions, owners, starts = where(make, requests, rows, context)
        q, weights = make.half(total, INDEX_HEADS * INDEX, scale=1.0), make.floats(total, INDEX_HEADS)
        scores = index_scores_of(total, context, shape, make.device)
        rest = (positions, owners, starts, make.floats(context, ROPE), scores, make.ints(*[0] * TOPK).repeat(total, 1))

        def run(i: int, tile: ScoreTile, q=q, weights=weights, keys=keys, rest=rest, shape=shape, context=context,
                rows=rows) -> None:  # fmt: skip
            launch_choose_entries(q, weights, keys[i], *rest, shape, context, rows, None, tile)

        variants = {label: partial(run, tile=tile) for label, tile in SCORE_TILES.items()}
        yield Case(f"v4 choice {requests}x{context}, {rows} rows", each, count, variants)


V4_ROW_GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "v4-streams": stream_cases,
    "v4-attention": attention_cases,
    "v4-latents": latent_cases,
    "v4-entries": pool_cases,
    "v4-choice": choice_cases,
    **V4_SMALL_GROUPS,
}
