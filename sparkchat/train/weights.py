"""Reads a dense target's weights from a Hugging Face folder or a GGUF file, under Hugging Face names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkchat.errors import DamagedFile, ModelNotFound, UsageError

SUPPORTED = ("llama", "qwen3")


@dataclass(frozen=True)
class TargetShape:
    """Architecture of a dense target, as far as training needs it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_context: int
    tied: bool
    """The output head is the embedding table."""


def read_target(path: Path) -> tuple[TargetShape, dict[str, Tensor]]:
    """Shape and weights (no ``model.`` prefix) of the target at ``path``, a folder or a .gguf file.

    Raises ModelNotFound, UsageError (an architecture that is not supported) or DamagedFile.
    """
    if path.is_file() and path.suffix == ".gguf":
        return _read_gguf(path)
    if (path / "config.json").is_file():
        return _read_folder(path)
    raise ModelNotFound(f"target {path}: no config.json and no .gguf file there; give a model folder or a GGUF file")


def _read_folder(path: Path) -> tuple[TargetShape, dict[str, Tensor]]:
    config = json.loads((path / "config.json").read_text())
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise UsageError(f"target {path}: model_type {kind!r} cannot be trained for; known: {', '.join(SUPPORTED)}")
    rope = config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", "default")
    if config.get("rope_scaling") or scaling != "default":
        raise UsageError(f"target {path}: scaled rotary embeddings are not supported in training")
    heads = config["num_attention_heads"]
    shape = TargetShape(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rms_norm_eps=config["rms_norm_eps"],
        max_context=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    return shape, dict(_folder_tensors(path))


def _folder_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"target {path}: no .safetensors file there")
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name.removeprefix("model."), opened.get_tensor(name)
        except SafetensorError as error:
            raise DamagedFile(f"{file}: {error}") from error


_GGUF_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _read_gguf(path: Path) -> tuple[TargetShape, dict[str, Tensor]]:
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(str(path))
    except (ValueError, OSError) as error:
        raise DamagedFile(f"{path}: not a readable GGUF file ({error})") from error
    shape = _gguf_shape(reader, path)
    weights = {}
    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name)
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if shape.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = _undo_rope_permutation(value, shape.head_dim)
        weights[name] = value
    return shape, weights


def _gguf_shape(reader, path: Path) -> TargetShape:
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    kind = fields.get("general.architecture")
    if kind not in SUPPORTED:
        raise UsageError(f"target {path}: architecture {kind!r} cannot be trained for; known: {', '.join(SUPPORTED)}")
    names = {tensor.name: tensor for tensor in reader.tensors}
    hidden, heads = fields[f"{kind}.embedding_length"], fields[f"{kind}.attention.head_count"]
    return TargetShape(
        model_type=kind,
        vocab_size=int(names["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=fields[f"{kind}.feed_forward_length"],
        num_layers=fields[f"{kind}.block_count"],
        num_heads=heads,
        num_kv_heads=fields.get(f"{kind}.attention.head_count_kv", heads),
        head_dim=fields.get(f"{kind}.attention.key_length", hidden // heads),
        rope_theta=float(fields.get(f"{kind}.rope.freq_base", 10000.0)),
        rms_norm_eps=round(float(fields[f"{kind}.attention.layer_norm_rms_epsilon"]), 9),
        max_context=fields[f"{kind}.context_length"],
        tied="output.weight" not in names,
    )


def _hugging_face_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _GGUF_LAYER_NAMES:
        raise DamagedFile(f"GGUF tensor {name!r} belongs to no dense llama or qwen3 model")
    return f"layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _undo_rope_permutation(weight: Tensor, head_dim: int) -> Tensor:
    """Rows back from GGUF's interleaved rotary pairs to the half-split order of Hugging Face."""
    rows, columns = weight.shape
    pairs = weight.view(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
