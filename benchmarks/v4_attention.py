"""What benchmarks/kernels.py times of a whole attention sub-block of DeepSeek-V4-Flash on one of two GPUs: the launches
of a layer one after the other.

Weights go round sets larger than the L2 cache. The meeting of ranks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from kernel_inputs import Case, Maker

from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.latent_attention import LatentRows, LatentShape, latent_spans, latent_workspace
from sparkchat.kernels.latent_attention.kernel import launch_latent_attention

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
    inner: TiledFp8
    output: TiledFp8

    @classmethod
    def of(cls, make: Maker, ratio: int) -> Weights:
        plain, whole_from = (2624, 2560) if ratio == SPARSE else (1024, None)
        product = JointProduct(tiles_of(make, LOW + LATENT, D), make.half(plain, D), whole_from)
        queries = tiles_of(make, HEADS * LATENT + (INDEX_HEADS * INDEX if ratio == SPARSE else 0), LOW)
        return cls(product, queries, tiles_of(make, D, D), tiles_of(make, D, D))

    @property
    def first_bytes(self) -> int:
        return self.product.codes.tiles.nbytes + self.product.plain.nbytes + self.queries.tiles.nbytes

    @property
    def last_bytes(self) -> int:
        return self.inner.tiles.nbytes + self.output.tiles.nbytes


class SubBlock:
    """Rows of one request in a layer of one ratio, its state, and everything that is made of them on the way."""

    def __init__(self, make: Maker, ratio: int, rows: int, product: JointProduct) -> None:
        device, halves, total = make.device, 2 if ratio == SPARSE else 1, CONTEXT // ratio
        self.ratio, self.num_rows = ratio, rows
        self.positions = make.ints(*range(CONTEXT - rows, CONTEXT)).long()
        self.first_seen, self.ends = self.positions - WINDOW + 1, self.positions + 1
        self.owners, self.starts = make.ints(*[0] * rows), make.ints(0, rows)
        self.span_starts = self.positions[:1].repeat(rows)
        self.rope, self.sinks = make.floats(CONTEXT, ROPE), make.floats(HEADS)
        self.shape = LatentShape(16, RING, ratio, ROPE, 1e-6, TOPK if ratio == SPARSE else 0)
        self.pool_shape = PoolShape(ratio, ratio == SPARSE, ROPE, 1e-6)
        self.cache = make.half(1, 16 + RING + total + 16, LATENT, scale=1.0)
        self.x = make.half(rows, D, scale=1.0)
        self.parts = make.floats(product.plan.codes.splits, rows, LOW + LATENT)
        self.plain = make.floats(product.plan.plain_splits, rows, product.plain.shape[0])
        self.whole = make.floats(rows, product.plain.shape[0] - product.whole_from)
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
        self.space = latent_workspace(rows, HEADS, LATENT, spans, device)
        self.heads, self.inner, self.out = make.half(rows, HEADS, LATENT), make.half(rows, D), make.half(rows, D)

    def keep(self, weights: Weights) -> None:
        """Products of the input, what is kept of rows, and products of the low ranks."""
        launch_joint(self.x, weights.product, self.parts, self.plain, self.whole, False, weights.product.plan)
        launch_compress_rows(
            self.pools, self.positions, self.owners, self.starts, self.span_starts, self.rope, self.pool_shape,
            self.written,
        )  # fmt: skip
        launch_fp8_linear(self.low, weights.queries, self.queries, 1, False)

    def choose(self) -> None:
        if self.ratio == SPARSE:
            launch_choose_entries(
                self.queries[:, HEADS * LATENT :], self.whole, self.keys, self.positions, self.owners, self.starts,
                self.rope, self.scores, self.chosen, self.index, CONTEXT, self.num_rows, None,
            )  # fmt: skip

    def attend(self, weights: Weights) -> None:
        """Attention and both products behind it."""
        launch_latent_attention(
            self.queries[:, : HEADS * LATENT], self.cache, self.owners, self.positions, self.first_seen,
            self.ends, self.rope, self.sinks, self.heads, self.space, self.shape, CONTEXT,
            self.chosen if self.ratio == SPARSE else None,
        )  # fmt: skip
        launch_fp8_linear(self.heads.flatten(1), weights.inner, self.inner, GROUPS, False)
        launch_fp8_linear(self.inner, weights.output, self.out, 1, False)


def attention_block_cases(make: Maker) -> Iterator[Case]:
    for ratio in (SPARSE, DENSE):
        first = Weights.of(make, ratio)
        size = first.first_bytes + first.last_bytes
        layers = [first, *(Weights.of(make, ratio) for _ in range(make.sets(size) - 1))]
        for rows in (6, 1, 24):
            yield from _cases_of(SubBlock(make, ratio, rows, first.product), layers, f"/{ratio}, {rows} rows")


def _cases_of(block: SubBlock, layers: list[Weights], name: str) -> Iterator[Case]:
    def keep(i: int) -> None:
        block.keep(layers[i])

    def attend(i: int) -> None:
        block.attend(layers[i])

    def whole(i: int) -> None:
        keep(i)
        block.choose()
        attend(i)

    first, last = layers[0].first_bytes, layers[0].last_bytes
    for what, size, run in (("input", first, keep), ("output", last, attend), ("attention block", first + last, whole)):
        yield Case(f"v4 {what} {name}", size, len(layers), {"used": run})
