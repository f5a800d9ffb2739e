"""Saves the drafter in the published layout, and the trainer's own state for resuming."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkchat.errors import DamagedFile, ModelNotFound
from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.optimizer import DrafterOptimizer

STATE_FILE = "training_state/state.safetensors"
"""In a folder of its own: readers of a drafter take every .safetensors file beside its config"""


def export_drafter(drafter: TrainingDrafter, draft_to_target: Tensor, num_anchors: int, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16) to ``folder``.

    The embedding table and the output head are the target's and are not stored. ``d2t`` holds
    target_id - draft_id for each draft id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scale = drafter.feature_scale.float()
    weights = {}
    for name, value in drafter.named_parameters():
        value = value.detach().float()
        weights[name] = (value / scale if name == "fc.weight" else value).to("cpu", torch.bfloat16).contiguous()
    ids = draft_to_target.cpu()
    weights["d2t"] = ids - torch.arange(ids.shape[0])
    partial = folder / "model.safetensors.part"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(drafter_config(drafter, num_anchors), indent=2) + "\n")


def drafter_config(drafter: TrainingDrafter, num_anchors: int) -> dict[str, object]:
    """The flat config of the published drafters, plus draft_vocab_size."""
    target, shape = drafter.target.shape, drafter.config
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": shape.block_size,
        "confidence_head_with_markov": True,
        "draft_vocab_size": shape.draft_vocab_size,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "layer_types": ["full_attention"] * shape.num_layers,
        "markov_head_type": "vanilla",
        "markov_rank": shape.markov_rank,
        "mask_token_id": drafter.mask_token_id,
        "max_position_embeddings": target.max_context,
        "num_anchors": num_anchors,
        "num_attention_heads": target.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": target.num_kv_heads,
        "num_target_layers": target.num_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": {"rope_theta": target.rope_theta, "rope_type": "default"},
        "target_layer_ids": list(drafter.tap_layers),
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }


@dataclass(frozen=True)
class TrainingState:
    """What a later cycle goes on from."""

    drafter: dict[str, Tensor]
    """fp32 weights and buffers by name"""
    moments: dict[str, Tensor]
    """The optimiser's state, as DrafterOptimizer.state_tensors names it"""
    draft_to_target: Tensor
    num_steps: int
    cycle: int


def save_state(
    path: Path,
    drafter: TrainingDrafter,
    optimizer: DrafterOptimizer,
    draft_to_target: Tensor,
    num_steps: int,
    cycle: int,
) -> None:
    """Writes a TrainingState to ``path`` (safetensors), whole or not at all."""
    tensors = {f"drafter:{name}": value for name, value in drafter.state_dict().items()}
    tensors |= {f"moments:{name}": value for name, value in optimizer.state_tensors().items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    tensors["draft_to_target"] = draft_to_target.cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    save_file(tensors, partial, metadata={"num_steps": str(num_steps), "cycle": str(cycle)})
    partial.replace(path)


def load_state(path: Path, device: str) -> TrainingState:
    """Raises DamagedFile when the file at ``path`` is not a training state."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            counters = file.metadata() or {}
        parts: dict[str, dict[str, Tensor]] = {"drafter": {}, "moments": {}}
        draft_to_target = tensors.pop("draft_to_target").cpu()
        for name, value in tensors.items():
            part, _, rest = name.partition(":")
            parts[part][rest] = value
        return TrainingState(**parts, draft_to_target=draft_to_target, num_steps=int(counters["num_steps"]),
                             cycle=int(counters["cycle"]))  # fmt: skip
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DamagedFile(f"{path}: not a training state; remove it to start afresh") from error


def load_exported(folder: Path) -> dict[str, Tensor]:
    """fp32 weights of a drafter that export_drafter wrote, and its ``draft_to_target``.

    Raises ModelNotFound or DamagedFile.
    """
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelNotFound(f"drafter {folder}: no model.safetensors there")
    try:
        weights = load_file(file)
        offsets = weights.pop("d2t")
    except (SafetensorError, KeyError) as error:
        raise DamagedFile(f"{file}: not a drafter of ours ({error})") from error
    weights = {name: value.float() for name, value in weights.items()}
    return {**weights, "draft_to_target": offsets + torch.arange(offsets.shape[0])}
