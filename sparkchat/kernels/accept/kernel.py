"""Acceptance on a GPU in five launches: statistics and laws of the target's rows, the test, the residual's masses, and
the token after; two more where laws are filtered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from sparkchat.kernels.accept import BLOCKS_A_PROGRAM
from sparkchat.kernels.launch import check_flat, launch, power_of_two, wait
from sparkchat.kernels.sampling import VOCAB_BLOCK, DrawSettings, Laws
from sparkchat.kernels.sampling.kernel import (
    ROW_WARPS,
    block_statistics,
    chunk_of,
    find_law,
    find_place,
    near_arguments,
    owner_of,
    uniform,
    weight_of,
)
from sparkchat.kernels.sampling.select import NEAR_OPTIONS, launch_select

if TYPE_CHECKING:
    from sparkchat.kernels.accept import AcceptBuffers


@triton.jit
def _find_laws(
    logits_ptr, max_ptr, sum_ptr, entries_ptr,
    counts_ptr, masses_ptr, near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr,
    starts_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr, vocab, logits_stride, num_blocks, num_requests,
    REQUESTS: tl.constexpr, MAX_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HAS_NEAR: tl.constexpr,
    NEAR: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, INFO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    if row < tl.load(starts_ptr + num_requests):
        owner = owner_of(row, starts_ptr, num_requests, REQUESTS)
        peak, temperature, least, last_tie, total, _ = find_law(
            logits_ptr + row * logits_stride, max_ptr + row * num_blocks, sum_ptr + row * num_blocks,
            entries_ptr + row * num_blocks,
            counts_ptr, masses_ptr, near_ptr, near_id_ptr, near_count_ptr, near_mass_ptr, sure_ptr, info_ptr, found_ptr,
            row, vocab, num_blocks, tl.load(temperature_ptr + owner),
            tl.load(top_k_ptr + owner), tl.load(top_p_ptr + owner), tl.load(min_p_ptr + owner),
            MAX_BLOCKS, CHUNK, WIDTH, HAS_NEAR, NEAR, BINS, COPIES, INFO,
        )  # fmt: skip
        tl.store(peak_ptr + row, peak)
        tl.store(law_temperature_ptr + row, temperature)
        tl.store(least_ptr + row, least)
        tl.store(scale_ptr + row, 1.0 / total)
        tl.store(last_tie_ptr + row, last_tie)


@triton.jit
def _test_drafts(
    logits_ptr, starts_ptr, verify_lens_ptr, caps_ptr, drafts_ptr, draft_index_ptr, draft_logits_ptr, chance_ptr,
    temperature_ptr, seeds_ptr, rounds_ptr,
    peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
    q_peak_ptr, q_temperature_ptr, q_least_ptr, q_scale_ptr, q_last_tie_ptr,
    accepted_ptr, full_ptr, damaged_ptr, tokens_ptr, p_draft_ptr, p_target_ptr,
    logits_stride, draft_stride, width,
    SPAN: tl.constexpr, HAS_DRAFTS: tl.constexpr, HAS_CAPS: tl.constexpr, HAS_CHANCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    wait(PDL)
    first = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - first
    place = tl.arange(0, SPAN)
    lens = 0
    if HAS_DRAFTS:
        lens = tl.minimum(tl.load(verify_lens_ptr + request), width)
    # No more than there are rows for, whatever the plan says.
    lens = tl.maximum(tl.minimum(lens, (count - 1).to(tl.int32)), 0)
    peak = tl.load(peak_ptr + first + place, mask=(place <= lens) & (count > 0), other=0.0)
    full = 0
    tokens = tl.full((SPAN,), -1, tl.int64)
    nothing = tl.full((SPAN,), float("nan"), tl.float32)
    tested = place < lens
    if HAS_DRAFTS:
        at = request * width + place
        inside = place < width
        tokens = tl.load(drafts_ptr + at, mask=inside, other=-1)
        is_greedy = tl.load(temperature_ptr + request) < 1e-5
        row = first + place
        z = tl.load(logits_ptr + row * logits_stride + tokens, mask=tested, other=0.0).to(tl.float32)
        p = weight_of(
            z, tokens, peak, tl.load(law_temperature_ptr + row, mask=tested, other=1.0),
            tl.load(least_ptr + row, mask=tested, other=0.0), tl.load(last_tie_ptr + row, mask=tested, other=0),
        ) * tl.load(scale_ptr + row, mask=tested, other=0.0)  # fmt: skip
        index = tl.load(draft_index_ptr + at, mask=tested, other=0)
        draft_z = tl.load(draft_logits_ptr + at * draft_stride + index, mask=tested, other=0.0)
        q = weight_of(
            draft_z, index, tl.load(q_peak_ptr + at, mask=tested, other=0.0),
            tl.load(q_temperature_ptr + at, mask=tested, other=1.0),
            tl.load(q_least_ptr + at, mask=tested, other=0.0), tl.load(q_last_tie_ptr + at, mask=tested, other=0),
        ) * tl.load(q_scale_ptr + at, mask=tested, other=0.0)  # fmt: skip
        q = tl.where(is_greedy, 1.0, q)
        u = uniform(tl.load(seeds_ptr + request), tl.load(rounds_ptr + request), place, 1)
        if HAS_CHANCE:
            passed = tested & (u < tl.load(chance_ptr + at, mask=inside, other=0.0))
        else:
            passed = tested & (q > 0.0) & (u * q.to(tl.float64) < p.to(tl.float64))
        # The first draft that did not pass.
        full = tl.min(tl.where(passed, SPAN, place), axis=0)
        tl.store(p_draft_ptr + at, tl.where(tested, q, nothing), mask=inside)
        tl.store(p_target_ptr + at, tl.where(tested, p, nothing), mask=inside)
    taken = tl.minimum(full, lens)
    if HAS_CAPS:
        taken = tl.maximum(tl.minimum(taken, tl.load(caps_ptr + request)), 0)
    # What stands behind a refused draft is nobody's; every row before must be sound, the next token's among them.
    damaged = tl.max(((peak != peak) & (place <= taken)).to(tl.int32), axis=0)
    tl.store(damaged_ptr + request, damaged)
    tl.store(full_ptr + request, full)
    tl.store(accepted_ptr + request, taken)
    tl.store(tokens_ptr + request * (width + 1) + place, tl.where(place < taken, tokens, -1), mask=place <= width)


@triton.jit
def _weigh_rest(
    logits_ptr, starts_ptr, verify_lens_ptr, accepted_ptr, full_ptr, drafts_ptr, draft_logits_ptr, map_ptr,
    temperature_ptr, peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
    q_peak_ptr, q_temperature_ptr, q_least_ptr, q_scale_ptr, q_last_tie_ptr,
    masses_ptr, ranks_ptr, vocab, logits_stride, draft_stride, width, num_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, HAS_DRAFTS: tl.constexpr, HAS_REST: tl.constexpr, HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Masses of p and of max(p - q, 0) in every block, at the row the next token comes from; and how many tokens of the
    # blocks are likelier than the refused draft.
    request = tl.program_id(0).to(tl.int64)
    wait(PDL)
    first = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - first
    likelier = 0
    if HAS_DRAFTS:
        full = tl.load(full_ptr + request)
        if full < tl.minimum(tl.minimum(tl.load(verify_lens_ptr + request), width), count - 1):
            z_ptr = logits_ptr + (first + full) * logits_stride
            refused = tl.load(z_ptr + tl.load(drafts_ptr + request * width + full)).to(tl.float32)
            token = tl.program_id(1) * BLOCKS * WIDTH + tl.arange(0, BLOCKS * WIDTH)
            z = tl.load(z_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            likelier = tl.sum((z > refused).to(tl.int32), axis=0)
    tl.store(ranks_ptr + request * tl.num_programs(1) + tl.program_id(1), likelier)
    if (count > 0) & (tl.load(temperature_ptr + request) >= 1e-5):
        taken = tl.load(accepted_ptr + request)
        row = first + taken
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        token = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        p = _target_law(
            logits_ptr + row * logits_stride, token, vocab, row,
            peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
        )  # fmt: skip
        to = masses_ptr + request * 2 * num_blocks + block
        tl.store(to, tl.sum(p, axis=1), mask=block < num_blocks)
        if HAS_REST:  # noqa: SIM102
            if taken < tl.load(verify_lens_ptr + request):
                q = _draft_law(
                    draft_logits_ptr, map_ptr, token, vocab, request * width + taken, draft_stride,
                    q_peak_ptr, q_temperature_ptr, q_least_ptr, q_scale_ptr, q_last_tie_ptr, HAS_MAP,
                )  # fmt: skip
                p = tl.maximum(p - q, 0.0)
        tl.store(to + num_blocks, tl.sum(p, axis=1), mask=block < num_blocks)


@triton.jit
def _target_law(z_ptr, token, vocab, row, peak_ptr, temperature_ptr, least_ptr, scale_ptr, last_tie_ptr):
    z = tl.load(z_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    weight = weight_of(
        z, token, tl.load(peak_ptr + row), tl.load(temperature_ptr + row), tl.load(least_ptr + row),
        tl.load(last_tie_ptr + row),
    )  # fmt: skip
    return tl.where(token < vocab, weight, 0.0) * tl.load(scale_ptr + row)


@triton.jit
def _draft_law(
    z_ptr, map_ptr, token, vocab, row, stride, peak_ptr, temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    inside = token < vocab
    index = token
    if HAS_MAP:
        index = tl.load(map_ptr + token, mask=inside, other=-1)
        inside = index >= 0
    z = tl.load(z_ptr + row * stride + index, mask=inside, other=float("-inf"))
    weight = weight_of(
        z, index, tl.load(peak_ptr + row), tl.load(temperature_ptr + row), tl.load(least_ptr + row),
        tl.load(last_tie_ptr + row),
    )  # fmt: skip
    return tl.where(inside, weight, 0.0) * tl.load(scale_ptr + row)


@triton.jit
def _draw_next(
    logits_ptr, starts_ptr, verify_lens_ptr, accepted_ptr, full_ptr, damaged_ptr, drafts_ptr, draft_logits_ptr, map_ptr,
    temperature_ptr, seeds_ptr, rounds_ptr,
    peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
    q_peak_ptr, q_temperature_ptr, q_least_ptr, q_scale_ptr, q_last_tie_ptr,
    masses_ptr, next_ptr, tokens_ptr, vocab, logits_stride, draft_stride, width, num_blocks,
    MAX_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, HAS_DRAFTS: tl.constexpr, HAS_REST: tl.constexpr,
    HAS_MAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    wait(PDL)
    first = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1) - first
    taken = tl.load(accepted_ptr + request)
    chosen = tl.full((), -1, tl.int64)
    if count > 0:
        row = first + taken
        if tl.load(damaged_ptr + request) != 0:
            chosen = tl.full((), 0, tl.int64)
        elif tl.load(temperature_ptr + request) < 1e-5:
            chosen = tl.load(last_tie_ptr + row).to(tl.int64)
        else:
            block = tl.arange(0, MAX_BLOCKS)
            masses_at = masses_ptr + request * 2 * num_blocks + block
            masses = tl.load(masses_at + num_blocks, mask=block < num_blocks, other=0.0)
            is_rest = tl.sum(masses, axis=0) > 1e-8
            if is_rest == 0:
                masses = tl.load(masses_at, mask=block < num_blocks, other=0.0)
            u = uniform(tl.load(seeds_ptr + request), tl.load(rounds_ptr + request), taken, 2)
            target = u * tl.sum(masses.to(tl.float64), axis=0)
            place, before = find_place(masses, target)
            token = place * WIDTH + tl.arange(0, WIDTH)
            p = _target_law(
                logits_ptr + row * logits_stride, token, vocab, row,
                peak_ptr, law_temperature_ptr, least_ptr, scale_ptr, last_tie_ptr,
            )  # fmt: skip
            if HAS_REST:  # noqa: SIM102
                if is_rest & (taken < tl.load(verify_lens_ptr + request)):
                    q = _draft_law(
                        draft_logits_ptr, map_ptr, token, vocab, request * width + taken, draft_stride,
                        q_peak_ptr, q_temperature_ptr, q_least_ptr, q_scale_ptr, q_last_tie_ptr, HAS_MAP,
                    )  # fmt: skip
                    p = tl.maximum(p - q, 0.0)
            inside, _ = find_place(p, tl.maximum(target - before, 0.0))
            chosen = (place * WIDTH + inside).to(tl.int64)
        if HAS_DRAFTS:  # noqa: SIM102
            if (tl.load(full_ptr + request) > taken) & (tl.load(damaged_ptr + request) == 0):
                chosen = tl.load(drafts_ptr + request * width + taken)
    chosen = tl.minimum(chosen, vocab - 1)
    tl.store(next_ptr + request, chosen)
    tl.store(tokens_ptr + request * (width + 1) + taken, chosen)


def launch_accept_block(
    logits: Tensor,
    starts: Tensor,
    verify_lens: Tensor,
    settings: DrawSettings,
    buffers: AcceptBuffers,
    drafts: Tensor | None,
    draft_laws: Laws | None,
    draft_index: Tensor | None,
    target_to_draft: Tensor | None,
    caps: Tensor | None,
    chance: Tensor | None = None,
) -> None:
    """See ``accept_block``."""
    num_rows, vocab = logits.shape
    check_flat(logits, starts, verify_lens, settings.temperature, drafts, draft_index, target_to_draft, caps,
               chance)  # fmt: skip
    b, s, scratch, requests = buffers, settings, buffers.scratch, starts.shape[0] - 1
    num_blocks, width = scratch.block_max.shape[1], b.p_draft.shape[1]
    padded, max_blocks = power_of_two(requests), power_of_two(num_blocks)
    passes = -(-num_blocks // BLOCKS_A_PROGRAM)
    laws = (b.laws.peak, b.laws.temperature, b.laws.least, b.laws.scale, b.laws.last_tie)
    has_drafts = drafts is not None and draft_laws is not None and draft_index is not None
    has_rest = has_drafts and chance is None
    q = draft_laws if has_drafts and draft_laws is not None else b.laws
    q_laws = (q.peak, q.temperature, q.least, q.scale, q.last_tie)
    q_stride = q.logits.stride(0)
    drafts = starts if drafts is None else drafts
    mapping = starts if target_to_draft is None else target_to_draft
    has_map = target_to_draft is not None
    launch(
        block_statistics, (num_rows, passes),
        logits, s.temperature, starts, scratch.block_max, scratch.block_sum, vocab, logits.stride(0), num_blocks,
        requests, REQUESTS=padded, BLOCKS=BLOCKS_A_PROGRAM, WIDTH=VOCAB_BLOCK, num_warps=4,
    )  # fmt: skip
    if scratch.near is not None:
        launch_select(logits, logits.stride(0), num_rows, scratch, scratch.near, s, vocab, starts)
    launch(
        _find_laws, (num_rows,),
        logits, scratch.block_max, scratch.block_sum, scratch.entries,
        *near_arguments(scratch.near, scratch.entries), starts, s.temperature, s.top_k, s.top_p, s.min_p, *laws,
        vocab, logits.stride(0), num_blocks, requests,
        REQUESTS=padded, MAX_BLOCKS=max_blocks, CHUNK=chunk_of(num_blocks), WIDTH=VOCAB_BLOCK,
        HAS_NEAR=scratch.near is not None, **NEAR_OPTIONS, num_warps=ROW_WARPS,
    )  # fmt: skip
    launch(
        _test_drafts, (requests,),
        logits, starts, verify_lens, verify_lens if caps is None else caps, drafts,
        starts if draft_index is None else draft_index, q.logits, starts if chance is None else chance, s.temperature,
        s.seeds, s.rounds, *laws, *q_laws,
        b.accepted_len, b.full_len, b.damaged, b.tokens, b.p_draft, b.p_target, logits.stride(0), q_stride, width,
        SPAN=power_of_two(width + 1), HAS_DRAFTS=has_drafts, HAS_CAPS=caps is not None,
        HAS_CHANCE=chance is not None, num_warps=1,
    )  # fmt: skip
    launch(
        _weigh_rest, (requests, passes),
        logits, starts, verify_lens, b.accepted_len, b.full_len, drafts, q.logits, mapping, s.temperature, *laws,
        *q_laws, b.masses, b.ranks, vocab, logits.stride(0), q_stride, width, num_blocks,
        BLOCKS=BLOCKS_A_PROGRAM, WIDTH=VOCAB_BLOCK, HAS_DRAFTS=has_drafts, HAS_REST=has_rest,
        HAS_MAP=has_map, num_warps=4,
    )  # fmt: skip
    launch(
        _draw_next, (requests,),
        logits, starts, verify_lens, b.accepted_len, b.full_len, b.damaged, drafts, q.logits, mapping,
        s.temperature, s.seeds, s.rounds, *laws, *q_laws, b.masses, b.next_ids, b.tokens, vocab, logits.stride(0),
        q_stride, width, num_blocks, MAX_BLOCKS=max_blocks, WIDTH=VOCAB_BLOCK, HAS_DRAFTS=has_drafts,
        HAS_REST=has_rest, HAS_MAP=has_map, num_warps=8,
    )  # fmt: skip
