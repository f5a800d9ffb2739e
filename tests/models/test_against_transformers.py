"""Logits and taps equal transformers' for every supported architecture, however the rows are cut into spans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.pairs import Pair, assert_close, make_pair, make_theirs, random_ids, run, run_chunks, their_logits

WINDOWED = {"sliding_window": 12, "use_sliding_window": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "yarn-rope": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-one-key-head": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {**WINDOWED, "layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    "qwen3-max-window-layers": ("qwen3", {**WINDOWED, "max_window_layers": 1}),
    "qwen3-window-off": ("qwen3", {"sliding_window": 4, "use_sliding_window": False}),
    "qwen2-window": ("qwen2", {**WINDOWED, "max_window_layers": 2}),
    "mistral": ("mistral", {"sliding_window": 12}),
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> Pair:
    model_type, changes = KINDS[request.param]
    return build_once(f"models-{request.param}", lambda folder: make_pair(folder, model_type, **changes))


@pytest.mark.parametrize("sizes", [(70,), (1,), (33, 1, 1, 1, 6), (5, 3, 20)], ids=str)
def test_logits(pair: Pair, sizes: tuple[int, ...]) -> None:
    ids = random_ids(70)
    cache = pair.ours.new_cache(2, 128, 70)
    ours = run_chunks(pair.ours, cache, cache.allocate(), ids, sizes)
    assert_close(ours, their_logits(pair, ids))


def test_ragged_batch(pair: Pair) -> None:
    """Requests of different lengths, in rows out of order, decoded together with spans of different sizes."""
    prompts = [random_ids(n, seed=n) for n in (3, 41, 17, 29)]
    cache = pair.ours.new_cache(6, 128, 64)
    rows = [cache.allocate() for _ in range(6)]
    rows = [rows[4], rows[0], rows[3], rows[1]]
    theirs = [their_logits(pair, ids) for ids in prompts]
    taken = [0] * len(prompts)
    for sizes in ((1, 20, 5, 9), (1, 1, 1, 1), (1, 20, 4, 2), (0, 0, 7, 17)):
        spans = [(row, ids[at : at + n]) for row, ids, at, n in zip(rows, prompts, taken, sizes, strict=True) if n]
        hidden, _ = run(pair.ours, cache, spans)
        logits = pair.ours.logits(hidden)
        wanted = torch.cat([t[at : at + n] for t, at, n in zip(theirs, taken, sizes, strict=True)])
        assert_close(logits, wanted)
        taken = [at + n for at, n in zip(taken, sizes, strict=True)]
    assert taken == [len(ids) for ids in prompts]


def test_far_apart_rows(pair: Pair) -> None:
    cache = pair.ours.new_cache(12, 64, 32)
    rows = [cache.allocate() for _ in range(12)]
    first, second = random_ids(9, seed=1), random_ids(20, seed=2)
    hidden, _ = run(pair.ours, cache, [(rows[11], first[:-2]), (rows[1], second[:-3])])
    hidden, _ = run(pair.ours, cache, [(rows[11], first[-2:]), (rows[1], second[-3:])])
    wanted = torch.cat([their_logits(pair, first)[-2:], their_logits(pair, second)[-3:]])
    assert_close(pair.ours.logits(hidden), wanted)


def test_taps_are_raw_layer_outputs(pair: Pair) -> None:
    ids = random_ids(30)
    layers = pair.ours.config.num_layers
    cache = pair.ours.new_cache(1, 64, 64)
    row = cache.allocate()
    _, first = run(pair.ours, cache, [(row, ids[:26])], (-1, 0, layers - 1))
    _, second = run(pair.ours, cache, [(row, ids[26:])], (-1, 0, layers - 1))
    assert first is not None and second is not None
    kept: list[torch.Tensor] = []
    # hidden_states[-1] of transformers is behind the final norm, so the last layer's output is caught by a hook.
    hook = pair.theirs.model.layers[-1].register_forward_hook(lambda m, a, out: kept.append(out))
    with torch.no_grad():
        states = pair.theirs(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    last = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    assert_close(torch.cat([first, second]), torch.cat([states[0][0], states[1][0], last.view(30, -1)], dim=-1))


def test_sharded_folder(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "qwen3", shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = random_ids(12)
    cache = pair.ours.new_cache(1, 32, 32)
    assert_close(run_chunks(pair.ours, cache, cache.allocate(), ids, (12,)), their_logits(pair, ids))


def test_bf16_folder_stays_close(tmp_path: Path) -> None:
    from sparkchat.models import load_target

    make_theirs("llama").to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    ours = load_target(tmp_path / "bf16", device=torch.device("cpu"))
    assert ours.config.dtype_name == "bfloat16"
    ids = random_ids(20)
    cache = ours.new_cache(1, 32, 32)
    row = cache.allocate()
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
    assert_close(run_chunks(ours, cache, row, ids, (11, 1)), wanted, 0.03)
    exact = load_target(tmp_path / "bf16", device=torch.device("cpu"), dtype=torch.float32)
    cache = exact.new_cache(1, 32, 32)
    assert_close(run_chunks(exact, cache, cache.allocate(), ids, (11, 1)), wanted)
