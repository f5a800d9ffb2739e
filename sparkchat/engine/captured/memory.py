"""How long a context the device has room for, when all storage is taken at once."""

from __future__ import annotations

import torch

from sparkchat.errors import NotEnoughMemory

GRAPHS_BYTES = 1 << 30
"""Room left for what graphs hold: intermediate results of the largest step, and launches."""
ROUND_TO = 256


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


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nothing holds, torch's own idle blocks among it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
