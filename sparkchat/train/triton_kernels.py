"""Triton kernels of the trainer; imported only where a GPU runs them. Their references are their callers' CPU paths."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sparkchat.train.losses import Shaping, SlotTargets


@triton.jit
def _decode_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, cache_length, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per (row, key/value head): its GROUP query heads share every key that is read.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    last = tl.load(position_ptr)
    dims = tl.arange(0, DIM)
    group = tl.arange(0, GROUP_PAD)
    q_offsets = (row * KV_HEADS * GROUP + head * GROUP + group[:, None]) * DIM + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=group[:, None] < GROUP, other=0.0)
    base = (row * KV_HEADS + head) * cache_length * DIM
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, DIM), tl.float32)
    for start in range(0, last + 1, BLOCK):
        times = start + tl.arange(0, BLOCK)
        offsets = base + times[:, None] * DIM + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=times[:, None] <= last, other=0.0)
        v = tl.load(v_ptr + offsets, mask=times[:, None] <= last, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(times[None, :] <= last, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    mixed = mixed / total[:, None]
    tl.store(out_ptr + q_offsets, mixed.to(out_ptr.dtype.element_ty), mask=group[:, None] < GROUP)


def launch_decode_attention(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """See decode_attention; keys and values must be contiguous."""
    rows, num_heads, dim = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    group = num_heads // kv_heads
    _decode_attention[(rows, kv_heads)](
        q, keys, values, out, position, length, dim**-0.5,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=64,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _shaping_factor(
    x, columns, inside, row, temperature_ptr, penalty_ptr, first_seen_ptr, length, vocab_size,
    HAS_PENALTY: tl.constexpr,
):  # fmt: skip
    # What multiplies a raw logit: see Shaping.shaped.
    sequence = row // length
    factor = 1.0 / tl.load(temperature_ptr + sequence)
    if HAS_PENALTY:
        penalty = tl.load(penalty_ptr + sequence)
        first = tl.load(first_seen_ptr + sequence * vocab_size + columns, mask=inside, other=length)
        penalised = tl.where(x > 0, factor / penalty, factor * penalty)
        return tl.where(first <= row % length, penalised, factor)
    return tl.where(inside, factor, factor)


@triton.jit
def _target_probabilities(
    logits_ptr, probs_ptr, temperature_ptr, penalty_ptr, first_seen_ptr,
    first_row, length, num_columns, num_kept, HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        x = tl.load(logits_ptr + row * num_columns + start + columns, mask=inside, other=float("-inf"))
        x = x * _shaping_factor(
            x, start + columns, inside, first_row + row, temperature_ptr, penalty_ptr, first_seen_ptr,
            length, num_columns, HAS_PENALTY,
        )  # fmt: skip
        new_top = tl.maximum(top, x)
        # A lane that has seen nothing yet stays at -inf: exp(-inf - -inf) would be NaN.
        seen = new_top > float("-inf")
        total = tl.where(seen, total * tl.exp(top - new_top) + tl.exp(x - new_top), 0.0)
        top = new_top
    peak = tl.max(top, axis=0)
    log_total = peak + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(top - peak), 0.0), axis=0))
    for start in range(0, num_kept, BLOCK):
        inside = start + columns < num_kept
        x = tl.load(logits_ptr + row * num_columns + start + columns, mask=inside, other=float("-inf"))
        x = x * _shaping_factor(
            x, start + columns, inside, first_row + row, temperature_ptr, penalty_ptr, first_seen_ptr,
            length, num_columns, HAS_PENALTY,
        )  # fmt: skip
        p = tl.exp(x - log_total)
        tl.store(probs_ptr + row * num_kept + start + columns, p.to(probs_ptr.dtype.element_ty), mask=inside)


def launch_target_probabilities(logits: Tensor, first_row: int, shaping: "Shaping", out: Tensor) -> None:
    """See target_probabilities in losses.py: logits [M, V] of the rows from ``first_row`` on to out [M, Vd]."""
    rows, num_columns = logits.shape
    _target_probabilities[(rows,)](
        logits, out, shaping.temperature, shaping.penalty, _seen_or_dummy(shaping),
        first_row, shaping.length, num_columns, out.shape[1],
        HAS_PENALTY=shaping.first_seen is not None, BLOCK=2048, num_warps=8,
    )  # fmt: skip


@triton.jit
def _block_losses(
    z_ptr, target_ptr, target_row_ptr, label_ptr, weight_ptr, temperature_ptr, penalty_ptr, first_seen_ptr,
    ce_ptr, l1_ptr, grad_ptr, length, vocab_size, num_columns, ce_weight, l1_weight,
    HAS_PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per row; the whole row stays in registers, so each tensor moves through memory once.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    target_row = tl.load(target_row_ptr + row)
    z = tl.load(z_ptr + row * num_columns + columns, mask=inside, other=float("-inf"))
    factor = _shaping_factor(
        z, columns, inside, target_row, temperature_ptr, penalty_ptr, first_seen_ptr, length, vocab_size, HAS_PENALTY
    )
    z = z * factor
    peak = tl.max(z, axis=0)
    e = tl.exp(z - peak)
    total = tl.sum(e, axis=0)
    p = e / total
    q = tl.load(target_ptr + target_row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    difference = p - q
    l1 = tl.sum(tl.abs(difference), axis=0) + tl.maximum(1.0 - tl.sum(q, axis=0), 0.0)
    sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
    label = tl.load(label_ptr + row)
    is_label = columns == label
    known = label >= 0
    label_z = tl.sum(tl.where(is_label, z, 0.0), axis=0)
    ce = tl.where(known, tl.log(total) + peak - label_z, 0.0)
    grad = l1_weight * p * (sign - tl.sum(sign * p, axis=0))
    grad += tl.where(known, ce_weight, 0.0) * (p - tl.where(is_label, 1.0, 0.0))
    grad = grad * tl.load(weight_ptr + row) * factor
    tl.store(ce_ptr + row, ce)
    tl.store(l1_ptr + row, l1)
    tl.store(grad_ptr + row * num_columns + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def launch_block_losses(
    z: Tensor, targets: "SlotTargets", rows: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """See block_losses in losses.py."""
    num_rows, num_columns = z.shape
    shaping, weights = targets.shaping, targets.weights[rows]
    # Poisoned, so that a row that was not written shows.
    ce, l1 = (torch.full_like(weights, float("nan")) for _ in range(2))
    grad = torch.empty_like(z, dtype=dtype)
    vocab_size = 0 if shaping.first_seen is None else shaping.first_seen.shape[1]
    _block_losses[(num_rows,)](
        z, targets.probabilities, targets.rows[rows], targets.labels[rows], weights,
        shaping.temperature, shaping.penalty, _seen_or_dummy(shaping),
        ce, l1, grad, shaping.length, vocab_size, num_columns, targets.ce_weight, targets.l1_weight,
        HAS_PENALTY=shaping.first_seen is not None, BLOCK=triton.next_power_of_2(num_columns), num_warps=32,
    )  # fmt: skip
    return ce, l1, grad


def _seen_or_dummy(shaping: "Shaping") -> Tensor:
    return shaping.penalty if shaping.first_seen is None else shaping.first_seen
