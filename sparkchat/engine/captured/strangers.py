"""Requests that nobody made, to time steps by: as many rows as asked for, each of another token.

Rows of one token would be sent to the same few experts, and a step of many rows would seem to cost what one row costs.
They live in the spare cache rows, and the seats are given back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from sparkchat.engine.captured.state import COMPACT
from sparkchat.engine.captured.step import CapturedStep
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
        "cache_row": step.spare_row,
        "draft_row": step.spare_draft_row,
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
    spares = [(step.pair.cache, step.spare_row), (step.pair.draft_cache, step.spare_draft_row)]
    paged = [(cache, row) for cache, row in spares if isinstance(cache, PagedCache)]
    try:
        for cache, row in paged:
            # One page again and again would stay in the device's own cache.
            cache.lend(row, context + inputs.block + 1)
        for name in names:
            getattr(seats, name)[:] = numbers[name]
        inputs.device_words.copy_(words)
        yield
    finally:
        for cache, row in paged:
            cache.lend(row, 0)
        for name in names:
            getattr(seats, name).copy_(before[name])
        inputs.device_words.zero_()
