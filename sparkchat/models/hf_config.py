"""config.json of Hugging Face folders -> ModelConfig; everything that is not implemented is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.finite import is_number, short
from sparkchat.models.base import ModelConfig
from sparkchat.models.rope import ROPE_KINDS, RopeConfig
from sparkchat.models.shape import DecoderShape
from sparkchat.models.weights import read_json

LARGEST = 1 << 24
"""No size in a config is larger; a damaged one must not ask for that much memory."""


class ConfigFile:
    """A JSON object whose values are checked as they are read."""

    def __init__(self, data: dict[str, Any], where: Path) -> None:
        self.data, self.where = data, where

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def refuse(self, key: str, want: str) -> DamagedFile:
        return DamagedFile(f"{self.where}: {key} is {short(self.data.get(key))}, must be {want}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refuse(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if not is_number(value) or value <= 0:
            raise self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def whole_numbers(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        """Read a whole number or a list of them; absent is ()."""
        value = self.data.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and least <= v <= LARGEST for v in values):
            raise self.refuse(key, f"whole numbers of {least} or more")
        return tuple(values)


def read_config(folder: Path) -> ConfigFile:
    path = folder / "config.json"
    return ConfigFile(read_json(path), path)


def architecture_of(config: ConfigFile) -> str:
    names = config.data.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.refuse("architectures", "a list with the model's class name")
    return names[0]


def parse_target(folder: Path, config: ConfigFile) -> ModelConfig:
    """Raises DamagedFile or UsageError."""
    name = architecture_of(config)
    eos = config.whole_numbers("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = ConfigFile(read_json(generation), generation).whole_numbers("eos_token_id") or eos
    parse_fp8_block(config)
    vocab = config.whole("vocab_size")
    return ModelConfig(
        architecture=name,
        decoder=parse_decoder(config, name.removesuffix("ForCausalLM")),
        vocab_size=vocab,
        max_context=config.whole("max_position_embeddings", 2048),
        eos_token_ids=tuple(e for e in eos if e < vocab),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
    )


def parse_fp8_block(config: ConfigFile) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale in an FP8 checkpoint; None for one that is not quantised."""
    if not config.has("quantization_config"):
        return None
    found = config.data["quantization_config"]
    if not isinstance(found, dict):
        raise config.refuse("quantization_config", "an object")
    kind, block = found.get("quant_method"), found.get("weight_block_size")
    if kind != "fp8" or found.get("fmt", "e4m3") != "e4m3" or block is None:
        raise UsageError(
            f"{config.where}: weights quantised as {kind!r} are not supported, only fp8 e4m3 with weight_block_size; "
            "give an unquantised folder or a GGUF file"
        )
    sizes = ConfigFile(found, config.where).whole_numbers("weight_block_size", least=1)
    if len(sizes) != 2:
        raise ConfigFile(found, config.where).refuse("weight_block_size", "two whole numbers of 1 or more")
    return sizes[0], sizes[1]


def parse_decoder(config: ConfigFile, family: str) -> DecoderShape:
    """``family``: Llama, Mistral, Qwen2 or Qwen3, for what their configs leave out."""
    activation = config.data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UsageError(f"{config.where}: hidden_act {activation!r} is not supported; only silu is")
    layers = config.whole("num_hidden_layers", most=1000)
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    hidden = config.whole("hidden_size")
    head_dim = config.whole("head_dim", 128 if family == "Qwen3" else max(1, hidden // heads))
    if heads % kv_heads or head_dim % 2:
        raise DamagedFile(
            f"{config.where}: {heads} query heads over {kv_heads} key heads of size {head_dim} do not divide"
        )
    bias = config.flag("attention_bias", False)
    return DecoderShape(
        hidden_size=hidden,
        intermediate_size=config.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config),
        qk_norm=family == "Qwen3",
        qkv_bias=bias or family == "Qwen2",
        o_bias=bias and family != "Qwen2",
        mlp_bias=config.flag("mlp_bias", False) and family == "Llama",
        windows=parse_windows(config, family, layers),
    )


def parse_windows(config: ConfigFile, family: str, layers: int) -> tuple[int | None, ...]:
    """Per layer: how many keys a query sees, None for all."""
    window = config.whole("sliding_window") if config.has("sliding_window") else None
    if family in ("Qwen2", "Qwen3") and not config.flag("use_sliding_window", False):
        window = None
    kinds = config.data.get("layer_types")
    if kinds is None:
        if family == "Llama" or window is None:
            return (None,) * layers
        first = 0 if family == "Mistral" else config.whole("max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.refuse("layer_types", f"a list of {layers} names")
    unknown = next((k for k in kinds if k not in known), None)
    if unknown is not None:
        raise UsageError(f"{config.where}: layer type {unknown!r} is not supported; known: {', '.join(known)}")
    if window is None and "sliding_attention" in kinds:
        raise config.refuse("sliding_window", "a whole number, because layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def parse_rope(config: ConfigFile) -> RopeConfig:
    """``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` at the top level."""
    nested = config.data.get("rope_parameters") or config.data.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise config.refuse("rope_parameters", "an object")
    if any(isinstance(v, dict) for v in nested.values()):
        raise UsageError(f"{config.where}: rope_parameters by layer type are not supported")
    rope = ConfigFile(nested, config.where)
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UsageError(f"{config.where}: rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")
    for key in ("partial_rotary_factor", "mscale", "mscale_all_dim"):
        if nested.get(key, config.data.get(key)) not in (None, 1.0):
            raise UsageError(f"{config.where}: {key} in the rotary embedding is not supported")
    context = config.whole("max_position_embeddings", 2048)
    return RopeConfig(
        theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
        kind=kind,
        factor=rope.number("factor", 1.0) if kind == "default" else rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_context=rope.whole("original_max_position_embeddings", context),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        truncate=rope.flag("truncate", True),
    )
