"""The drafter against the paper's formulas: context before the anchor, a block that sees itself, the heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafters import CONFIG, HIDDEN, RANK, TAPS, VOCAB, Draft, random_weights, recompute_block, write_draft
from models.pairs import CPU, Pair, assert_close, batch_of, make_pair, random_ids, run
from sparkchat.models import KVCache, load_drafter


@pytest.fixture
def pair(build_once: Callable[..., Any]) -> Pair:
    return build_once("models-drafted", lambda folder: make_pair(folder, "qwen3"))


@pytest.fixture
def draft(pair: Pair, build_once: Callable[..., Any]) -> Draft:
    return build_once("models-drafter", lambda folder: write_draft(folder, pair))


def random_features(count: int, seed: int = 5) -> Tensor:
    return torch.randn(count, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(seed))


def extend(draft: Draft, cache: KVCache, spans: Sequence[tuple[int, Tensor]]) -> None:
    """Add feature rows at the end of each cache row."""
    batch = batch_of(cache, [(row, torch.zeros(len(features), dtype=torch.int64)) for row, features in spans])
    draft.ours.extend_context(torch.cat([features for _, features in spans]), batch, cache)


def block_of(anchor: int, count: int = CONFIG.block_size) -> Tensor:
    return torch.tensor([anchor] + [CONFIG.mask_token_id] * (count - 1))


def run_block(draft: Draft, cache: KVCache, row: int, block: Tensor) -> Tensor:
    return draft.ours.backbone(batch_of(cache, [(row, block)]), cache)


@pytest.mark.parametrize("length", [1, 7, 30, 300])
def test_block_equals_the_formulas(draft: Draft, length: int) -> None:
    cache = draft.ours.new_cache(1, 400)
    row, features, block = cache.allocate(), random_features(length), block_of(3)
    extend(draft, cache, [(row, features)])
    assert_close(run_block(draft, cache, row, block), recompute_block(draft, features, block))


def test_context_grown_round_by_round_equals_the_whole(draft: Draft) -> None:
    cache = draft.ours.new_cache(1, 100)
    row, features = cache.allocate(), random_features(40)
    at = 0
    for count in (7, 1, 1, 6, 3, 1, 5, 2):
        extend(draft, cache, [(row, features[at : at + count])])
        at += count
        block = block_of(at)
        hidden = run_block(draft, cache, row, block)
        assert_close(hidden, recompute_block(draft, features[:at], block))
        assert cache.length(row) == at


def test_block_rows_see_each_other_in_both_directions(draft: Draft) -> None:
    cache = draft.ours.new_cache(1, 100)
    row = cache.allocate()
    extend(draft, cache, [(row, random_features(9))])
    block = block_of(3)
    before = run_block(draft, cache, row, block)
    block[-1] = 8
    after = run_block(draft, cache, row, block)
    assert (before[0] - after[0]).abs().max() > 1e-3


def test_stale_rows_behind_the_context_are_not_seen(draft: Draft) -> None:
    cache = draft.ours.new_cache(1, 100)
    row, features = cache.allocate(), random_features(20)
    extend(draft, cache, [(row, features)])
    run_block(draft, cache, row, block_of(3))
    cache.truncate(row, 6)
    block = block_of(4, 3)
    assert_close(run_block(draft, cache, row, block), recompute_block(draft, features[:6], block))


def test_blocks_of_a_batch_equal_each_alone(draft: Draft) -> None:
    cache = draft.ours.new_cache(4, 100)
    rows = [cache.allocate() for _ in range(4)]
    features = [random_features(n, seed=n) for n in (12, 3, 40, 25)]
    extend(draft, cache, list(zip(rows, features, strict=True)))
    blocks = [block_of(9, n) for n in (5, 2, 1, 4)]
    together = draft.ours.backbone(batch_of(cache, list(zip(rows, blocks, strict=True))), cache)
    alone = torch.cat([run_block(draft, cache, row, block) for row, block in zip(rows, blocks, strict=True)])
    assert torch.equal(together, alone) or not torch.backends.mkldnn.is_available()
    assert_close(together, alone)


def test_features_of_the_target_fit(pair: Pair, draft: Draft) -> None:
    cache, ids = pair.ours.new_cache(1, 64, 64), random_ids(12)
    _, features = run(pair.ours, cache, [(cache.allocate(), ids)], draft.config.target_layer_ids)
    assert features is not None
    context = draft.ours.new_cache(1, 64)
    row = context.allocate()
    extend(draft, context, [(row, features)])
    assert_close(run_block(draft, context, row, block_of(3)), recompute_block(draft, features, block_of(3)))


def test_base_logits(draft: Draft) -> None:
    hidden = torch.randn(3, HIDDEN)
    logits = draft.ours.base_logits(hidden)
    assert logits.dtype == torch.float32
    assert_close(logits, hidden @ draft.weights["lm_head.weight"].T)


def head_inputs(rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    previous = torch.randint(0, VOCAB, (3, rows), generator=generator)
    return previous, torch.randn(3, rows, HIDDEN, generator=generator), torch.zeros(rows, RANK)


def test_vanilla_head(draft: Draft) -> None:
    previous, hidden, _ = head_inputs()
    state = draft.ours.initial_state(4)
    for k in range(3):
        bias, state = draft.ours.markov_step(previous[k], hidden[k], state)
        e = draft.weights["markov_head.markov_w1.weight"][previous[k]]
        assert_close(bias, e @ draft.weights["markov_head.markov_w2.weight"].T)


def test_gated_head(pair: Pair, tmp_path: Path) -> None:
    draft = write_draft(tmp_path, pair, markov_head_type="gated")
    w, (previous, hidden, _) = draft.weights, head_inputs()
    state = draft.ours.initial_state(4)
    for k in range(3):
        bias, state = draft.ours.markov_step(previous[k], hidden[k], state)
        e = w["markov_head.markov_w1.weight"][previous[k]]
        both = torch.cat([hidden[k], e], dim=-1)
        gate = torch.sigmoid(both @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"])
        assert_close(bias, (gate * e) @ w["markov_head.markov_w2.weight"].T)


def test_rnn_head_carries_its_state(pair: Pair, tmp_path: Path) -> None:
    draft = write_draft(tmp_path, pair, markov_head_type="rnn")
    w, (previous, hidden, s) = draft.weights, head_inputs()
    state = draft.ours.initial_state(4)
    for k in range(3):
        bias, state = draft.ours.markov_step(previous[k], hidden[k], state)
        z = torch.cat([s, w["markov_head.markov_w1.weight"][previous[k]], hidden[k]], dim=-1)
        joint = z @ w["markov_head.joint_proj.weight"].T + w["markov_head.joint_proj.bias"]
        gate, candidate, out = joint.chunk(3, dim=-1)
        s = torch.sigmoid(gate) * s + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        assert_close(bias, torch.tanh(out) @ w["markov_head.markov_w2.weight"].T)
    assert_close(state, s)


def test_no_head_biases_nothing(pair: Pair, tmp_path: Path) -> None:
    draft = write_draft(tmp_path, pair, markov_rank=0, markov_head_type=None, confidence_with_markov=False)
    previous, hidden, _ = head_inputs()
    bias, state = draft.ours.markov_step(previous[0], hidden[0], draft.ours.initial_state(4))
    assert bias.shape == (4, VOCAB) and not bias.any() and state.shape[0] == 4
    w = draft.weights
    wanted = hidden[0] @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    assert_close(draft.ours.confidence(previous[0], hidden[0]), wanted)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_head(pair: Pair, tmp_path: Path, with_markov: bool, with_bias: bool) -> None:
    config = {"confidence_with_markov": with_markov, "markov_head_type": "rnn"}
    draft = write_draft(tmp_path / "all", pair, **config)
    weights = dict(draft.weights)
    bias = weights["confidence_head.proj.bias"] if with_bias else torch.zeros(1)
    if not with_bias:
        del weights["confidence_head.proj.bias"]
        draft = write_draft(tmp_path / "plain", pair, weights, **config)
    previous, hidden, _ = head_inputs()
    seen = [hidden[0]] + ([weights["markov_head.markov_w1.weight"][previous[0]]] if with_markov else [])
    wanted = torch.cat(seen, dim=-1) @ weights["confidence_head.proj.weight"][0] + bias
    logits = draft.ours.confidence(previous[0], hidden[0])
    assert logits.dtype == torch.float32
    assert_close(logits, wanted)


def test_without_confidence_head(pair: Pair, tmp_path: Path) -> None:
    draft = write_draft(tmp_path, pair, has_confidence=False, confidence_with_markov=False)
    assert not draft.ours.has_confidence
    with pytest.raises(ValueError, match="no confidence head"):
        draft.ours.confidence(torch.tensor([1]), torch.zeros(1, HIDDEN))


def test_embedding_and_head_of_the_target_are_used_when_left_out(pair: Pair, tmp_path: Path) -> None:
    weights = random_weights(CONFIG, shares_target=True)
    shared = write_draft(tmp_path, pair, weights)
    theirs = pair.theirs.state_dict()
    weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    full = Draft(shared.config, weights, shared.ours, shared.folder)
    cache, features = shared.ours.new_cache(1, 64), random_features(8)
    row = cache.allocate()
    extend(shared, cache, [(row, features)])
    hidden = run_block(shared, cache, row, block_of(3))
    assert_close(hidden, recompute_block(full, features, block_of(3)))
    assert_close(shared.ours.base_logits(hidden), hidden @ theirs["lm_head.weight"].T)


@pytest.mark.parametrize("own_head", [True, False])
def test_reduced_vocabulary(pair: Pair, tmp_path: Path, own_head: bool) -> None:
    ids = torch.tensor([0, 2, 3, 7, 11, 12, 40, 41, 90, 96])
    weights = random_weights(_reduced(len(ids)), shares_target=not own_head)
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    draft = write_draft(tmp_path, pair, weights, draft_vocab_size=len(ids))
    assert draft.ours.draft_to_target is not None
    assert draft.ours.draft_to_target.tolist() == ids.tolist()
    hidden = torch.randn(3, HIDDEN)
    rows = weights["lm_head.weight"] if own_head else pair.theirs.state_dict()["lm_head.weight"][ids]
    assert_close(draft.ours.base_logits(hidden), hidden @ rows.T)
    # W1 is looked up by target id, also by ids outside the draft vocabulary.
    bias, _ = draft.ours.markov_step(torch.tensor([95, 1, 96]), hidden, draft.ours.initial_state(3))
    e = weights["markov_head.markov_w1.weight"][torch.tensor([95, 1, 96])]
    assert_close(bias, e @ weights["markov_head.markov_w2.weight"].T)


def _reduced(size: int) -> Any:
    from dataclasses import replace

    return replace(CONFIG, draft_vocab_size=size)


def test_other_spelling_of_the_block_size(pair: Pair, draft: Draft, tmp_path: Path) -> None:
    copied = write_draft(tmp_path, pair, draft.weights)
    path = copied.folder / "config.json"
    config = json.loads(path.read_text())
    config["dspark_block_size"] = config.pop("block_size")
    path.write_text(json.dumps(config))
    assert load_drafter(copied.folder, pair.ours, device=CPU).config.block_size == CONFIG.block_size


def test_written_folder_is_in_the_published_layout(draft: Draft) -> None:
    config = json.loads((draft.folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["markov_rank"], config["target_layer_ids"]) == (5, RANK, list(TAPS))
    assert [p.name for p in draft.folder.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_biases_of_chosen_tokens_equal_those_of_the_whole_vocabulary(pair: Pair, tmp_path: Path, kind: str) -> None:
    draft = write_draft(tmp_path, pair, markov_head_type=kind)
    previous, hidden, _ = head_inputs()
    state = other = draft.ours.initial_state(4)
    columns = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
    for k in range(3):
        bias, state = draft.ours.markov_step(previous[k], hidden[k], state)
        vector, other = draft.ours.markov_vector(previous[k], hidden[k], other)
        rows = draft.ours.markov_rows(columns)
        assert vector is not None and rows is not None
        assert_close((rows @ vector.unsqueeze(-1)).squeeze(-1), bias.gather(1, columns))
    assert torch.equal(state, other)
