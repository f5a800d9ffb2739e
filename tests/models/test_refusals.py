"""Folders that are damaged, unsupported or do not fit end in one clear line of the right kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.drafters import CONFIG, VOCAB, random_weights, write_draft
from models.pairs import CPU, Pair, make_pair
from sparkchat.errors import DamagedFile, ModelNotFound, SparkchatError, UsageError
from sparkchat.models import load_drafter, load_target
from sparkchat.models.weights import FolderSource


@pytest.fixture
def pair(build_once: Callable[..., Any]) -> Pair:
    return build_once("models-refused", lambda folder: make_pair(folder, "qwen3"))


@pytest.fixture
def target(pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair.folder, tmp_path / "target"))


@pytest.fixture
def drafter(pair: Pair, tmp_path: Path) -> Path:
    return write_draft(tmp_path / "drafter", pair).folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_refused(kind: type[SparkchatError], words: str, load: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words) as caught:
        load()
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


CONFIGS: list[tuple[type[SparkchatError], str, dict[str, Any]]] = [
    (UsageError, "GPT9ForCausalLM is not supported; known: Llama", {"architectures": ["GPT9ForCausalLM"]}),
    (DamagedFile, "architectures is None", {"architectures": None}),
    (DamagedFile, "hidden_size is 'big'", {"hidden_size": "big"}),
    (DamagedFile, "hidden_size is -4", {"hidden_size": -4}),
    (DamagedFile, "num_hidden_layers is True", {"num_hidden_layers": True}),
    (DamagedFile, "vocab_size is 100000000000", {"vocab_size": 100000000000}),
    (DamagedFile, "rms_norm_eps is 0", {"rms_norm_eps": 0}),
    (DamagedFile, "5 query heads over 2 key heads", {"num_attention_heads": 5}),
    (UsageError, "hidden_act 'gelu' is not supported", {"hidden_act": "gelu"}),
    (UsageError, "rope type 'dynamic' is not supported", {"rope_parameters": {"rope_type": "dynamic"}}),
    (
        UsageError,
        "partial_rotary_factor",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    (UsageError, "layer type 'linear_attention' is not supported", {"layer_types": ["linear_attention"] * 3}),
    (DamagedFile, "layer_types", {"layer_types": ["full_attention"]}),
    (DamagedFile, "sliding_window is None", {"layer_types": ["sliding_attention"] * 3}),
    (UsageError, "quantised as 'awq' are not supported", {"quantization_config": {"quant_method": "awq"}}),
    (UsageError, "weight_block_size", {"quantization_config": {"quant_method": "fp8"}}),
    (DamagedFile, "two whole numbers", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}),
    (DamagedFile, r"shape \[64, 48\]|shape", {"head_dim": 16}),
    (DamagedFile, "lack model.layers.3", {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}),
    (DamagedFile, "does not know: model.layers.2", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
]


@pytest.mark.parametrize(("kind", "words", "changes"), CONFIGS, ids=[words for _, words, _ in CONFIGS])
def test_target_config(kind: type[SparkchatError], words: str, changes: dict[str, Any], target: Path) -> None:
    edit_config(target, **changes)
    assert_refused(kind, words, lambda: load_target(target, device=CPU))


def test_missing_folder_and_files(tmp_path: Path, target: Path) -> None:
    assert_refused(ModelNotFound, "nowhere", lambda: load_target(tmp_path / "nowhere", device=CPU))
    (target / "model.safetensors").unlink()
    assert_refused(ModelNotFound, "no .safetensors", lambda: load_target(target, device=CPU))
    (target / "config.json").unlink()
    assert_refused(ModelNotFound, "no config.json", lambda: load_target(target, device=CPU))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_pickled_weights_are_never_opened(target: Path, name: str) -> None:
    (target / "model.safetensors").rename(target / name)
    assert_refused(UsageError, f"pickled weights .{name}", lambda: load_target(target, device=CPU))


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(target: Path, keep: int) -> None:
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(DamagedFile, "truncated or not safetensors", lambda: load_target(target, device=CPU))


WEIGHTS: list[tuple[type[SparkchatError], str, Callable[[dict[str, torch.Tensor]], None]]] = [
    (DamagedFile, "lack model.norm.weight", lambda t: t.pop("model.norm.weight")),
    (DamagedFile, "lack lm_head.weight", lambda t: t.pop("lm_head.weight")),
    (DamagedFile, "does not know: surplus", lambda t: t.update(surplus=torch.zeros(2))),
    (DamagedFile, "model.norm.weight holds NaN", lambda t: t["model.norm.weight"].fill_(float("nan"))),
    (DamagedFile, "lm_head.weight holds NaN", lambda t: t["lm_head.weight"][3].fill_(float("inf"))),
    (DamagedFile, r"shape \[47\].*\[48\]", lambda t: t.update({"model.norm.weight": torch.ones(47)})),
    (UsageError, "is int8", lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})),
]


@pytest.mark.parametrize(("kind", "words", "change"), WEIGHTS, ids=[words for _, words, _ in WEIGHTS])
def test_target_weights(
    kind: type[SparkchatError], words: str, change: Callable[[dict[str, torch.Tensor]], None], target: Path
) -> None:
    edit_weights(target, change)
    assert_refused(kind, words, lambda: load_target(target, device=CPU))


def test_large_finite_weights_are_no_damage(target: Path) -> None:
    edit_weights(target, lambda t: t["lm_head.weight"].fill_(3e38))
    load_target(target, device=CPU)


def test_shard_index(target: Path) -> None:
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    assert_refused(DamagedFile, "no .safetensors beside it", lambda: load_target(target, device=CPU))
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}))
    assert_refused(DamagedFile, "missing although the index names it", lambda: load_target(target, device=CPU))
    index.write_text(json.dumps({"weight_map": {"model.other": "model.safetensors"}}))
    assert_refused(DamagedFile, "lacks the tensor model.other", lambda: load_target(target, device=CPU))
    index.write_text("[1]")
    assert_refused(DamagedFile, "holds no JSON object", lambda: load_target(target, device=CPU))


def test_a_tensor_in_two_files_is_the_one_that_the_index_names(target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    name = "model.norm.weight"
    for file in ("a.safetensors", "z.safetensors"):
        save_file({name: torch.full_like(weights[name], 7.0)}, target / file)
        assert_refused(DamagedFile, f"both .* hold {name}", lambda: load_target(target, device=CPU))
        index = dict.fromkeys(weights, "model.safetensors") | {"other": file}
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        save_file({name: torch.full_like(weights[name], 7.0), "other": torch.zeros(2)}, target / file)
        assert torch.equal(FolderSource(target).take(name, 48), weights[name])
        (target / "model.safetensors.index.json").unlink()
        (target / file).unlink()


DRAFTERS: list[tuple[type[SparkchatError], str, dict[str, Any]]] = [
    (UsageError, "architecture EagleModel is not supported", {"architectures": ["EagleModel"]}),
    (DamagedFile, "block_size .* is missing", {"block_size": "absent"}),
    (DamagedFile, "block_size is 0", {"block_size": 0}),
    (DamagedFile, "mask_token_id is None", {"mask_token_id": "absent"}),
    (UsageError, "mask token is 97", {"mask_token_id": VOCAB}),
    (DamagedFile, "target_layer_ids is None", {"target_layer_ids": "absent"}),
    (DamagedFile, "increasing layer numbers", {"target_layer_ids": [1, 1]}),
    (DamagedFile, "target_layer_ids", {"target_layer_ids": [-2, 1]}),
    (UsageError, "last tapped layer is 3, the model's last is 2", {"target_layer_ids": [0, 3]}),
    (UsageError, "layer count of the target is 36, the model's 3", {"num_target_layers": 36}),
    (UsageError, "hidden size is 64, the model's 48", {"hidden_size": 64}),
    (UsageError, "vocabulary is 100, the model's 97", {"vocab_size": 100}),
    (UsageError, "markov_head_type 'tree' is not supported", {"markov_head_type": "tree"}),
    (UsageError, "first slot holds no draft", {"sample_from_anchor": False}),
    (DamagedFile, "markov_w1.weight has shape", {"markov_rank": 13}),
    (DamagedFile, "does not know: confidence_head", {"enable_confidence_head": False}),
    (DamagedFile, "confidence_head.proj.weight has shape", {"confidence_head_with_markov": False}),
    (DamagedFile, "fc.weight has shape", {"target_layer_ids": [1]}),
    (DamagedFile, "d2t is missing", {"draft_vocab_size": 50}),
    (
        UsageError,
        "sliding_attention layers are not supported",
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True},
    ),
]


@pytest.mark.parametrize(("kind", "words", "changes"), DRAFTERS, ids=[words for _, words, _ in DRAFTERS])
def test_drafter_config(
    kind: type[SparkchatError], words: str, changes: dict[str, Any], drafter: Path, pair: Pair
) -> None:
    edit_config(drafter, **changes)
    assert_refused(kind, words, lambda: load_drafter(drafter, pair.ours, device=CPU))


MAPPINGS: list[tuple[str, torch.Tensor]] = [
    ("different token ids", torch.tensor([0, -1, 3, 4])),
    ("different token ids", torch.tensor([0, 1, 3, 94])),
    ("different token ids", torch.tensor([-1, 1, 3, 4])),
    ("has 3 entries", torch.tensor([0, 1, 3])),
    ("one row of whole numbers", torch.tensor([0.0, 1.0, 3.0, 4.0])),
]


@pytest.mark.parametrize(("words", "d2t"), MAPPINGS)
def test_draft_vocabulary(words: str, d2t: torch.Tensor, pair: Pair, tmp_path: Path) -> None:
    from dataclasses import replace

    from sparkchat.models.dspark.checkpoint import save_drafter

    config = replace(CONFIG, draft_vocab_size=4)
    save_drafter(tmp_path / "d", config, random_weights(config) | {"d2t": d2t})
    assert_refused(DamagedFile, words, lambda: load_drafter(tmp_path / "d", pair.ours, device=CPU))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_norm.weight", "markov_head.markov_w2.weight"])
def test_drafter_weights(name: str, drafter: Path, pair: Pair) -> None:
    edit_weights(drafter, lambda t: t[name].view(-1)[:1].fill_(float("nan")))
    assert_refused(DamagedFile, f"{name} holds NaN", lambda: load_drafter(drafter, pair.ours, device=CPU))
    edit_weights(drafter, lambda t: t.pop(name))
    assert_refused(DamagedFile, f"lack {name}", lambda: load_drafter(drafter, pair.ours, device=CPU))
