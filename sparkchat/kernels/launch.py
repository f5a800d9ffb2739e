"""How kernels are started: one place for programmatic dependent launch and for compiling ahead of time.

With overlap on, a kernel may start while the one before it on the stream still runs: it loads what never changes
(weights), then waits (``wait`` below) before it reads or writes anything else. Every kernel of this package waits, so
when one has ended, all before it have. A kernel that is launched the ordinary way waits as well, for nothing, and lets
the one behind it start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


class Overlap(Enum):
    """Which kernels may start early."""

    NONE = "none"
    SMALL = "small"
    """All but those that stream a large matrix: on an H200 these lost by it what the others gained
    (benchmarks/results/2026-11-30-kernels.md, third run)."""
    ALL = "all"
    BEHIND = "behind"
    """Every launch is made ready early, and nothing is called ahead. The kernel behind starts when all programs of this
    one are at work, into what room they leave, where the launch says that this is no loss (``lets_next``), and else
    when all of them have ended."""


ORDINARY, EARLY, LATE, BEHIND, READY = range(5)
"""What PDL is. With 1 and 3 the next kernel may start when this one has started, with 4 when this one need not wait any
more, so that no more than two are on the card; with 1 weights are called ahead as well."""
_overlap = Overlap.NONE
_start: Callable[..., Any] | None = None
_watch: Callable[[Any], None] | None = None


@contextmanager
def overlap(which: Overlap | bool = Overlap.ALL) -> Iterator[None]:
    """Within the block, kernels are launched (or captured into a graph) with programmatic dependent launch; True means
    all of them."""
    global _overlap
    if isinstance(which, bool):
        which = Overlap.ALL if which else Overlap.NONE
    before, _overlap = _overlap, which
    try:
        yield
    finally:
        _overlap = before


def starts_early(is_streaming: bool) -> bool:
    """Whether a launch made here may start while the one before it runs; ``is_streaming``: it reads a large matrix
    once."""
    return _overlap is Overlap.ALL or (_overlap is Overlap.SMALL and not is_streaming)


def reads_ahead(is_settled: bool) -> bool:
    """Whether a kernel may read what is settled before it waits.

    ``is_settled``: a streaming kernel lies between the last writer of what the caller names so and this launch. Where
    only small kernels start early, that one began when all before it had ended.
    """
    return is_settled and _overlap is Overlap.SMALL


@contextmanager
def started_by(start: Callable[..., Any]) -> Iterator[None]:
    """Within the block, ``start(kernel, grid, *arguments, **options)`` stands in for the launch: for compiling only."""
    global _start
    before, _start = _start, start
    try:
        yield
    finally:
        _start = before


def watch(seen: Callable[[Any], None] | None) -> None:
    """Have ``seen`` called behind every launch from now on with what was compiled for it; None: nobody is."""
    global _watch
    _watch = seen


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    is_streaming: bool = False,
    lets_next: bool | None = None,
    **options: Any,
) -> None:
    """Start ``kernel``; its last constexpr is PDL. ``is_streaming``: see ``Overlap.SMALL``.

    ``lets_next``: whether the kernel behind it may be placed while this one runs; None: if this one streams. It is a
    loss where that kernel fills the card at once, probably as programs placed into what is left are spread unevenly
    (benchmarks/results/2026-12-01-v4-one-rank.md has what was measured).
    """
    if starts_early(is_streaming) or _overlap is Overlap.BEHIND:
        options["launch_pdl"] = True
    how = _how(is_streaming, is_streaming if lets_next is None else lets_next)
    if _start is not None:
        _start(kernel, grid, *arguments, PDL=how, **options)
        return
    compiled = kernel[grid](*arguments, PDL=how, **options)
    if _watch is not None:
        _watch(compiled)


def _how(is_streaming: bool, lets_next: bool) -> int:
    if _overlap is Overlap.NONE:
        return ORDINARY
    if _overlap is not Overlap.BEHIND:
        return EARLY
    if not lets_next:
        return LATE
    return BEHIND if is_streaming else READY


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next kernel start, if it may before this one ends, then wait until everything before this kernel is
    done."""
    if PDL % 2 == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 4:
        tl.extra.cuda.gdc_launch_dependents()


def check_flat(*tensors: Tensor | None) -> None:
    """Raise ValueError where a tensor that a kernel reads number after number does not lie so."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"a kernel got a tensor {tuple(tensor.shape)} with strides {tensor.stride()}, not a flat one"
            )


@triton.jit
def prefetch(pointers, BYTES: tl.constexpr):
    """Call BYTES from each pointer on into L2; both are multiples of 16."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
        [pointers.to(tl.uint64), tl.full(pointers.shape, BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return triton.next_power_of_2(n)
