"""Floats as whole numbers in the same order, and which request a row belongs to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner_of(row, starts_ptr, num_requests, REQUESTS: tl.constexpr):
    """The request that a row belongs to: how many requests end at or before it."""
    request = tl.arange(0, REQUESTS)
    ends = tl.load(starts_ptr + 1 + request, mask=request < num_requests, other=2147483647)
    return tl.sum((ends <= row).to(tl.int32), axis=0)


@triton.jit
def key_of(z):
    """Whole numbers in the order of the floats."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def unkey(key):
    """The float of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
