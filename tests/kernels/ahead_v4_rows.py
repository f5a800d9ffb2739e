"""Compiles the kernels of DeepSeek V4's streams, state and attention at their true shapes for an H200.

    PYTHONPATH=.:tests python tests/kernels/ahead_v4_rows.py [NAME]

As ahead.py, whose lines it prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from kernels.ahead import CPU, HALF, Driver, compile_only
from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.hyper import PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.indexer import IndexShape, index_scores_of
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.latent_attention import LatentRows, LatentShape, latent_workspace
from sparkchat.kernels.latent_attention.kernel import (
    HALF_TILE,
    launch_latent_attention,
    launch_write_latents,
)
from sparkchat.kernels.launch import overlap, started_by
from sparkchat.kernels.ranks.exchange import Exchange, Sent, no_turns

D, STREAMS, LATENT, ROPE = 4096, 4, 512, 64
TILES = (HALF_TILE, replace(HALF_TILE, many_rows=1), replace(HALF_TILE, heads=32, many_rows=1))


def hyper() -> None:
    weights, head = (
        StreamWeights(torch.zeros(n, STREAMS * D), torch.zeros(n), torch.zeros(n), STREAMS, 1e-6, 1e-6, 20)
        for n in (24, STREAMS)
    )
    norm, rows = torch.ones(D), 6
    streams, mix, out = (
        torch.zeros(rows, STREAMS, D, dtype=HALF),
        torch.zeros(rows, 20),
        torch.zeros(rows, D, dtype=HALF),
    )
    parts = PartList.of([torch.zeros(rows, D) for _ in range(2)])
    exchange = Exchange(torch.zeros(2, dtype=torch.int64), no_turns(CPU), 0)
    space = hyper_workspace(rows, D, CPU)
    for output in (out.clone(), parts, *(Sent(torch.zeros(n, rows, D), exchange) for n in (4, 7))):
        launch_connect_streams(
            streams, weights, space, output, mix, streams.clone(), mix, norm, 1e-6, out, None, None
        )  # fmt: skip
    launch_connect_streams(streams, weights, space, None, None, None, mix, norm, 1e-6, out, None, None)
    launch_connect_streams(
        streams, head, space, Sent(torch.zeros(7, rows, D), exchange), mix, streams.clone(), None, norm, 1e-6,
        torch.zeros(rows, D), out, torch.zeros(rows, D),
    )  # fmt: skip
    launch_connect_streams(streams, head, space, parts, mix, streams.clone(), None, None, 0.0, None, None, None)
    many, space = streams[:1].repeat(33, 1, 1), hyper_workspace(33, D, CPU)
    launch_connect_streams(
        many, weights, space, torch.zeros(2, 33, D), torch.zeros(33, 20), many.clone(), torch.zeros(33, 20), norm, 1e-6,
        torch.zeros(33, D, dtype=HALF), None, None,
    )  # fmt: skip


def attention() -> None:
    positions, rows = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    rope, cache = torch.zeros(1024, ROPE), torch.zeros(1, 16 + 256 + 16384, LATENT, dtype=HALF)
    norm, chosen = torch.ones(LATENT), torch.zeros(6, 512, dtype=torch.int32)
    for heads in (64, 32, 16):
        for shape in (LatentShape(16, 256, 0, ROPE, 1e-6), LatentShape(16, 256, 4, ROPE, 1e-6, topk=512)):
            q, out = torch.zeros(6, heads * LATENT, dtype=HALF), torch.zeros(6, heads, LATENT, dtype=HALF)
            space = latent_workspace(6, heads, LATENT, 10, CPU)
            for tile in TILES if heads == 32 and shape.topk else TILES[:1]:
                launch_latent_attention(
                    q, cache, rows, positions, positions, positions, rope, torch.zeros(heads), out, space, shape, 65536,
                    chosen, tile,
                )  # fmt: skip
    shape = LatentShape(16, 256, 128, ROPE, 1e-6)
    q, out, space = (
        torch.zeros(2, 6, 32 * LATENT),
        out.new_zeros(6, 32, LATENT),
        latent_workspace(6, 32, LATENT, 10, CPU),
    )
    launch_latent_attention(
        q, cache, rows, positions, positions, positions, rope, torch.zeros(32), out, space, shape, 65536, None
    )  # fmt: skip
    low, latents = torch.zeros(2, 6, 1536).split([1024, 512], dim=-1)
    for has_roundings in (False, True):
        shape = LatentShape(16, 256, 0, ROPE, 1e-6, has_roundings=has_roundings)
        launch_write_latents(
            latents, norm, positions, rows, rope, cache, shape, low, torch.ones(1024), torch.zeros(6, 1024, dtype=HALF)
        )  # fmt: skip
    launch_write_latents(latents, norm, positions, rows, rope, cache, shape, None, None, None)


def compressor() -> None:
    positions, rows = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    starts, rope = torch.tensor([0, 6], dtype=torch.int32), torch.zeros(1024, ROPE)

    def pool(width: int, halves: int, ratio: int, *, is_index: bool = False, rounds: bool = False) -> Pool:
        product = torch.zeros(2, 6, 2 * halves * width)
        kv, scores = product.chunk(2, dim=-1)
        rotation = torch.zeros(width, width) if is_index and rounds else None
        raw, entries = torch.zeros(1, 256, 2 * halves * width), torch.zeros(1, 2048, width, dtype=HALF)
        bias, norm = torch.zeros(ratio, halves * width), torch.ones(width)
        return Pool(kv, scores, bias, norm, raw, entries, 272 * (not is_index), is_index, rotation, rounds)

    for rounds in (False, True):
        pools = [pool(LATENT, 2, 4, rounds=rounds), pool(128, 2, 4, is_index=True, rounds=rounds)]
        shape = PoolShape(4, True, ROPE, 1e-6)
        launch_compress_rows(pools, positions, rows, starts, positions, rope, shape)
        low, latents = torch.zeros(2, 6, 1536).split([1024, 512], dim=-1)
        kept = LatentShape(16, 256, 4, ROPE, 1e-6, has_roundings=rounds)
        written = LatentRows(
            latents, torch.ones(LATENT), pools[0].entries, kept, low, torch.ones(1024), torch.zeros(6, 1024, dtype=HALF)
        )  # fmt: skip
        launch_compress_rows(pools, positions, rows, starts, positions, rope, shape, written)
        pools, shape = [pool(LATENT, 1, 128, rounds=rounds)], PoolShape(128, False, ROPE, 1e-6)
        launch_compress_rows(pools, positions, rows, starts, positions, rope, shape)


def indexer() -> None:
    positions, rows = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    starts, rope, shape = (
        torch.tensor([0, 6], dtype=torch.int32),
        torch.zeros(1024, ROPE),
        IndexShape(64, 128, ROPE, 4, 512),
    )
    keys, weights = torch.zeros(1, 16384, 128, dtype=HALF), torch.zeros(6, 64)
    for context, q in ((65536, torch.zeros(6, 8192, dtype=HALF)), (16384, torch.zeros(2, 6, 8192)),
                       (262144, torch.zeros(6, 8192))):  # fmt: skip
        scores = index_scores_of(6, context, shape, CPU)
        rotation = torch.zeros(128, 128) if context == 16384 else None
        launch_choose_entries(
            q, weights, keys, positions, rows, starts, rope, scores, torch.zeros(6, 512, dtype=torch.int32), shape,
            context, 6, rotation,
        )  # fmt: skip


ALL: dict[str, Callable[[], None]] = {f.__name__: f for f in (hyper, attention, compressor, indexer)}


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    with started_by(compile_only), overlap():
        for name in names or ALL:
            ALL[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
