"""Gemma 4: logits and taps equal transformers', however rows are cut into spans, and what is not built is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.pairs import CPU, Pair, assert_close, random_ids, run, run_chunks, their_logits
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.models import load_target
from sparkchat.models.gemma4.config import read_gemma4_config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 12,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "unified": ("gemma4_unified_text", {}),
    "plain": ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    "values of their own, untied, no cap": (
        "gemma4_unified_text",
        {"attention_k_eq_v": False, "tie_word_embeddings": False, "final_logit_softcapping": None},
    ),
}


def make_theirs(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model whose norms, scalars and logits are far from even."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "layer_scalar" in name:
                tensor.uniform_(0.5, 1.5)
            elif "proj" in name or "embed_tokens.weight" in name or "lm_head" in name:
                tensor.normal_(std=0.25)
    return model


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> Pair:
    model_type, changes = KINDS[request.param]

    def build(folder: Path) -> Pair:
        theirs = make_theirs(model_type, **changes)
        theirs.save_pretrained(folder)
        return Pair(theirs, load_target(folder, device=CPU), folder)

    return build_once(f"gemma4-{request.param}", build)


@pytest.mark.parametrize("sizes", [(70,), (1,), (33, 1, 1, 1, 6), (5, 3, 20)], ids=str)
def test_logits(pair: Pair, sizes: tuple[int, ...]) -> None:
    ids = random_ids(70)
    cache = pair.ours.new_cache(2, 128, 70)
    assert_close(run_chunks(pair.ours, cache, cache.allocate(), ids, sizes), their_logits(pair, ids))


def test_ragged_batch_beyond_the_window(pair: Pair) -> None:
    prompts = [random_ids(n, seed=n) for n in (3, 41, 17, 29)]
    cache = pair.ours.new_cache(6, 128, 64)
    rows = [cache.allocate() for _ in prompts][::-1]
    theirs = [their_logits(pair, ids) for ids in prompts]
    taken = [0] * len(prompts)
    for sizes in ((1, 20, 5, 9), (1, 1, 1, 1), (1, 20, 4, 2), (0, 0, 7, 17)):
        spans = [(row, ids[at : at + n]) for row, ids, at, n in zip(rows, prompts, taken, sizes, strict=True) if n]
        hidden, _ = run(pair.ours, cache, spans)
        logits, first = pair.ours.logits(hidden), 0
        for index, count in enumerate(sizes):
            if count:
                assert_close(logits[first : first + count], theirs[index][taken[index] : taken[index] + count])
            first, taken[index] = first + count, taken[index] + count


def test_taps_are_the_outputs_of_layers(pair: Pair) -> None:
    ids = random_ids(20)
    cache = pair.ours.new_cache(1, 64, 20)
    _, taps = run(pair.ours, cache, [(cache.allocate(), ids)], (-1, 0, 2))
    with torch.no_grad():
        states = pair.theirs(ids[None], output_hidden_states=True).hidden_states
    assert taps is not None
    assert_close(taps, torch.cat([states[index + 1][0] for index in (-1, 0, 2)], dim=1))


def test_a_row_can_go_back_and_on(pair: Pair) -> None:
    ids, other = random_ids(40), random_ids(12, seed=9)
    cache = pair.ours.new_cache(1, 64, 16)
    row = cache.allocate()
    run_chunks(pair.ours, cache, row, ids, (16, 16, 8))
    cache.truncate(row, 30)
    assert cache.length(row) == 30
    logits = run_chunks(pair.ours, cache, row, other, (12,))
    assert_close(logits, their_logits(pair, torch.cat([ids[:30], other]))[30:])
    assert not cache.can_truncate(row, 3) and cache.can_truncate(row, 41)
    with pytest.raises(ValueError, match="cannot go back to 3"):
        cache.truncate(row, 3)
    cache.free(row)
    assert cache.allocate() == row and cache.length(row) == 0


def published(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config as Google publishes it: the text's within, sizes of full layers by their own names."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("per_layer_config")
    config |= {key: SIZES[key] for key in ("global_head_dim", "num_global_key_value_heads")} | changes
    outer = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": config, "vision_config": {}}
    return outer


def test_the_text_of_a_published_folder_is_taken_from_beside_images(
    build_once: Callable[..., Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    theirs = make_theirs("gemma4_unified_text")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.vision_embedder.patch.weight"] = torch.zeros(2, 2)
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(published(tmp_path)))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    ours = load_target(tmp_path, device=CPU)
    assert ours.config.eos_token_ids == (1, 3) and ours.config.num_layers == 4
    ids = random_ids(30)
    cache = ours.new_cache(1, 64, 40)
    assert_close(run_chunks(ours, cache, cache.allocate(), ids, (30,)), their_logits(Pair(theirs, ours, tmp_path), ids))


REFUSED: list[tuple[type[SparkchatError], str, dict[str, Any]]] = [
    (UsageError, "per-layer embeddings", {"hidden_size_per_layer_input": 256}),
    (UsageError, "share keys and values", {"num_kv_shared_layers": 2}),
    (UsageError, "experts", {"enable_moe_block": True}),
    (UsageError, "bidirectional", {"use_bidirectional_attention": "all"}),
    (UsageError, "hidden_activation 'silu'", {"hidden_activation": "silu"}),
    (UsageError, "rope type 'yarn'", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
    (UsageError, "different sizes", {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 32}}}),
    (DamagedFile, "layer_types", {"layer_types": ["full_attention"]}),
    (DamagedFile, "do not divide", {"num_global_key_value_heads": 4}),
]


@pytest.mark.parametrize(("kind", "words", "changes"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_what_is_not_built_is_refused_by_name(
    kind: type[SparkchatError], words: str, changes: dict[str, Any], build_once: Callable[..., Any], tmp_path: Path
) -> None:
    config = {"architectures": ["Gemma4UnifiedForCausalLM"]} | SIZES | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=words):
        read_gemma4_config(tmp_path)


def test_the_defaults_are_those_of_the_published_12b(tmp_path: Path) -> None:
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {key: SIZES[key] for key in keep} | {"num_hidden_layers": 12, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForCausalLM"]} | config))
    found = read_gemma4_config(tmp_path)
    assert (found.sliding.head_dim, found.full.head_dim, found.full.rope.rotated_share) == (256, 512, 0.25)
    assert [layer for layer, is_full in enumerate(found.is_full) if is_full] == [5, 11]
