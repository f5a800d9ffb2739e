"""How the confidences of a pair are corrected: what the user's profile says, else what was fitted on this machine, else
what the shipped profile says.

Temperatures hold for every kind of sampling; a correction by kind of sampling comes before those of its own layer and
of the layers below.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparkchat import __version__
from sparkchat.engine.cache_file import files_identity, measurement_key
from sparkchat.engine.calibration import load_calibration, load_temperatures
from sparkchat.engine.device import device_name
from sparkchat.params import Correction, LoadSpec


def temperatures_folder(spec: LoadSpec) -> Path | None:
    return None if spec.cache_dir is None else Path(spec.cache_dir) / "temperatures"


def temperatures_key(spec: LoadSpec, device: torch.device) -> str:
    """The pair, the device and the versions a fit belongs to."""
    return measurement_key(
        model=files_identity(spec.model_path),
        drafter=None if spec.drafter_path is None else files_identity(spec.drafter_path),
        device=f"{device_name(device)} {spec.dtype}",
        versions={"sparkchat": __version__, "torch": torch.__version__},
    )


def temperatures_of(
    spec: LoadSpec, device: torch.device, block: int
) -> tuple[tuple[float, ...] | None, str, str | None]:
    """(temperatures, where they are from, notice). Stored or shipped ones are stretched to ``block`` drafts."""
    if spec.simulate_acceptance is not None or spec.dummy_weights:
        return None, "none", None  # chances need no calibration, and random weights are not told apart by files
    if spec.temperatures is not None:
        return spec.temperatures, "profile", None
    folder, notice = temperatures_folder(spec), None
    if folder is not None and block:
        found, notice = load_temperatures(folder, temperatures_key(spec, device))
        if found is not None:
            return _stretched(found, block), "fitted", None
    if spec.shipped_temperatures is not None and block:
        return _stretched(spec.shipped_temperatures, block), "shipped", notice
    return None, "none", notice


def calibration_of(spec: LoadSpec, device: torch.device, block: int) -> dict[str, Correction]:
    """By kind of sampling, each for ``block`` drafts; a kind that is not there takes the temperatures."""
    if not block or spec.simulate_acceptance is not None or spec.dummy_weights:
        return {}
    found: dict[str, Correction] = {}
    if spec.temperatures is None:
        found |= spec.shipped_calibration
        folder = temperatures_folder(spec)
        if folder is not None:
            found |= load_calibration(folder, temperatures_key(spec, device))
    found |= spec.calibration
    return {kind: one.stretched(block) for kind, one in found.items()}


def _stretched(found: tuple[float, ...], block: int) -> tuple[float, ...]:
    # The next draft of a longer block is nearest to the last one that was fitted.
    return found + found[-1:] * max(0, block - len(found))
