"""Which device a run is on."""

from __future__ import annotations

import torch

from sparkchat.errors import UsageError


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device. Raises UsageError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device {name} was asked for, but torch sees no CUDA GPU; give --device cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name} was asked for, but there are {torch.cuda.device_count()} GPUs")
    return device


def device_name(device: torch.device, count: int = 1) -> str:
    """``cpu``, or the GPU's own name: what measurements and cost tables of profiles are kept under.

    ``count`` devices that share a model are ``2 x NVIDIA H200``.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name if count == 1 else f"{count} x {name}"
