"""The trainer's target computes what transformers computes, in all three of its forms."""

import json
from pathlib import Path

import pytest
import torch

from sparkchat.errors import DamagedFile, ModelNotFound, UsageError
from sparkchat.train.target import RowCache, Target, load_target
from sparkchat.train.weights import _undo_rope_permutation, read_target
from train.toy_target import HEAD_DIM, write_toy_target

IDS = torch.randint(4, 250, (3, 40), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_forward_equals_transformers(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_toy_target(tmp_path / model_type, model_type)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(IDS, output_hidden_states=True)
        features, hidden = load_target(folder, device="cpu", dtype=torch.float32).forward(IDS, (1, 4))
    torch.testing.assert_close(hidden, expected.hidden_states[-1], atol=2e-4, rtol=1e-4)
    taps = torch.cat([expected.hidden_states[2], expected.hidden_states[5]], dim=-1)
    torch.testing.assert_close(features, taps, atol=2e-4, rtol=1e-4)


def test_cached_blocks_equal_one_pass(target: Target) -> None:
    features, hidden = target.forward(IDS, (1, 3))
    cache = RowCache(target, 3, 48)
    starts, pieces = torch.tensor([10, 3, 17]), []
    first = torch.arange(20).expand(3, -1)
    target.forward_cached(IDS[:, :20], first, cache)
    for step in range(4):
        # Rows at different places; the first pass left entries behind their ends that must not be seen.
        positions = starts[:, None] + 5 * step + torch.arange(5)
        pieces.append(target.forward_cached(IDS.gather(1, positions), positions, cache, (1, 3)))
    index = starts[:, None] + torch.arange(20)
    rows = torch.arange(3)[:, None]
    torch.testing.assert_close(torch.cat([p[1] for p in pieces], dim=1), hidden[rows, index], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([p[0] for p in pieces], dim=1), features[rows, index], atol=1e-4, rtol=1e-4)


def test_lockstep_decoding_equals_one_pass(target: Target) -> None:
    _, hidden = target.forward(IDS, ())
    cache = RowCache(target, 3, 64)
    for t in range(IDS.shape[1]):
        step = target.decode(IDS[:, t], torch.tensor([t]), cache)
        torch.testing.assert_close(step, hidden[:, t], atol=1e-4, rtol=1e-4)


def test_rope_permutation_is_undone() -> None:
    weight = torch.randn(4 * HEAD_DIM, 5)
    # What GGUF conversion does: the two halves of each head are interleaved.
    stored = weight.view(4, 2, HEAD_DIM // 2, 5).transpose(1, 2).reshape(weight.shape)
    assert not torch.equal(stored, weight)
    assert torch.equal(_undo_rope_permutation(stored, HEAD_DIM), weight)


def test_unusable_targets_are_refused(tmp_path: Path, toy_folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="no config"):
        read_target(tmp_path)
    config = json.loads((toy_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UsageError, match="mamba"):
        read_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(UsageError, match="rotary"):
        read_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((toy_folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        read_target(tmp_path)


def test_missing_tensor_is_named(toy_folder: Path) -> None:
    shape, weights = read_target(toy_folder)
    del weights["layers.3.mlp.up_proj.weight"]
    with pytest.raises(DamagedFile, match=r"layers\.3\.mlp\.up_proj"):
        Target(shape, weights, device="cpu", dtype=torch.float32)
