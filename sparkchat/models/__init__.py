"""Models by architecture: ``load_target`` and ``load_drafter`` are all that the engine calls to get one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparkchat.architectures import DEEPSEEK_V4, GEMMA4, TARGETS, refuse_unknown
from sparkchat.errors import ModelNotFound, UsageError
from sparkchat.models.base import ForwardBatch, KVCache, ModelConfig, TargetModel
from sparkchat.models.dense import DenseModel
from sparkchat.models.dummy import DRAFTER_ABSENT, DummySource
from sparkchat.models.hf_config import architecture_of, parse_fp8_block, parse_target, read_config
from sparkchat.models.weights import FolderSource

if TYPE_CHECKING:
    from sparkchat.models.deepseek_v4.drafter import DsparkDrafter
    from sparkchat.models.deepseek_v4.model import DeepseekV4
    from sparkchat.models.deepseek_v4.mtp import MtpDrafter
    from sparkchat.models.dspark.drafter import Drafter

__all__ = ["ForwardBatch", "KVCache", "ModelConfig", "TargetModel", "load_drafter", "load_target"]


def load_target(
    path: Path, *, device: torch.device, dtype: torch.dtype | None = None, is_dummy: bool = False
) -> DenseModel | DeepseekV4:
    """Load a target from a Hugging Face folder or a .gguf file.

    ``dtype`` None is the file's own format on the CPU and bfloat16 on a GPU. ``is_dummy``: read config.json alone and
    make up the weights (dummy.py).
    Raises ModelNotFound, UsageError (architecture or feature not supported) or DamagedFile.
    """
    with _one_thread():
        if is_dummy:
            return _dummy_target(Path(path), device, dtype)
        return _load_target(Path(path), device, dtype)


def _dummy_target(path: Path, device: torch.device, dtype: torch.dtype | None) -> DenseModel | DeepseekV4:
    if not (path / "config.json").is_file():
        raise UsageError(f"dummy weights need a config.json, and {path} is no folder with one; give a model folder")
    config = read_config(path)
    name = architecture_of(config)
    if name == DEEPSEEK_V4:
        from sparkchat.models.deepseek_v4.loading import load_trunk

        return load_trunk(path, device=device, dtype=dtype, is_dummy=True)
    if name not in TARGETS:
        known = ", ".join((*TARGETS, DEEPSEEK_V4))
        raise UsageError(f"{path}: dummy weights are made for {known} alone, and this is {name}")
    dtype = dtype or torch.bfloat16
    source = DummySource(device, dtype)
    return DenseModel(source, parse_target(path, config), device, dtype, "model.")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is many short loops over memory: a second thread gains little, and where another process holds its
    core every loop waits for a turn of the scheduler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load_target(path: Path, device: torch.device, dtype: torch.dtype | None) -> DenseModel | DeepseekV4:
    if path.is_file() and path.suffix == ".gguf":
        from sparkchat.models.gguf import GgufSource

        source = GgufSource(path)
        on_cpu = None if device.type == "cpu" else torch.bfloat16
        model = DenseModel(source, source.config, device, dtype or on_cpu, "model.")
        source.finish()
        return model
    if not path.is_dir():
        raise ModelNotFound(f"{path} is no model folder and no .gguf file; give the folder that holds config.json")
    config = read_config(path)
    name = architecture_of(config)
    if name == DEEPSEEK_V4:
        from sparkchat.models.deepseek_v4.loading import load_trunk

        return load_trunk(path, device=device, dtype=dtype)
    if name in GEMMA4:
        from sparkchat.models.gemma4.model import load_gemma4

        return load_gemma4(path, device, dtype)
    refuse_unknown(name, path)
    parsed = parse_target(path, config)
    fp8_block = parse_fp8_block(config)
    source = FolderSource(path, fp8_block)
    # Float8 stays float8 on a GPU.
    own = None if fp8_block is not None and device.type != "cpu" else _own_dtype(source, device)
    model = DenseModel(source, parsed, device, dtype or own, "model.")
    source.finish(["lm_head.weight"] if parsed.tie_word_embeddings else [])
    return model


def _own_dtype(source: FolderSource, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; on the CPU the format of the embedding table, fp16 counting as bfloat16."""
    if device.type != "cpu":
        return torch.bfloat16
    return torch.float32 if source.dtype_of("model.embed_tokens.weight") == "F32" else torch.bfloat16


def load_drafter(
    path: Path,
    target: DenseModel | DeepseekV4,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    is_dummy: bool = False,
) -> Drafter | DsparkDrafter | MtpDrafter:
    """Load the drafter in a DeepSpec folder, or in a DeepSeek V4 checkpoint, for ``target``.

    ``is_dummy``: read config.json alone and make up the weights.

    Raises as ``load_target`` does.
    """
    path = Path(path)
    with _one_thread():
        if architecture_of(read_config(path)) == DEEPSEEK_V4:
            from sparkchat.models.deepseek_v4.loading import load_drafter as load_inner_drafter

            return load_inner_drafter(path, target, device=device, dtype=dtype, is_dummy=is_dummy)
        if architecture_of(read_config(path)) == "Gemma4DSparkModel":
            from sparkchat.models.gemma4.drafter import load_gemma4_drafter

            return load_gemma4_drafter(path, target, device, dtype)
        from sparkchat.models.dspark.drafter import Drafter

        source = DummySource(device, dtype or torch.bfloat16, DRAFTER_ABSENT) if is_dummy else None
        return Drafter.load(path, target, device=device, dtype=dtype, source=source)
