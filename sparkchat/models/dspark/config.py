"""config.json of a DeepSpec drafter folder (arXiv 2607.05147; keys as DeepSpec writes them)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.hf_config import ConfigFile, architecture_of, parse_decoder, read_config
from sparkchat.models.shape import DecoderShape

ARCHITECTURES = {"Qwen3DSparkModel": "Qwen3"}
"""Published class names -> family of the backbone."""
HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter folder says about itself."""

    decoder: DecoderShape
    """The backbone."""
    block_size: int
    """Drafts per block as trained: one anchor and block_size - 1 masks go in."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Tapped target layers, increasing; -1 is the embedding output."""
    vocab_size: int
    """The target's vocabulary."""
    draft_vocab_size: int
    """Columns of the draft law; smaller than vocab_size with a d2t tensor."""
    markov_rank: int
    """0: no sequential head (DFlash)."""
    markov_head_type: str | None
    """vanilla | gated | rnn; None without a head."""
    has_confidence: bool
    confidence_with_markov: bool
    """The confidence head also sees the Markov embedding of the previous token."""
    num_target_layers: int | None
    """Layers of the target it was trained for."""

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Raises ModelNotFound, DamagedFile, or UsageError for what is not supported."""
    return parse_drafter_config(read_config(folder))


def parse_drafter_config(config: ConfigFile) -> DrafterConfig:
    """``draft_vocab_size`` is the config's own claim; the d2t tensor is compared with it on loading."""
    name = architecture_of(config)
    if name not in ARCHITECTURES:
        raise UsageError(
            f"{config.where}: drafter architecture {name} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    decoder = parse_decoder(config, ARCHITECTURES[name])
    return drafter_config(config, decoder)


def drafter_config(config: ConfigFile, decoder: DecoderShape) -> DrafterConfig:
    """The keys that drafters of all families share, beside the backbone's shape."""
    if any(window is not None for window in decoder.windows):
        raise UsageError(f"{config.where}: drafters with sliding_attention layers are not supported")
    if not config.flag("sample_from_anchor", True):
        # Read as ours, such blocks would be a place off: hardly a draft would be right, and nothing would say why.
        raise UsageError(
            f"{config.where}: sample_from_anchor is false, and blocks whose first slot holds no draft are not "
            "supported; give a DSpark drafter"
        )
    rank = config.whole("markov_rank", 0, least=0)
    confidence = config.flag("enable_confidence_head", False)
    vocab = config.whole("vocab_size")
    return DrafterConfig(
        decoder=decoder,
        block_size=_block_size(config),
        mask_token_id=config.whole("mask_token_id", least=0),
        target_layer_ids=_target_layers(config),
        vocab_size=vocab,
        draft_vocab_size=config.whole("draft_vocab_size", vocab),
        markov_rank=rank,
        markov_head_type=_head_type(config) if rank else None,
        has_confidence=confidence,
        confidence_with_markov=confidence and config.flag("confidence_head_with_markov", rank > 0),
        num_target_layers=config.whole("num_target_layers") if config.has("num_target_layers") else None,
    )


def _block_size(config: ConfigFile) -> int:
    for key in ("block_size", "dspark_block_size"):
        if config.has(key):
            return config.whole(key, most=256)
    raise DamagedFile(
        f"{config.where}: block_size (or dspark_block_size) is missing; the drafter cannot be used without"
    )


def _target_layers(config: ConfigFile) -> tuple[int, ...]:
    ids = config.whole_numbers("target_layer_ids", least=-1)
    if not ids or list(ids) != sorted(set(ids)):
        raise config.refuse("target_layer_ids", "increasing layer numbers")
    return ids


def _head_type(config: ConfigFile) -> str:
    kind = config.data.get("markov_head_type", "vanilla")
    if kind not in HEADS:
        raise UsageError(f"{config.where}: markov_head_type {kind!r} is not supported; known: {', '.join(HEADS)}")
    return kind


def to_json(config: DrafterConfig, dtype_name: str, max_context: int) -> dict[str, Any]:
    """Return the flat config.json that DeepSpec's loaders read."""
    shape = config.decoder
    flat: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "attention_bias": shape.o_bias,
        "block_size": config.block_size,
        "dtype": dtype_name,
        "enable_confidence_head": config.has_confidence,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * shape.num_layers,
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": max_context,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_parameters": {"rope_theta": shape.rope.theta, "rope_type": "default"},
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }
    if config.has_confidence:
        flat["confidence_head_with_markov"] = config.confidence_with_markov
    if config.markov_head_type is not None:
        flat["markov_head_type"] = config.markov_head_type
    if config.draft_vocab_size != config.vocab_size:
        flat["draft_vocab_size"] = config.draft_vocab_size
    if config.num_target_layers is not None:
        flat["num_target_layers"] = config.num_target_layers
    return flat
