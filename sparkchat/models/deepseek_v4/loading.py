"""From a checkpoint folder to the target and the drafter in it."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkchat.environment import memory
from sparkchat.errors import NotEnoughMemory, UsageError
from sparkchat.models.deepseek_v4.config import DeepseekV4Config, parse_config
from sparkchat.models.deepseek_v4.drafter import DsparkDrafter
from sparkchat.models.deepseek_v4.layout import Layout, trunk_layout
from sparkchat.models.deepseek_v4.load_plan import unpacked_bytes
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.mtp import MtpDrafter
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.weights import CheckpointSource, drafter_layout
from sparkchat.models.hf_config import ConfigFile, read_config
from sparkchat.models.weights import read_json


def read_v4_config(folder: Path) -> DeepseekV4Config:
    """config.json, with the end tokens of generation_config.json. Raises DamagedFile or UsageError."""
    generation = folder / "generation_config.json"
    eos = ()
    if generation.is_file():
        eos = ConfigFile(read_json(generation), generation).whole_numbers("eos_token_id")
    return parse_config(read_config(folder), eos or None)


def load_trunk(
    folder: Path, *, device: torch.device, dtype: torch.dtype | None, has_roundings: bool = False
) -> DeepseekV4:
    """Load the target. ``dtype`` None is float32 on the CPU and bfloat16 on a GPU.

    Raises ModelNotFound, DamagedFile, UsageError, or NotEnoughMemory before any weight is read.
    """
    config = read_v4_config(folder)
    layout, dtype = trunk_layout(config), dtype or _own_dtype(device)
    source = CheckpointSource(folder, config, layout)
    _refuse_too_large(folder, layout, device, dtype)
    model = DeepseekV4(source, config, device, dtype, has_roundings=has_roundings)
    source.finish()
    return model


def load_drafter(
    folder: Path,
    target: DeepseekV4,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    has_roundings: bool = False,
) -> DsparkDrafter | MtpDrafter:
    """Load what lies under ``mtp.*`` of a checkpoint, which need not be the target's own.

    Raises ModelNotFound, DamagedFile, or UsageError where there is none or it does not fit ``target``.
    """
    config = read_v4_config(folder)
    layout = drafter_layout(config)
    if not layout:
        raise UsageError(f"{folder} has no drafter: its config names neither DSpark stages nor an MTP block")
    _check_fit(folder, config, target.config)
    source = CheckpointSource(folder, config, layout)
    scope = Scope(source, device, dtype or _own_dtype(device), has_roundings=has_roundings, prefix="mtp.")
    kind = MtpDrafter if config.dspark is None else DsparkDrafter
    drafter = kind(scope, config, target)
    source.finish()
    return drafter


def _refuse_too_large(folder: Path, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """This implementation unpacks projections to ``dtype``: what the files take is not what memory holds."""
    needed = unpacked_bytes(layout, dtype)
    free = memory().available_bytes if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"{folder}: the weights take {needed / 1e9:.1f} GB unpacked to {str(dtype).removeprefix('torch.')}, and "
            f"{free / 1e9:.1f} GB are free on {device.type}; choose a smaller model, see `sparkchat list`"
        )


def _check_fit(folder: Path, config: DeepseekV4Config, target: DeepseekV4Config) -> None:
    for name, what in (
        ("hidden_size", "hidden size"),
        ("vocab_size", "vocabulary"),
        ("num_layers", "layer count of the target"),
        ("hc_mult", "number of residual streams"),
    ):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise UsageError(
                f"drafter {folder} does not fit this model: its {what} is {ours}, the model's {theirs}; "
                "give the drafter trained for it"
            )


def _own_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
