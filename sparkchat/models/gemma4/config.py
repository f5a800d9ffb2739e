"""config.json of Gemma 4: two kinds of layers, each with a head size; what is not implemented is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.hf_config import ConfigFile, read_config
from sparkchat.models.rope import RopeConfig
from sparkchat.models.weights import read_json


@dataclass(frozen=True)
class LayerKind:
    """What the layers of one kind share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Keys a query sees counting its own; None for all."""
    keys_are_values: bool
    """One projection gives keys and values."""
    rope: RopeConfig

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Gemma4Config:
    """What is known of a Gemma 4."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    sliding: LayerKind
    full: LayerKind
    is_full: tuple[bool, ...]
    """[num_layers]"""
    rms_eps: float
    softcap: float | None
    """Logits are ``softcap * tanh(logits / softcap)``."""
    max_context: int
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    dtype_name: str = ""
    """Format of the layer weights in memory."""
    linear_kernel: str = ""
    """Which matrix product runs in a decode step."""
    kv_dtype: torch.dtype = torch.float32

    @property
    def num_layers(self) -> int:
        return len(self.is_full)

    def kind(self, layer: int) -> LayerKind:
        return self.full if self.is_full[layer] else self.sliding

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers; layers with a sliding window stop growing."""
        return sum(2 * self.kind(layer).kv_width for layer in range(self.num_layers)) * self.kv_dtype.itemsize


def read_gemma4_config(folder: Path) -> Gemma4Config:
    """Raises ModelNotFound, DamagedFile or UsageError."""
    outer = read_config(folder)
    nested = outer.data.get("text_config")
    config = ConfigFile(nested, outer.where) if isinstance(nested, dict) else outer
    eos = config.whole_numbers("eos_token_id") or outer.whole_numbers("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = ConfigFile(read_json(generation), generation).whole_numbers("eos_token_id") or eos
    if outer.has("quantization_config"):
        raise UsageError(f"{outer.where}: quantised Gemma 4 folders are not supported; give an unquantised one")
    refuse_unknown(config)
    layers = config.whole("num_hidden_layers", most=1000)
    vocab = config.whole("vocab_size")
    return Gemma4Config(
        architecture=str(outer.data["architectures"][0]),
        vocab_size=vocab,
        hidden_size=config.whole("hidden_size"),
        intermediate_size=config.whole("intermediate_size"),
        sliding=parse_kind(config, is_full=False),
        full=parse_kind(config, is_full=True),
        is_full=_layer_kinds(config, layers),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
        max_context=config.whole("max_position_embeddings", 131_072),
        eos_token_ids=tuple(e for e in eos if e < vocab),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def refuse_unknown(config: ConfigFile) -> None:
    """Everything of Gemma 4 that the 12B does without."""
    for key, what in {
        "hidden_size_per_layer_input": "per-layer embeddings (E2B, E4B)",
        "num_kv_shared_layers": "layers that share keys and values (E2B, E4B)",
        "enable_moe_block": "experts (26B-A4B)",
        "attention_bias": "biased attention",
    }.items():
        if config.data.get(key):
            raise UsageError(f"{config.where}: {key} is {config.data[key]!r}, but {what} are not supported in Gemma 4")
    if config.data.get("use_bidirectional_attention") == "all":
        raise UsageError(f"{config.where}: bidirectional attention cannot decode; give a model that is causal")
    activation = config.data.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise UsageError(
            f"{config.where}: hidden_activation {activation!r} is not supported; only gelu_pytorch_tanh is"
        )


def _layer_kinds(config: ConfigFile, layers: int) -> tuple[bool, ...]:
    kinds = config.data.get("layer_types")
    if kinds is None:
        # Five windows, then a full layer; the last is always full.
        return tuple((layer + 1) % 6 == 0 or layer == layers - 1 for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise config.refuse("layer_types", f"a list of {layers} names, each one of {', '.join(known)}")
    return tuple(kind == "full_attention" for kind in kinds)


def parse_kind(config: ConfigFile, *, is_full: bool) -> LayerKind:
    """The sizes of one kind of layer; of full ones also as newer files give them, by layer number."""
    heads, kv_heads = config.whole("num_attention_heads"), config.whole("num_key_value_heads")
    head_dim, shares = config.whole("head_dim", 256), config.flag("attention_k_eq_v", False)
    if is_full:
        head_dim = config.whole("global_head_dim", 512)
        if shares and config.has("num_global_key_value_heads"):
            kv_heads = config.whole("num_global_key_value_heads")
        own = _own_sizes(config)
        head_dim, kv_heads = own.whole("head_dim", head_dim), own.whole("num_key_value_heads", kv_heads)
    if heads % kv_heads or head_dim % 2:
        raise DamagedFile(
            f"{config.where}: {heads} query heads over {kv_heads} key heads of size {head_dim} do not divide"
        )
    return LayerKind(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=None if is_full else config.whole("sliding_window"),
        keys_are_values=is_full and shares,
        rope=_rope(config, "full_attention" if is_full else "sliding_attention"),
    )


def _own_sizes(config: ConfigFile) -> ConfigFile:
    """What ``per_layer_config`` says of full layers: the same of all of them."""
    table = config.data.get("per_layer_config") or {}
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise config.refuse("per_layer_config", "an object of objects")
    entries = list(table.values())
    if any(entry != entries[0] for entry in entries):
        raise UsageError(f"{config.where}: per_layer_config gives layers different sizes, which is not supported")
    return ConfigFile(entries[0] if entries else {}, config.where)


_ROPE = {"full_attention": (1e6, "proportional", 0.25), "sliding_attention": (1e4, "default", 1.0)}


def _rope(config: ConfigFile, kind: str) -> RopeConfig:
    table = config.data.get("rope_parameters") or {}
    given = table.get(kind) if isinstance(table, dict) else None
    theta, rope_type, share = _ROPE[kind]
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise config.refuse("rope_parameters", "an object of one object for each layer type")
    rope = ConfigFile({"rope_type": rope_type, "partial_rotary_factor": share} | given, config.where)
    if rope.data["rope_type"] not in ("default", "proportional"):
        raise UsageError(f"{config.where}: rope type {rope.data['rope_type']!r} is not supported in Gemma 4")
    is_partial = rope.data["rope_type"] == "proportional"
    return RopeConfig(
        theta=rope.number("rope_theta", theta),
        kind=str(rope.data["rope_type"]),
        factor=rope.number("factor", 1.0),
        rotated_share=rope.number("partial_rotary_factor", 1.0) if is_partial else 1.0,
    )
