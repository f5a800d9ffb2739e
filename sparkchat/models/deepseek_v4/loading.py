"""From a checkpoint folder to the target and the drafter in it."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkchat.environment import memory
from sparkchat.errors import NotEnoughMemory, UsageError
from sparkchat.models.deepseek_v4.config import ARCHITECTURE, DeepseekV4Config, parse_config
from sparkchat.models.deepseek_v4.drafter import DsparkDrafter
from sparkchat.models.deepseek_v4.dummy import DummyCheckpoint
from sparkchat.models.deepseek_v4.layout import Layout, trunk_layout
from sparkchat.models.deepseek_v4.load_plan import packed_bytes, unpacked_bytes
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.mtp import MtpDrafter
from sparkchat.models.deepseek_v4.scope import Scope
from sparkchat.models.deepseek_v4.weights import DRAFTER_PREFIX, CheckpointSource, check_ranks, drafter_layout
from sparkchat.models.hf_config import ConfigFile, architecture_of, read_config
from sparkchat.models.parallel import ALONE, Group
from sparkchat.models.weights import read_json

UNPACKED_BYTES = 512 << 20
"""A model of at most so many bytes once unpacked is unpacked on the CPU, where it then runs several times faster."""


def read_v4_config(folder: Path) -> DeepseekV4Config:
    """config.json, with the end tokens of generation_config.json. Raises DamagedFile or UsageError."""
    generation = folder / "generation_config.json"
    eos = ()
    if generation.is_file():
        eos = ConfigFile(read_json(generation), generation).whole_numbers("eos_token_id")
    return parse_config(read_config(folder), eos or None)


def load_trunk(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    has_roundings: bool = False,
    is_packed: bool | None = None,
    is_dummy: bool = False,
    group: Group = ALONE,
) -> DeepseekV4:
    """Load the target, or a rank's part of it. ``dtype`` None is float32 on the CPU and bfloat16 on a GPU.

    ``is_packed``: keep weights as they are stored; None unpacks what is small, on the CPU alone. ``is_dummy``: read
    config.json alone and make up the weights.
    Raises ModelNotFound, DamagedFile, UsageError, or NotEnoughMemory before any weight is read.
    """
    config = read_v4_config(folder)
    layout, dtype = trunk_layout(config), dtype or _own_dtype(device)
    source = _source(folder, config, layout, device, group, is_dummy)
    if is_packed is None:
        is_packed = device.type != "cpu" or unpacked_bytes(layout, dtype) > UNPACKED_BYTES
    _refuse_too_large(folder, layout, device, None if is_packed else dtype, group)
    model = DeepseekV4(source, config, device, dtype, has_roundings=has_roundings, is_packed=is_packed, group=group)
    source.finish()
    return model


def load_drafter(
    folder: Path,
    target: DeepseekV4,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    has_roundings: bool = False,
    is_dummy: bool = False,
) -> DsparkDrafter | MtpDrafter:
    """Load what lies under ``mtp.*`` of a checkpoint, which need not be the target's own; packed where that is.

    Raises ModelNotFound, DamagedFile, NotEnoughMemory, or UsageError where there is none or it does not fit ``target``.
    """
    config = read_v4_config(folder)
    layout = drafter_layout(config)
    if not layout:
        raise UsageError(f"{folder} has no drafter: its config names neither DSpark stages nor an MTP block")
    _check_fit(folder, config, target.config)
    group, dtype = target.group, dtype or _own_dtype(device)
    source = _source(folder, config, layout, device, group, is_dummy)
    _refuse_too_large(folder, layout, device, None if target.is_packed else dtype, group)
    scope = Scope(
        source,
        device,
        dtype,
        has_roundings=has_roundings,
        is_packed=target.is_packed,
        group=group,
        prefix=DRAFTER_PREFIX,
    )
    kind = MtpDrafter if config.dspark is None else DsparkDrafter
    drafter = kind(scope, config, target)
    source.finish()
    return drafter


def check_parts(folder: Path, num_ranks: int) -> None:
    """Raise UsageError where the model in ``folder`` is none that so many ranks can share."""
    name = architecture_of(read_config(folder))
    if name != ARCHITECTURE:
        raise UsageError(f"{folder}: --tp {num_ranks} shares {ARCHITECTURE} alone, and this is {name}; leave it out")
    check_ranks(read_v4_config(folder), num_ranks)


def _source(
    folder: Path, config: DeepseekV4Config, layout: Layout, device: torch.device, group: Group, is_dummy: bool
) -> CheckpointSource | DummyCheckpoint:
    if is_dummy:
        return DummyCheckpoint(config, layout, device, group)
    return CheckpointSource(folder, config, layout, rank=group.rank, num_ranks=group.size)


def load_part(
    folder: Path,
    drafter: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    group: Group,
    is_dummy: bool = False,
) -> tuple[DeepseekV4, DsparkDrafter | MtpDrafter | None]:
    """A rank's part of the target in ``folder`` and of the drafter in ``drafter``.

    Raises as ``load_trunk`` and ``load_drafter`` do.
    """
    target = load_trunk(folder, device=device, dtype=dtype, group=group, is_dummy=is_dummy)
    if drafter is None:
        return target, None
    return target, load_drafter(drafter, target, device=device, dtype=dtype, is_dummy=is_dummy)


def _refuse_too_large(
    folder: Path, layout: Layout, device: torch.device, unpacked: torch.dtype | None, group: Group
) -> None:
    """``unpacked``: the format of the weights in memory; None keeps them as they are stored."""
    if unpacked is None:
        needed, how = packed_bytes(layout, group.rank, group.size), "as they are stored"
    else:
        needed, how = unpacked_bytes(layout, unpacked), f"unpacked to {str(unpacked).removeprefix('torch.')}"
        needed //= group.size
    free, place = _free_bytes(device, group.size)
    if free is not None and needed > free:
        part = f"a part of the weights for each of {group.size} ranks takes" if group.size > 1 else "the weights take"
        raise NotEnoughMemory(
            f"{folder}: {part} {needed / 1e9:.1f} GB {how}, and {free / 1e9:.1f} GB are free on {place}; "
            "choose a smaller model, see `sparkchat list`"
        )


def _free_bytes(device: torch.device, num_ranks: int) -> tuple[int | None, str]:
    """For one rank, and where that is: ranks on the CPU share its memory."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0], str(device)
    free = memory().available_bytes
    return None if free is None else free // num_ranks, "cpu" if num_ranks == 1 else "cpu for each"


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
