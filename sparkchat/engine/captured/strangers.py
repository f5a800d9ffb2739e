"""Requests that nobody made, to time steps by: as many rows as asked for, each of another token.

Rows of one token would be sent to the same few experts, and a step of many rows would seem to cost what one row costs.
They live in cache rows that are free, or else in the spare ones, and the seats are given back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch

from sparkchat.engine.captured.state import COMPACT
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.models.page_table import PAGE_SIZE
from sparkchat.models.paged_cache import PagedCache

_STRIDE = 7919
"""Between the tokens of neighbouring seats."""
_ENDLESS = 1 << 40


@contextmanager
def strangers(
    step: CapturedStep, count: int, num_rows: int, *, is_drafting: bool, context: int = 1, is_filtered: bool = False
) -> Iterator[None]:
    """``count`` requests whose verification has ``num_rows`` rows; a plain step has one of each.

    ``context``: tokens that each has cached, of which nothing was ever computed: attention takes as long over zeros.
    ``is_filtered``: with top-k and top-p as chats have them. Without top-k these laws, of no text at all, would keep
    far more tokens than those of a text do, and take far longer.
    """
    seats, inputs = step.seats, step.inputs
    names = [field.name for field in fields(seats)]
    before = {name: getattr(seats, name).clone() for name in names}
    place = torch.arange(inputs.seats, device=seats.anchor.device)
    vocab = step.pair.target.config.vocab_size
    numbers = {
        "anchor": (place + 1) * _STRIDE % vocab,
        "kv_len": context,
        "remaining": _ENDLESS,
        "temperature": 1.0,
        "top_k": 20 if is_filtered else 0,
        "top_p": 0.8 if is_filtered else 1.0,
        "min_p": 0.0,
        "seeds": place,
        "rounds": 1,
    }
    words = torch.rand(inputs.num_words, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    words[: inputs.num_whole] = 0.0
    words[inputs.num_whole - 2] = count
    if is_drafting:
        s, spare = inputs.seats, num_rows - count
        words[:count] = inputs.block
        words[2 * s : 2 * s + count] = COMPACT
        for request in range(count):
            # Even shares, the first requests having one more.
            words[s + request] = min(inputs.block, spare // count + (request < spare % count))
    end = context + inputs.block + 1
    with ExitStack() as stack:
        for name, cache, spare_row in (
            ("cache_row", step.pair.cache, step.spare_row),
            ("draft_row", step.pair.draft_cache, step.spare_draft_row),
        ):
            rows = torch.tensor(stack.enter_context(_places(cache, spare_row, count, end)), device=place.device)
            numbers[name] = rows[place % len(rows)]
        try:
            for name in names:
                getattr(seats, name)[:] = numbers[name]
            inputs.device_words.copy_(words)
            yield
        finally:
            for name in names:
                getattr(seats, name).copy_(before[name])
            inputs.device_words.zero_()


def room_each(step: CapturedStep, count: int) -> int:
    """Positions for which each of ``count`` requests finds pages of its own."""
    caches = [cache for cache in (step.pair.cache, step.pair.draft_cache) if isinstance(cache, PagedCache)]
    return min((cache.num_free_tokens // count // PAGE_SIZE * PAGE_SIZE for cache in caches), default=_ENDLESS)


@contextmanager
def _places(cache: Any, spare_row: int, count: int, end: int) -> Iterator[list[int]]:
    """Cache rows with room for positions below ``end``: one for each of ``count`` requests as far as there is room, or
    the spare one for all. Pages that several share would be read from the device's own cache."""
    if not isinstance(cache, PagedCache):
        yield [spare_row]
        return
    own: list[int] = []
    try:
        while len(own) < count and cache.can_take(None, end):
            own.append(cache.allocate())
            cache.take(own[-1], end)
        if own:
            cache.publish()
        else:
            cache.lend(spare_row, end)
        yield own or [spare_row]
    finally:
        for row in own:
            cache.free(row)
        cache.lend(spare_row, 0)
