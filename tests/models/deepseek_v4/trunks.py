"""Random tiny trunks, the same weights as transformers has them, and ways to run ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixtures.deepseek_v4 import parsed, random_weights, v4_config, write_json
from models.pairs import batch_of, random_ids
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.scope import TensorTable

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 8, 4, 8, 0],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
    "max_position_embeddings": 2048,
}
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention"}
HEAVY = "heavily_compressed_attention"


@dataclass(frozen=True)
class Trunk:
    """A model of ours and what it was made from."""

    ours: DeepseekV4
    config: dict[str, Any]
    weights: dict[str, Tensor]


def make_trunk(*, seed: int = 7, has_roundings: bool = False, **changes: Any) -> Trunk:
    """A trunk without drafter whose logits, gates and combinations are far from flat."""
    config = v4_config({**SIZES, **changes}, drafter="none")
    parsed_config = parsed(config)
    weights = random_weights(parsed_config, seed=seed)
    for name, tensor in weights.items():
        if name.endswith(("ffn.gate.weight", "weights_proj.weight", "wgate.weight")) or "_fn" in name:
            tensor *= 2.0
    ours = DeepseekV4(TensorTable(weights), parsed_config, CPU, torch.float32, has_roundings=has_roundings)
    return Trunk(ours, config, weights)


def theirs_of(trunk: Trunk, folder: Path) -> PreTrainedModel:
    """transformers' model from a float32 folder with the published tensor names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in trunk.weights.items()}, str(folder / "model.safetensors"))
    config = dict(trunk.config)
    for key in ("quantization_config", "expert_dtype", "torch_dtype"):
        del config[key]
    ratios = config.pop("compress_ratios")
    hashed, layers = config.pop("num_hash_layers"), len(ratios)
    config["layer_types"] = [LAYER_TYPES.get(ratio, HEAVY) for ratio in ratios]
    heavy = [ratio for ratio in ratios if ratio not in LAYER_TYPES]
    config["compress_rates"] = {LAYER_TYPES[4]: 4, HEAVY: heavy[0] if heavy else 128}
    config["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (layers - hashed)
    write_json(folder / "config.json", config)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


def run(model: DeepseekV4, cache: StateCache, spans: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Run (cache row, ids) spans, each at the end of its row -> hidden [N, d]."""
    return model.forward(batch_of(cache, spans), cache)[0]  # type: ignore[arg-type]


def run_chunks(model: DeepseekV4, cache: StateCache, row: int, ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run ids in chunks of these sizes, the last one repeated -> logits [n, V]."""
    out, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[min(turn, len(sizes) - 1)]
        out.append(run(model, cache, [(row, ids[at : at + size])]))
        at, turn = at + size, turn + 1
    return model.logits(torch.cat(out))


__all__ = ["CPU", "SIZES", "Trunk", "make_trunk", "random_ids", "run", "run_chunks", "theirs_of"]
