"""A random tiny model as transformers has it and as we load it, and ways to run ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sparkchat.models import ForwardBatch, KVCache, load_target
from sparkchat.models.dense import DenseModel

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Pair:
    theirs: PreTrainedModel
    ours: DenseModel
    folder: Path


def make_theirs(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model whose logits and attention are far from flat."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**SIZES, "rope_parameters": ROPE, "tie_word_embeddings": False, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.25)
    return model


def make_pair(folder: Path, model_type: str, *, shard: str = "5GB", **changes: Any) -> Pair:
    theirs = make_theirs(model_type, **changes)
    theirs.save_pretrained(folder, max_shard_size=shard)
    return Pair(theirs, load_target(folder, device=CPU), folder)


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def their_logits(pair: Pair, ids: Tensor) -> Tensor:
    """[n, V]"""
    with torch.no_grad():
        return pair.theirs(ids[None]).logits[0]


def run(
    model: DenseModel, cache: KVCache, spans: Sequence[tuple[int, Tensor]], taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """Run (cache row, ids) spans, each at the end of its row."""
    return model.forward(batch_of(cache, spans), cache, taps)


def batch_of(cache: KVCache, spans: Sequence[tuple[int, Tensor]]) -> ForwardBatch:
    starts = [0]
    positions = []
    for row, ids in spans:
        starts.append(starts[-1] + len(ids))
        positions.append(torch.arange(cache.length(row), cache.length(row) + len(ids)))
    ids = torch.cat([ids for _, ids in spans])
    return ForwardBatch(ids, torch.cat(positions), tuple(row for row, _ in spans), tuple(starts))


def run_chunks(model: DenseModel, cache: KVCache, row: int, ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run ids in chunks of these sizes, the last one repeated -> logits [n, V]."""
    out, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[min(turn, len(sizes) - 1)]
        hidden, _ = run(model, cache, [(row, ids[at : at + size])])
        out.append(model.logits(hidden))
        at, turn = at + size, turn + 1
    return torch.cat(out)


def assert_close(ours: Tensor, theirs: Tensor, relative: float = 1e-4) -> None:
    """Largest difference relative to the largest value."""
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < relative, f"relative error {error:.2e}"


def mean_error(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference relative to that of the values."""
    return float((ours - theirs).norm() / theirs.norm())
