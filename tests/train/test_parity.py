"""A trained folder, read by the engine's loader, computes what the trainer computed."""

from pathlib import Path

import pytest
import torch

from sparkchat.models import ForwardBatch, load_drafter, load_target
from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.checkpoint import load_exported
from sparkchat.train.config import DataPlan, DrafterShape, Recipe
from sparkchat.train.data import prepare_data
from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.losses import product_fp32
from sparkchat.train.target import Target
from sparkchat.train.trainer import Trainer

SHAPE = DrafterShape(num_layers=2, block_size=4, markov_rank=8, draft_vocab_size=128, num_taps=3)
ANCHOR = 30


@pytest.fixture(scope="module")
def folder(target: Target, tokens: ChatTokens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafter")
    plan = DataPlan(tokens=512, wave_tokens=512, lengths=(64,), held_out_rows=4, held_out_length=64, num_questions=16)
    recipe = Recipe(max_steps=6, tokens_per_batch=256, slots_per_sequence=512, learning_rate=3e-2)
    data = prepare_data(target, tokens, plan, out / "data", lambda _: None)
    Trainer(target, tokens, data, SHAPE, recipe, out, lambda _: None).run()
    return out


@pytest.fixture(scope="module")
def trained(target: Target, folder: Path) -> TrainingDrafter:
    """The exported weights, rounded as they were stored, in the training form."""
    drafter = TrainingDrafter(target, SHAPE, (1, 2, 3), 3)
    weights = load_exported(folder)
    del weights["draft_to_target"]
    drafter.load_state_dict({**weights, "feature_scale": torch.ones(96)})
    return drafter


def span(ids: torch.Tensor, start: int) -> ForwardBatch:
    positions = torch.arange(start, start + len(ids))
    return ForwardBatch(token_ids=ids, positions=positions, cache_rows=(0,), row_starts=(0, len(ids)))


def test_both_forms_give_the_same_draft_logits(
    target: Target, toy_folder: Path, folder: Path, trained: TrainingDrafter
) -> None:
    ids = torch.randint(4, 250, (60,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        features, _ = target.forward(ids[None], (1, 2, 3))
        hidden = trained(features, ids[None], torch.tensor([[ANCHOR]]), 4)[0, 0]
        previous = ids[ANCHOR : ANCHOR + 4]
        embedded = trained.previous_embedding(previous)
        mapping = load_exported(folder)["draft_to_target"]
        logits = product_fp32(hidden, target.head[mapping])
        logits += product_fp32(embedded, trained.markov_head.markov_w2.weight)
        confidence = trained.confidence_head(hidden, embedded)

    cpu = torch.device("cpu")
    engine_target = load_target(toy_folder, device=cpu, dtype=torch.float32)
    drafter = load_drafter(folder, engine_target, device=cpu, dtype=torch.float32)
    target_cache, cache = engine_target.new_cache(1, 64, 8), drafter.new_cache(1, 64)
    assert target_cache.allocate() == cache.allocate() == 0
    _, taps = engine_target.forward(span(ids[:ANCHOR], 0), target_cache, drafter.config.target_layer_ids)
    drafter.extend_context(taps, span(ids[:ANCHOR], 0), cache)
    block = torch.tensor([int(ids[ANCHOR]), 3, 3, 3])
    rows = drafter.backbone(span(block, ANCHOR), cache)
    torch.testing.assert_close(rows, hidden, atol=2e-3, rtol=1e-3)
    bias, _ = drafter.markov_step(previous, rows, drafter.initial_state(4))
    torch.testing.assert_close(drafter.base_logits(rows) + bias, logits, atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(drafter.confidence(previous, rows), confidence, atol=2e-3, rtol=1e-3)
    assert torch.equal(drafter.draft_to_target, mapping)
