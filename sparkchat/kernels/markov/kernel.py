"""The sequential head on a GPU: two launches a draft, one over the vocabulary and one over the requests, and
between them two more where laws are filtered.

The first adds the bias and takes the statistics of every block of 128 tokens, so that the second sees what it needs
of a whole vocabulary in a few thousand numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.gemm.kernel import as_codes, can_widen, widen
from sparkchat.kernels.launch import check_flat, launch, power_of_two, prefetch, starts_early, wait
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.sampling import VOCAB_BLOCK, DrawSettings
from sparkchat.kernels.sampling.kernel import (
    ROW_WARPS,
    chunk_of,
    divisor,
    draw_token,
    find_law,
    near_arguments,
    uniform,
)
from sparkchat.kernels.sampling.select import NEAR_OPTIONS, launch_select

if TYPE_CHECKING:
    from sparkchat.kernels.markov import MarkovBuffers

LEAST_ROWS, MOST_ROWS = 16, 32
LEAST_STEP = 16
"""Ranks that are summed at a time: a matrix instruction takes no fewer, and what is beyond the rank is zero."""


@dataclass(frozen=True)
class BiasPlan:
    """How the product with W2 is run; what it comes out as depends on ``step`` alone."""

    step: int = 64
    """Ranks that are summed at a time."""
    warps: int = 4
    stages: int = 3


@triton.jit
def _add_bias(
    base_ptr, w1_ptr, w2_ptr, scales_ptr, previous_ptr, temperature_ptr, max_ptr, sum_ptr,
    requests, vocab, request_stride, previous_stride, num_blocks,
    RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, HAS_HEAD: tl.constexpr,
    EXACT: tl.constexpr, HAS_SCALES: tl.constexpr, WIDENS: tl.constexpr, PREFETCH_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < requests
    token = block * WIDTH + tl.arange(0, WIDTH)
    inside = token < vocab
    if PDL == 1 and PREFETCH_BYTES > 0:
        # The draw before this takes one multiprocessor a request; the others fetch weights meanwhile.
        prefetch(w2_ptr + tl.where(inside, token, 0).to(tl.int64) * RANK, PREFETCH_BYTES)
    wait(PDL)
    base = base_ptr + row[None, :].to(tl.int64) * request_stride + token[:, None]
    z = tl.load(base, mask=inside[:, None] & is_row[None, :], other=float("-inf"))
    if HAS_HEAD:
        previous = tl.load(previous_ptr + row * previous_stride, mask=is_row, other=0)
        bias = tl.zeros((WIDTH, ROWS), tl.float32)
        for start in range(0, RANK, STEP):
            rank = start + tl.arange(0, STEP)
            w2_at = w2_ptr + token[:, None].to(tl.int64) * RANK + rank[None, :]
            w2 = tl.load(w2_at, mask=inside[:, None] & (rank < RANK)[None, :], other=0.0)
            w1_at = w1_ptr + previous[None, :] * RANK + rank[:, None]
            w1 = tl.load(w1_at, mask=is_row[None, :] & (rank < RANK)[:, None], other=0.0)
            if HAS_SCALES:
                w2 = widen(w2) if WIDENS else w2.to(w1.dtype)
            if EXACT:
                bias = tl.dot(w2, w1, bias, input_precision="ieee")
            else:
                bias = tl.dot(w2, w1, bias)
        if HAS_SCALES:
            bias *= tl.load(scales_ptr + token, mask=inside, other=0.0)[:, None]
        z += bias
        tl.store(base, z, mask=inside[:, None] & is_row[None, :])
    temperature = divisor(tl.load(temperature_ptr + row, mask=is_row, other=1.0))
    top = tl.max(z, axis=0)
    peak = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp((z - peak[None, :]) / temperature[None, :]), axis=0)
    tl.store(max_ptr + row.to(tl.int64) * num_blocks + block, top, mask=is_row)
    tl.store(sum_ptr + row.to(tl.int64) * num_blocks + block, total, mask=is_row)


@triton.jit(do_not_specialize=["place"])
def _draw_draft(
    base_ptr, max_ptr, sum_ptr, entries_ptr,
    counts_ptr, masses_ptr, near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, rounds_ptr,
    map_ptr, tokens_ptr, index_ptr, peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
    place, width, vocab, request_stride, num_blocks,
    HAS_MAP: tl.constexpr, MAX_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HAS_NEAR: tl.constexpr,
    NEAR: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, INFO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    wait(PDL)
    z_ptr = base_ptr + request * request_stride
    max_ptr += request * num_blocks
    sum_ptr += request * num_blocks
    entries_ptr += request * num_blocks
    raw_temperature = tl.load(temperature_ptr + request)
    peak, temperature, least, last_tie, total, count = find_law(
        z_ptr, max_ptr, sum_ptr, entries_ptr,
        counts_ptr, masses_ptr, near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr,
        request, vocab, num_blocks, raw_temperature, tl.load(top_k_ptr + request), tl.load(top_p_ptr + request),
        tl.load(min_p_ptr + request), MAX_BLOCKS, CHUNK, WIDTH, HAS_NEAR, NEAR, BINS, COPIES, INFO,
    )  # fmt: skip
    token = 0
    if peak == peak:
        if raw_temperature < 1e-5:
            token = last_tie
        else:
            u = uniform(tl.load(seeds_ptr + request), tl.load(rounds_ptr + request), place, 0)
            token = draw_token(
                z_ptr, sum_ptr, entries_ptr, vocab, num_blocks, peak, temperature, least, last_tie, count, u,
                MAX_BLOCKS, WIDTH,
            )  # fmt: skip
    # Whatever happened, an id is one of the vocabulary: others use it as an address.
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    at = request * width + place
    tl.store(index_ptr + at, token.to(tl.int64))
    target = token.to(tl.int64)
    if HAS_MAP:
        target = tl.load(map_ptr + token)
    tl.store(tokens_ptr + at, target)
    tl.store(peak_ptr + at, peak)
    tl.store(law_temperature_ptr + at, temperature)
    tl.store(least_ptr + at, least)
    tl.store(scale_ptr + at, 1.0 / total)
    tl.store(last_tie_ptr + at, last_tie)


@triton.jit
def _judge(
    hidden_ptr, weight_ptr, bias_ptr, w1_ptr, anchors_ptr, tokens_ptr, out_ptr, width, hidden_stride,
    SIZE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Confidence of one draft: weight . [h; W1[token before]] + bias; RANK 0 without the second part.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    wait(PDL)
    hidden = tl.load(hidden_ptr + row * hidden_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    logit = tl.sum(hidden * weight, axis=0)
    if RANK > 0:
        previous = tl.load(anchors_ptr + row // width)
        if row % width > 0:
            previous = tl.load(tokens_ptr + row - 1)
        rank = tl.arange(0, RANK_BLOCK)
        on_markov = tl.load(weight_ptr + SIZE + rank, mask=rank < RANK, other=0.0)
        e = tl.load(w1_ptr + previous * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        logit += tl.sum(e * on_markov, axis=0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr)
    tl.store(out_ptr + row, logit)


def launch_markov_block(
    base: Tensor,
    w1: Tensor | None,
    w2: Tensor | RoundedRows | None,
    anchors: Tensor,
    settings: DrawSettings,
    buffers: MarkovBuffers,
    draft_to_target: Tensor | None,
    hidden: Tensor | None,
    confidence: tuple[Tensor, Tensor | None] | None,
    fill: Callable[[int, Tensor], None] | None = None,
    plan: BiasPlan = BiasPlan(),
) -> None:
    """See ``markov_block``. ``plan`` stands in for the usual one, for measuring."""
    requests, width, vocab = base.shape
    scales, w2 = (w2.scales, w2.codes) if isinstance(w2, RoundedRows) else (None, w2)
    check_flat(base, w1, w2, scales, anchors, settings.temperature, buffers.tokens, buffers.index, draft_to_target)
    scratch, laws, has_head = buffers.scratch, buffers.laws, w1 is not None and w2 is not None
    num_blocks = scratch.block_max.shape[1]
    rank = w2.shape[1] if w2 is not None else 16
    rows = max(LEAST_ROWS, min(MOST_ROWS, power_of_two(requests)))
    exact = w1 is not None and w1.dtype == torch.float32
    widens = scales is not None and w1 is not None and can_widen(w1.dtype)
    if widens and w2 is not None:
        w2 = as_codes(w2)
    row_bytes = 0 if w2 is None or not starts_early(is_streaming=True) else rank * w2.element_size()
    s = settings
    for k in range(width):
        previous = anchors if k == 0 else buffers.tokens[:, k - 1]
        if fill is not None:
            fill(k, previous)
        launch(
            _add_bias, (num_blocks, -(-requests // rows)),
            base[:, k], base if w1 is None else w1, base if w2 is None else w2, base if scales is None else scales,
            previous, s.temperature,
            scratch.block_max, scratch.block_sum, requests, vocab, base.stride(0), previous.stride(0), num_blocks,
            RANK=rank, ROWS=rows, WIDTH=VOCAB_BLOCK, STEP=max(LEAST_STEP, min(plan.step, power_of_two(rank))),
            HAS_HEAD=has_head, EXACT=exact, HAS_SCALES=scales is not None, WIDENS=widens,
            PREFETCH_BYTES=row_bytes if has_head and row_bytes % 16 == 0 else 0,
            is_streaming=True, num_warps=plan.warps, num_stages=1 if exact else plan.stages,
        )  # fmt: skip
        if scratch.near is not None:
            launch_select(base[:, k], base.stride(0), requests, scratch, scratch.near, s, vocab)
        launch(
            _draw_draft, (requests,),
            base[:, k], scratch.block_max, scratch.block_sum, scratch.entries,
            *near_arguments(scratch.near, scratch.entries), s.temperature, s.top_k, s.top_p,
            s.min_p, s.seeds, s.rounds, anchors if draft_to_target is None else draft_to_target, buffers.tokens,
            buffers.index, laws.peak, laws.temperature, laws.least, laws.scale, laws.last_tie,
            k, width, vocab, base.stride(0), num_blocks,
            HAS_MAP=draft_to_target is not None, MAX_BLOCKS=power_of_two(num_blocks), CHUNK=chunk_of(num_blocks),
            WIDTH=VOCAB_BLOCK, HAS_NEAR=scratch.near is not None, **NEAR_OPTIONS, num_warps=ROW_WARPS,
        )  # fmt: skip
    if hidden is None or confidence is None:
        return
    weight, bias = confidence
    size = hidden.shape[-1]
    with_markov = weight.shape[0] - size
    launch(
        _judge, (requests * width,),
        hidden, weight, weight if bias is None else bias, weight if w1 is None else w1, anchors, buffers.tokens,
        buffers.confidence, width, hidden.stride(-2), SIZE=size, RANK=with_markov, BLOCK=power_of_two(size),
        RANK_BLOCK=power_of_two(max(with_markov, 1)), HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
