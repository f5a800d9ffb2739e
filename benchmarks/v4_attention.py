"""What benchmarks/kernels.py times of a whole attention sub-block of DeepSeek-V4-Flash on one of two GPUs: the launches
of a layer one after the other, each way to join them into fewer.

Weights go round sets larger than the L2 cache. The meeting of ranks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from kernel_inputs import Case, Maker
from torch import Tensor

from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.input import InputPlan, InputRows
from sparkchat.kernels.compressor.input_kernel import launch_keep_and_project
from sparkchat.kernels.compressor.kernel import Tile as PoolTile
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.fp8.plan import Fp8Plan
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.latent_attention import LatentRows, LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import launch_latent_attention
from sparkchat.kernels.latent_attention.output import OutputPlan, OutputWeights
from sparkchat.kernels.latent_attention.output_kernel import launch_attend_to_output

D, LATENT, LOW, ROPE, HEADS, RING, WINDOW, TOPK, GROUPS = 4096, 512, 1024, 64, 32, 256, 128, 512, 4
INDEX_HEADS, INDEX, CONTEXT = 64, 128, 2200
SPARSE, DENSE = 4, 128


def tiles_of(make: Maker, out: int, size: int) -> TiledFp8:
    tiles = torch.zeros(out // 32, size // 128, 2, 2048, dtype=torch.int8, device=make.device)
    if make.is_real:
        tiles.view(torch.float8_e4m3fn).copy_(make.half(*tiles.shape, scale=1.0))
    return TiledFp8(tiles, torch.full((out // 32, size // 128, 2), size**-0.5, device=make.device))


@dataclass
class Weights:
    """Of one layer."""

    product: JointProduct
    queries: TiledFp8
    output: OutputWeights

    @classmethod
    def of(cls, make: Maker, ratio: int) -> Weights:
        plain, whole_from = (2624, 2560) if ratio == SPARSE else (1024, None)
        product = JointProduct(tiles_of(make, LOW + LATENT, D), make.half(plain, D), whole_from)
        queries = tiles_of(make, HEADS * LATENT + (INDEX_HEADS * INDEX if ratio == SPARSE else 0), LOW)
        return cls(product, queries, OutputWeights(tiles_of(make, D, D), tiles_of(make, D, D), GROUPS))

    @property
    def bytes(self) -> int:
        tiles = (self.product.codes, self.queries, self.output.inner, self.output.output)
        return self.product.plain.nbytes + sum(t.tiles.nbytes for t in tiles)


class SubBlock:
    """Rows of one request in a layer of one ratio, its state, and everything that is made of them on the way."""

    def __init__(self, make: Maker, ratio: int, rows: int, plan: JointProduct, begin: int | None = None) -> None:
        """``begin``: position of the first row; else the last is the last below ``CONTEXT``."""
        device, halves, total = make.device, 2 if ratio == SPARSE else 1, CONTEXT // ratio
        self.ratio, self.num_rows = ratio, rows
        self.pool_tile: PoolTile | None = None
        """Of the launch that keeps rows; None: as in use"""
        begin = CONTEXT - rows if begin is None else begin
        self.positions = make.ints(*range(begin, begin + rows)).long()
        self.owners, self.starts = make.ints(*[0] * rows), make.ints(0, rows)
        self.span_starts = self.positions[:1].repeat(rows)
        self.rope, self.sinks = make.floats(CONTEXT, ROPE), make.floats(HEADS)
        self.shape = LatentShape(16, RING, ratio, ROPE, 1e-6, TOPK if ratio == SPARSE else 0)
        self.pool_shape = PoolShape(ratio, ratio == SPARSE, ROPE, 1e-6)
        self.cache = make.half(1, 16 + RING + total + 16, LATENT, scale=1.0)
        self.x = make.half(rows, D, scale=1.0)
        self.parts = make.floats(plan.plan.codes.splits, rows, LOW + LATENT)
        self.plain = make.floats(plan.plan.plain_splits, rows, plan.plain.shape[0])
        self.whole = make.floats(rows, plan.plain.shape[0] - plan.whole_from)
        self.low = make.half(rows, LOW)
        norms = make.floats(LATENT), make.floats(LOW)
        self.written = LatentRows(
            self.parts[..., LOW:], norms[0], self.cache, self.shape, self.parts[..., :LOW], norms[1], self.low
        )  # fmt: skip
        widths = (LATENT, INDEX) if ratio == SPARSE else (LATENT,)
        cut = self.plain.split([halves * w for w in widths for _ in range(2)] + [64] * (ratio == SPARSE), dim=-1)
        self.keys = make.half(1, total + 16, INDEX, scale=1.0)
        self.pools = [
            Pool(
                cut[2 * n], cut[2 * n + 1], make.floats(ratio, halves * width), make.floats(width),
                make.floats(1, halves * ratio + 32, 2 * halves * width), self.keys if n else self.cache,
                0 if n else 16 + RING, n > 0,
            )
            for n, width in enumerate(widths)
        ]  # fmt: skip
        outs = HEADS * LATENT + (INDEX_HEADS * INDEX if ratio == SPARSE else 0)
        self.queries = make.half(rows, outs, scale=1.0)
        self.index = IndexShape(INDEX_HEADS, INDEX, ROPE, SPARSE, TOPK)
        self.scores = index_scores_of(rows, CONTEXT, self.index, device)
        self.chosen = torch.arange(TOPK, dtype=torch.int32, device=device).repeat(rows, 1)
        spans = latent_spans(self.shape, CONTEXT)
        self.spaces = {n: latent_workspace(rows, HEADS, LATENT, spans, device) for n in range(4)}
        self.counts = {n: torch.zeros(1, dtype=torch.int64, device=device) for n in range(3)}
        self.heads, self.inner, self.out = make.half(rows, HEADS, LATENT), make.half(rows, D), make.half(rows, D)

    def keep(self, weights: Weights, plan: InputPlan | None = None, asks: bool = False) -> None:
        """Products of the input, what is kept of rows, and products of the low ranks."""
        if plan is not None:
            count = self.counts[max(last - first for first, last in plan.launches)]
            given = InputRows(
                self.x, weights.product, self.parts, self.plain, self.whole, self.pools, self.written, self.positions,
                self.owners, self.starts, self.span_starts, self.rope, self.pool_shape, weights.queries, count,
            )  # fmt: skip
            launch_keep_and_project(given, self.queries, plan)
            return
        launch_joint(self.x, weights.product, self.parts, self.plain, self.whole, False, weights.product.plan)
        ahead = (weights.queries.tiles,) if asks else ()
        launch_compress_rows(
            self.pools, self.positions, self.owners, self.starts, self.span_starts, self.rope, self.pool_shape,
            self.written, self.pool_tile, ahead,
        )  # fmt: skip
        launch_fp8_linear(self.low, weights.queries, self.queries, 1, False)

    def choose(self, asked: Sequence[Tensor] = ()) -> None:
        if self.ratio == SPARSE:
            launch_choose_entries(
                self.queries[:, HEADS * LATENT :], self.whole, self.keys, self.positions, self.owners, self.starts,
                self.rope, self.scores, self.chosen, self.index, CONTEXT, self.num_rows, None, ahead=asked,
            )  # fmt: skip

    def attend(
        self,
        weights: Weights,
        plan: OutputPlan | None = None,
        asked: Sequence[Tensor] = (),
        cut: Fp8Plan | None = None,
    ) -> None:
        """Attention and both products behind it, these as ``cut`` where they are launches of their own."""
        q, seen = self.queries[:, : HEADS * LATENT], (self.positions - WINDOW + 1, self.positions + 1)
        chosen = self.chosen if self.ratio == SPARSE else None
        rows = (q, self.cache, self.owners, self.positions, *seen, self.rope, self.sinks)
        if plan is not None:
            space = self.spaces[max(last - first for first, last in plan.launches)]
            launch_attend_to_output(
                *rows, weights.output, self.out, space, self.shape, CONTEXT, chosen, None, plan
            )  # fmt: skip
            return
        launch_latent_attention(*rows, self.heads, self.spaces[0], self.shape, CONTEXT, chosen, None, asked)
        launch_fp8_linear(self.heads.flatten(1), weights.output.inner, self.inner, GROUPS, False, cut)
        launch_fp8_linear(self.inner, weights.output.output, self.out, 1, False, cut)


INPUTS = {
    "one launch": InputPlan(),
    "one launch, asks at the start": InputPlan(ahead=1),
    "one launch, asks for nothing": InputPlan(ahead=0),
    "input apart": InputPlan(((0, 0), (1, 2)), ahead=2),
    "queries apart": InputPlan(((0, 1), (2, 2))),
    "one launch, 5 stages": InputPlan(stages=5),
    "one launch, a pair": InputPlan(pairs=1, split=4, stages=2),
    "one launch, four pairs": InputPlan(pairs=4, split=1),
}
OUTPUTS = {
    "one launch": OutputPlan(),
    "one launch, asks in turn": OutputPlan(ahead=2),
    "one launch, asks for nothing": OutputPlan(ahead=0),
    "one launch, 4 stages": OutputPlan(stages=4),
    "one launch, 5 stages": OutputPlan(stages=5),
    "one launch, 5 stages, asks for nothing": OutputPlan(stages=5, ahead=0),
    "two launches": OutputPlan(((0, 1), (2, 3))),
    "spans apart": OutputPlan(((0, 0), (1, 3))),
    "products in one": OutputPlan(((0, 0), (1, 1), (2, 3))),
    "spans and join in one": OutputPlan(((0, 1), (2, 2), (3, 3)), ahead=0),
}


def attention_block_cases(make: Maker) -> Iterator[Case]:
    for ratio in (SPARSE, DENSE):
        first = Weights.of(make, ratio)
        layers = [first, *(Weights.of(make, ratio) for _ in range(make.sets(first.bytes) - 1))]
        for rows in (6, 1, 24):
            yield from _cases_of(make, SubBlock(make, ratio, rows, first.product), layers, f"/{ratio}, {rows} rows")


def _cases_of(make: Maker, block: SubBlock, layers: list[Weights], name: str) -> Iterator[Case]:
    def seen(i: int) -> tuple[Tensor, Tensor]:
        return layers[i].output.inner.tiles, layers[i].output.output.tiles

    def keep(i: int, plan: InputPlan | None = None, asks: bool = False) -> None:
        block.keep(layers[i], plan, asks)

    def attend(i: int, plan: OutputPlan | None = None, asks: bool = False, cut: Fp8Plan | None = None) -> None:
        block.attend(layers[i], plan, seen(i) if asks else (), cut)

    def whole(i: int, first: InputPlan | None, last: OutputPlan | None, asks: bool = False) -> None:
        keep(i, first, asks)
        block.choose(seen(i) if asks else ())
        attend(i, last, asks and block.ratio != SPARSE)

    sets, few = len(layers), block.num_rows <= 8
    inputs = dict(INPUTS) if few else {"one launch": InputPlan()}
    outputs = dict(OUTPUTS) if few else {"one launch": OutputPlan()}
    size = layers[0].output.inner.tiles.nbytes + layers[0].output.output.tiles.nbytes
    yield Case(
        f"v4 input {name}", layers[0].bytes - size, sets,
        {"used": keep, "asks": partial(keep, asks=True), **{n: partial(keep, plan=p) for n, p in inputs.items()}},
    )  # fmt: skip
    cuts = {f"{w} warps, {s} stages": partial(attend, cut=Fp8Plan(w, 1, s)) for w, s in ((4, 4), (8, 3), (8, 5))}
    yield Case(
        f"v4 output {name}", size, sets,
        {"used": attend, "asks": partial(attend, asks=True), **cuts,
         **{n: partial(attend, plan=p) for n, p in outputs.items()}},
    )  # fmt: skip
    yield Case(
        f"v4 attention block {name}", layers[0].bytes, sets,
        {
            "used": partial(whole, first=None, last=None),
            "asks": partial(whole, first=None, last=None, asks=True),
            "input in one": partial(whole, first=InputPlan(), last=None),
            "output in one": partial(whole, first=None, last=OutputPlan()),
            "both in one": partial(whole, first=InputPlan(), last=OutputPlan()),
            "asks, output in one": partial(whole, first=None, last=replace(OutputPlan(), ahead=0), asks=True),
        },
    )  # fmt: skip
