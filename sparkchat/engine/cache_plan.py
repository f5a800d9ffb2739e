"""How large the caches of a pair are made: rows, positions of a row, and pages where rows share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkchat.engine.captured.build import BLOCKS_BEHIND, SPARE_ROWS
from sparkchat.engine.captured.memory import fitting_cache, fitting_context, free_bytes, storage_of
from sparkchat.engine.captured.tiers import row_tiers
from sparkchat.engine.prefill import CHUNK_ROWS
from sparkchat.errors import UsageError
from sparkchat.kernels.attention import attention_bytes
from sparkchat.memory_plan import KEPT_SESSIONS
from sparkchat.models.attention import MOST_COPIED
from sparkchat.models.page_table import PAGE_SIZE
from sparkchat.params import LoadSpec

Progress = Callable[[dict[str, Any]], None]
_GROWTH_STEP = 512
"""Positions by which storage that grows may be larger than it has to be (kv_cache.key_slots)."""


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the caches of target and drafter."""

    context: int
    """Most tokens of one request."""
    rows: int
    room: int
    """Positions of a row: the context, and what is drafted over its end."""
    max_span: int
    num_tokens: int | None = None
    """That all requests may have cached together; None where nothing limits them but their rows."""
    is_paged: bool = False
    """The tokens lie in pages; else in storage that grows."""

    def new_caches(self, target: Any, drafter: Any) -> tuple[Any, Any]:
        cache = target.new_cache(self.rows, self.room, self.max_span, **self._limit(0))
        if drafter is None:
            return cache, None
        # A block reaches further than what is verified of it: the drafter's room never is what is lacking.
        return cache, drafter.new_cache(self.rows, self.room, **self._limit(self.rows))

    def _limit(self, more_pages: int) -> dict[str, int]:
        if self.num_tokens is None:
            return {}
        if self.is_paged:
            return {"pages": self.num_tokens // PAGE_SIZE + more_pages}
        return {"tokens": self.num_tokens + more_pages * _GROWTH_STEP}


def plan_caches(
    spec: LoadSpec, device: torch.device, target: Any, drafter: Any, longest: int, captures: bool, progress: Progress
) -> CachePlan:
    """``longest``: the context asked for, or the model's own. ``captures``: steps are to be captured.

    Raises NotEnoughMemory, and UsageError for a limit that this pair cannot keep.
    """
    block = 0 if drafter is None else drafter.config.block_size
    rows = spec.concurrency + KEPT_SESSIONS + (SPARE_ROWS if captures else 0)
    behind = (block + 1) * (BLOCKS_BEHIND if captures else 1)
    is_paged = can_page(target, drafter) and (captures or device.type == "cuda" or spec.cache_tokens is not None)
    context, tokens = longest, None
    if is_paged or (spec.cache_tokens is not None and can_limit(target, drafter) and not captures):
        context, tokens = _shared_tokens(spec, device, target, drafter, longest, rows, behind, captures, progress)
        if tokens < spec.concurrency * context:
            words = f"the cache holds {tokens} tokens, and up to {spec.concurrency} requests share it"
            progress({"event": "notice", "id": None, "message": f"{words}; who finds no room in it waits"})
    elif spec.cache_tokens is not None:
        raise UsageError(f"--cache-tokens was given, but requests of {spec.name} share no cache here; leave it out")
    elif captures:
        context = _context_for_graphs(spec, longest, rows, target, drafter, progress)
    return CachePlan(context, rows, context + behind, max(CHUNK_ROWS, block + 1), tokens, is_paged)


def can_page(target: Any, drafter: Any) -> bool:
    """Whether the caches of both may lie in pages."""
    return all(getattr(model, "can_page", False) for model in (target, drafter) if model is not None)


def can_limit(target: Any, drafter: Any) -> bool:
    """Whether the caches of both may share their room in some way."""
    return all(hasattr(model, "can_page") for model in (target, drafter) if model is not None)


def _shared_tokens(
    spec: LoadSpec,
    device: torch.device,
    target: Any,
    drafter: Any,
    longest: int,
    rows: int,
    behind: int,
    captures: bool,
    progress: Progress,
) -> tuple[int, int]:
    """The context, and the tokens that all requests share."""
    per_token, fixed, free = 1, 0, None
    if device.type == "cuda":
        per_token, per_row = storage_of(target, drafter, max(CHUNK_ROWS, behind))
        # Blank pages and those of nobody, and the drafter's that are more than the target's.
        fixed = rows * (per_row + PAGE_SIZE * per_token) + step_bytes(spec, target, drafter, longest + behind)
        # What is copied out of pages, and without captured steps the caches in which steps are timed.
        fixed += MOST_COPIED + (0 if captures else max(1280, 256 * spec.concurrency) * per_token)
        free = free_bytes(device)
    context, tokens, notice = fitting_cache(
        spec.context,
        longest,
        spec.cache_tokens,
        sharers=spec.concurrency + KEPT_SESSIONS,
        behind=behind,
        bytes_per_token=per_token,
        fixed_bytes=fixed,
        free_bytes=free,
        name=spec.name,
    )
    if notice is not None:
        progress({"event": "notice", "id": None, "message": notice})
    return context, tokens


def step_bytes(spec: LoadSpec, target: Any, drafter: Any, end: int = 0) -> int:
    """Bytes of a step's own buffers: laws over the vocabulary, and with ``end`` positions what attention leaves."""
    config, block, size = target.config, 0, 0
    if drafter is not None:
        block = drafter.config.block_size
        size = 2 * 4 * spec.concurrency * block * drafter.config.draft_vocab_size
        if end:
            size += attention_bytes(spec.concurrency * block, *_heads(drafter), end)
    if end:
        size += attention_bytes(row_tiers(block, spec.concurrency)[-1], *_heads(target), end)
    return size + 2 * 4 * spec.concurrency * (block + 1) * config.vocab_size


def _heads(model: Any) -> tuple[int, int]:
    return model.config.decoder.num_heads, model.config.decoder.head_dim


def _context_for_graphs(spec: LoadSpec, context: int, rows: int, target: Any, drafter: Any, progress: Progress) -> int:
    """What there is room for when captured steps take all storage at once. Raises NotEnoughMemory."""
    # Of ranks that share a model, each keeps the whole state of every request.
    own, own_drafter = getattr(target, "inner", target), getattr(drafter, "inner", drafter)
    if own.device.type != "cuda" or not hasattr(own, "decode_rows"):
        return context
    block = 0 if drafter is None else drafter.config.block_size
    per_position, per_row = storage_of(own, own_drafter, max(CHUNK_ROWS, block + 1))
    context, notice = fitting_context(
        spec.context,
        context,
        rows=rows,
        bytes_per_position=per_position,
        law_bytes=rows * per_row + step_bytes(spec, target, drafter),
        free_bytes=free_bytes(target.device),
        name=spec.name,
    )
    if notice is not None:
        progress({"event": "notice", "id": None, "message": notice})
    return context
