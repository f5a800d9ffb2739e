"""Bytes of every tensor that a model holds, found by walking its objects."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def held_bytes(*roots: Any) -> int:
    """Each piece of memory counted once, however many views and objects share it."""
    seen: set[int] = set()
    pieces: dict[int, int] = {}
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.is_mkldnn:  # an opaque layout without a storage of its own
                pieces[id(item)] = item.numel() * item.element_size()
            else:
                storage = item.untyped_storage()
                pieces[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif type(item).__module__.startswith("sparkchat."):
            waiting += vars(item).values() if hasattr(item, "__dict__") else []
    return sum(pieces.values())
