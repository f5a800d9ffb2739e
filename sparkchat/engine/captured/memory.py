"""How long a context the device has room for, when all storage is taken at once."""

from __future__ import annotations

from typing import Any

import torch

from sparkchat.errors import NotEnoughMemory, UsageError
from sparkchat.models.page_table import PAGE_SIZE

GRAPHS_BYTES = 1 << 30
"""Room left for what graphs hold: intermediate results of the largest step, and launches."""
ROUND_TO = 256
_TRIED = (4096, 8192)


def fitting_context(
    asked: int | None, longest: int, *, rows: int, bytes_per_position: int, law_bytes: int, free_bytes: int, name: str
) -> tuple[int, str | None]:
    """The context to make room for, and a notice when it is shorter than the model's own.

    ``rows`` requests of it take ``bytes_per_position`` for every position, of target and drafter together;
    ``law_bytes`` are the step's own buffers. Raises NotEnoughMemory when what was asked for does not fit, or nothing
    useful does.
    """
    room = free_bytes - law_bytes - GRAPHS_BYTES
    most = max(0, room // (rows * bytes_per_position)) // ROUND_TO * ROUND_TO
    if asked is not None and asked > most:
        raise NotEnoughMemory(
            f"a context of {asked} for {rows} requests of {name} needs {_gb(asked * rows * bytes_per_position)} GB, "
            f"and the device has {_gb(max(0, room))} GB left; give --context {most} or less"
        )
    if asked is not None or most >= longest:
        return asked or longest, None
    if most < ROUND_TO:
        raise NotEnoughMemory(f"{name} leaves no room for a context on this device; choose a smaller model")
    return most, f"the device has room for a context of {most} tokens in {rows} requests; the model takes {longest}"


def fitting_cache(
    asked: int | None,
    longest: int,
    limit: int | None,
    *,
    sharers: int,
    behind: int,
    bytes_per_token: int,
    fixed_bytes: int,
    free_bytes: int | None,
    name: str,
) -> tuple[int, int, str | None]:
    """The context, the tokens of a cache that ``sharers`` requests share, and a notice where the context is shorter
    than the model's own.

    One request of the whole context and the ``behind`` positions behind it always fits; more tokens are taken as far as
    there is room, or ``limit`` allows. ``free_bytes`` None: there is room. Raises NotEnoughMemory where what was asked
    for does not fit, or nothing useful does, and UsageError where the limit is below the context asked for.
    """

    def whole(context: int) -> int:
        return -(-(context + behind) // PAGE_SIZE) * PAGE_SIZE

    if limit is not None and asked is not None and limit < asked:
        raise UsageError(
            f"a cache of {limit} tokens does not hold a context of {asked}; give --context {limit} or less, "
            f"or --cache-tokens {asked} or more"
        )
    if limit is not None:
        longest = min(longest, limit)
    room = None if free_bytes is None else free_bytes - fixed_bytes - GRAPHS_BYTES
    most = whole(longest) * sharers if room is None else max(0, room // bytes_per_token) // PAGE_SIZE * PAGE_SIZE
    context, notice = asked or longest, None
    if whole(context) > most:
        context = max(0, most - behind) // ROUND_TO * ROUND_TO
        if asked is not None and context >= ROUND_TO:
            raise NotEnoughMemory(
                f"a context of {asked} of {name} needs {_gb(asked * bytes_per_token)} GB, "
                f"and the device has {_gb(max(0, room or 0))} GB left; give --context {context} or less"
            )
        if context < ROUND_TO:
            raise NotEnoughMemory(f"{name} leaves no room for a context on this device; choose a smaller model")
        notice = f"the device has room for a context of {context} tokens; the model takes {longest}"
    tokens = min(most, sharers * whole(context))
    return context, tokens if limit is None else min(tokens, max(whole(limit), whole(context))), notice


def storage_of(target: Any, drafter: Any, max_span: int) -> tuple[int, int]:
    """Bytes that one request takes for every position, and whatever its length, in filled caches of both.

    Found by making two small caches of each; what they took is given back. ``max_span``: as of ``new_cache``.
    """

    def filled(context: int) -> int:
        caches = [target.new_cache(1, context, max_span)]
        if drafter is not None:
            caches.append(drafter.new_cache(1, context))
        for cache in caches:
            cache.fill()
        return sum(cache.num_bytes for cache in caches)

    short, long = (filled(context) for context in _TRIED)
    per_position = -(-(long - short) // (_TRIED[1] - _TRIED[0]))
    return per_position, max(0, short - per_position * _TRIED[0])


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nothing holds, torch's own idle blocks among it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
