"""config.json of DeepSeek V4: sizes, the layer map, the drafter's keys; what is not implemented is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.hf_config import ConfigFile
from sparkchat.models.rope import RopeConfig

ARCHITECTURE = "DeepseekV4ForCausalLM"
WINDOW_ONLY = 0
"""Ratio of a layer without compressed entries."""
SPARSE_RATIO = 4
"""Ratio of a layer whose entries overlap and are picked by an indexer; every other ratio has neither."""
_STORED = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
"""What quantization_config may say of the stored forms in formats.py."""
_DSPARK_KEYS = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


@dataclass(frozen=True)
class DsparkKeys:
    """What config.json says of the DSpark drafter under ``mtp.*``."""

    block_size: int
    markov_rank: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    """Tapped layers, increasing; the drafter has as many stages."""


@dataclass(frozen=True)
class DeepseekV4Config:
    """One checkpoint's config, checked. Sizes carry the names of the notes in layout.py."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    compress_ratios: tuple[int, ...]
    """[num_layers] tokens per compressed entry, 0 for a layer that has none."""
    drafter_ratios: tuple[int, ...]
    """The entries of compress_ratios behind the trunk: one for each stage under ``mtp.*``."""
    num_hash_layers: int
    """The first layers choose experts by token id."""
    num_heads: int
    head_dim: int
    rope_dim: int
    """Trailing dimensions of a head that are rotated."""
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    """Keys a query sees counting its own, besides compressed entries."""
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    rope: RopeConfig
    """Of layers without compressed entries, drafter stages among them."""
    compress_rope: RopeConfig
    """Of everything in a layer with compressed entries."""
    hc_mult: int
    """Residual streams."""
    hc_sinkhorn_iters: int
    hc_eps: float
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    routed_scale: float
    swiglu_limit: float
    rms_eps: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    num_mtp_layers: int
    """num_nextn_predict_layers: 1 in every release, also where three drafter stages ship."""
    dspark: DsparkKeys | None
    expert_format: str
    """fp4 | fp8, of the routed experts in the files."""
    dtype_name: str = ""
    """Format of the layer weights in memory."""
    linear_kernel: str = ""
    """Which matrix product runs in a decode step."""
    kv_dtype: torch.dtype = torch.float32

    @property
    def architecture(self) -> str:
        return ARCHITECTURE

    @property
    def tie_word_embeddings(self) -> bool:
        return False

    @property
    def hc_width(self) -> int:
        """Numbers that one hyper-connection computes for a token: pre, post and the combination."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def kv_bytes_per_token(self) -> int:
        """Growth of the cache for a position in all layers; window layers stop growing."""
        width = 0.0
        for ratio in self.compress_ratios:
            if ratio == WINDOW_ONLY:
                continue
            width += (self.head_dim + (self.index_head_dim if ratio == SPARSE_RATIO else 0)) / ratio
        return round(width * self.kv_dtype.itemsize)

    def is_hashed(self, layer: int) -> bool:
        return layer < self.num_hash_layers

    def rope_of(self, ratio: int) -> RopeConfig:
        return self.rope if ratio == WINDOW_ONLY else self.compress_rope


def parse_config(config: ConfigFile, eos_token_ids: tuple[int, ...] | None = None) -> DeepseekV4Config:
    """Check a config.json. ``eos_token_ids``: those of generation_config.json, which win.

    Raises DamagedFile for values that cannot be, UsageError for those that are not implemented.
    """
    _refuse_unknown(config)
    layers = config.whole("num_hidden_layers", most=1000)
    vocab, head_dim = config.whole("vocab_size"), config.whole("head_dim")
    ratios = _ratios(config, layers)
    eos = eos_token_ids or config.whole_numbers("eos_token_id")
    parsed = DeepseekV4Config(
        vocab_size=vocab,
        hidden_size=config.whole("hidden_size"),
        num_layers=layers,
        compress_ratios=ratios[:layers],
        drafter_ratios=ratios[layers:],
        num_hash_layers=config.whole("num_hash_layers", 0, least=0, most=layers),
        num_heads=config.whole("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=config.whole("qk_rope_head_dim", most=head_dim),
        q_lora_rank=config.whole("q_lora_rank"),
        o_groups=config.whole("o_groups"),
        o_lora_rank=config.whole("o_lora_rank"),
        window=config.whole("sliding_window"),
        index_num_heads=config.whole("index_n_heads"),
        index_head_dim=config.whole("index_head_dim"),
        index_topk=config.whole("index_topk"),
        rope=RopeConfig(theta=_theta(config, "rope_theta", 10000.0)),
        compress_rope=_compress_rope(config),
        hc_mult=config.whole("hc_mult", most=64),
        hc_sinkhorn_iters=config.whole("hc_sinkhorn_iters", most=1000),
        hc_eps=config.number("hc_eps"),
        num_experts=config.whole("n_routed_experts"),
        num_experts_per_token=config.whole("num_experts_per_tok"),
        expert_width=config.whole("moe_intermediate_size"),
        routed_scale=config.number("routed_scaling_factor"),
        swiglu_limit=config.number("swiglu_limit"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        max_context=config.whole("max_position_embeddings"),
        eos_token_ids=tuple(e for e in eos if e < vocab),
        num_mtp_layers=config.whole("num_nextn_predict_layers", 0, least=0, most=16),
        dspark=_dspark(config, layers, vocab),
        expert_format=_expert_format(config),
    )
    _check_fit(config, parsed)
    return parsed


def _refuse_unknown(config: ConfigFile) -> None:
    """Refuse settings that no published checkpoint has and the code does not follow."""
    fixed = {
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for key, wanted in fixed.items():
        if config.has(key) and config.data[key] != wanted:
            raise UsageError(f"{config.where}: {key} {config.data[key]!r} is not supported; only {wanted!r} is")
    if not config.has("quantization_config"):
        return
    stored = config.data["quantization_config"]
    if not isinstance(stored, dict):
        raise config.refuse("quantization_config", "an object")
    for key, wanted in _STORED.items():
        if stored.get(key, wanted) != wanted:
            raise UsageError(
                f"{config.where}: {key} {stored[key]!r} in quantization_config is not supported; only {wanted!r} is"
            )


def _ratios(config: ConfigFile, layers: int) -> tuple[int, ...]:
    ratios = config.whole_numbers("compress_ratios")
    if not isinstance(config.data.get("compress_ratios"), list) or len(ratios) < layers:
        raise config.refuse("compress_ratios", f"a list with a whole number for each of {layers} layers or more")
    if any(ratio == 1 or ratio > 65536 for ratio in ratios):
        raise config.refuse("compress_ratios", "0 or from 2 to 65536 in every place")
    if any(ratio != WINDOW_ONLY for ratio in ratios[layers:]):
        raise config.refuse("compress_ratios", f"0 behind the {layers} layers, in the drafter's stages")
    return ratios


def _theta(config: ConfigFile, key: str, default: float) -> float:
    value = config.number(key, default)
    if value <= 1:
        raise config.refuse(key, "a number above 1")
    return value


def _compress_rope(config: ConfigFile) -> RopeConfig:
    """YaRN without its factor on the amplitude, over the base of compressed layers."""
    theta = _theta(config, "compress_rope_theta", 160000.0)
    nested = config.data.get("rope_scaling")
    if nested is None:
        return RopeConfig(theta=theta)
    if not isinstance(nested, dict):
        raise config.refuse("rope_scaling", "an object")
    rope = ConfigFile(nested, config.where)
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "yarn":
        raise UsageError(f"{config.where}: rope type {kind!r} is not supported; known: default, yarn")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=rope.number("factor"),
        original_context=rope.whole("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=1.0,
    )


def _dspark(config: ConfigFile, layers: int, vocab: int) -> DsparkKeys | None:
    if not any(config.has(key) for key in _DSPARK_KEYS):
        return None
    ids = config.whole_numbers("dspark_target_layer_ids")
    if not ids or list(ids) != sorted(set(ids)) or ids[-1] >= layers:
        raise config.refuse("dspark_target_layer_ids", f"increasing layer numbers below {layers}")
    # Drafters in a folder of their own spell it without the prefix.
    is_short = not config.has("dspark_block_size") and config.has("block_size")
    return DsparkKeys(
        block_size=config.whole("block_size" if is_short else "dspark_block_size", most=256),
        markov_rank=config.whole("dspark_markov_rank"),
        noise_token_id=config.whole("dspark_noise_token_id", least=0, most=vocab - 1),
        target_layer_ids=ids,
    )


def _expert_format(config: ConfigFile) -> str:
    name = config.data.get("expert_dtype") or "fp4"
    if name not in ("fp4", "fp8"):
        raise UsageError(f"{config.where}: expert_dtype {name!r} is not supported; known: fp4, fp8")
    return name


def _check_fit(config: ConfigFile, parsed: DeepseekV4Config) -> None:
    """Sizes that must divide or not exceed each other."""
    if parsed.num_heads % parsed.o_groups:
        raise config.refuse("o_groups", f"a divisor of the {parsed.num_heads} heads")
    for key, value in (("qk_rope_head_dim", parsed.rope_dim), ("index_head_dim", parsed.index_head_dim)):
        if value % 2:
            raise config.refuse(key, "even")
    if parsed.index_head_dim < parsed.rope_dim:
        raise config.refuse("index_head_dim", f"at least the {parsed.rope_dim} of qk_rope_head_dim")
    if parsed.num_experts_per_token > parsed.num_experts:
        raise config.refuse("num_experts_per_tok", f"at most the {parsed.num_experts} experts there are")
    drafted = len(parsed.drafter_ratios)
    if parsed.dspark is not None and drafted and drafted != len(parsed.dspark.target_layer_ids):
        raise DamagedFile(
            f"{config.where}: compress_ratios has {drafted} entries behind the {parsed.num_layers} layers, "
            f"but dspark_target_layer_ids names {len(parsed.dspark.target_layer_ids)} stages"
        )
