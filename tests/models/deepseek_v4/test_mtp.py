"""The preview's MTP block drafts what its formulas say, token by token, over any history of its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fixtures.deepseek_v4 import parsed, random_weights, rounded_weights, v4_config, write_tiny_v4
from models.deepseek_v4.reference import Reference
from sparkchat.models import load_drafter, load_target
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.mtp import MOST_DRAFTS, MtpDrafter, StreamCache

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 2, "compress_ratios": [0, 4]}


@dataclass(frozen=True)
class Pair:
    target: DeepseekV4
    drafter: MtpDrafter
    reference: Reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_tiny_v4(tmp_path_factory.mktemp("v4") / "tiny", drafter="mtp", **SIZES)
    target = load_target(folder, device=CPU)
    config = parsed(v4_config(drafter="mtp", **SIZES))
    reference = Reference(config, rounded_weights(config, random_weights(config)))
    return Pair(target, load_drafter(folder, target, device=CPU), reference)


def ids_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def features_of(pair: Pair, ids: Tensor) -> Tensor:
    """What the target taps for these tokens."""
    cache = pair.target.new_cache(1, 1024, 512)
    row = cache.allocate()
    batch = ForwardBatch(ids, torch.arange(len(ids)), (row,), (0, len(ids)))
    _, features = pair.target.forward(batch, cache, pair.drafter.config.target_layer_ids)
    assert features is not None
    return features


def extend(pair: Pair, cache: StreamCache, row: int, features: Tensor, start: int = 0) -> None:
    where = start + torch.arange(len(features))
    batch = ForwardBatch(torch.zeros_like(where), where, (row,), (0, len(features)))
    pair.drafter.extend_context(features, batch, cache)


def with_context(pair: Pair, features: Tensor, cuts: Sequence[int] = ()) -> tuple[StreamCache, int]:
    cache = pair.drafter.new_cache(2, 1024)
    row = cache.allocate()
    for start, stop in zip((0, *cuts), (*cuts, len(features)), strict=True):
        extend(pair, cache, row, features[start:stop], start)
    return cache, row


def draft(pair: Pair, cache: StreamCache, row: int, anchor: int, follow: Sequence[int]) -> Tensor:
    """The logits [g, V] of g drafts when ``follow`` are drawn."""
    count, start = len(follow) + 1, cache.length(row)
    ids = torch.tensor([anchor] + [0] * (count - 1))
    batch = ForwardBatch(ids, start + torch.arange(count), (row,), (0, count))
    hidden = pair.drafter.backbone(batch, cache)
    base, state = pair.drafter.base_logits(hidden), pair.drafter.initial_state(1)
    logits = []
    for k, previous in enumerate((anchor, *follow)):
        bias, state = pair.drafter.markov_step(torch.tensor([previous]), hidden[k : k + 1], state)
        logits.append(base[k] + bias[0])
    assert cache.length(row) == start
    return torch.stack(logits)


def reference_drafts(pair: Pair, features: Tensor, ids: Tensor, anchor: int, follow: Sequence[int]) -> Tensor:
    """Run over everything again for every draft."""
    streams, next_ids = features[:, 64:].double(), torch.cat([ids[1:], torch.tensor([anchor])])
    logits = []
    for k in range(len(follow) + 1):
        behind, predicted = pair.reference.predict_further(streams, next_ids)
        logits.append(predicted[-1])
        if k < len(follow):
            streams = torch.cat([streams, behind[-1:].flatten(1)])
            next_ids = torch.cat([next_ids, torch.tensor([follow[k]])])
    return torch.stack(logits)


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 60, 250])
def test_drafts_are_what_the_formulas_say(pair: Pair, length: int) -> None:
    ids, follow = ids_of(length), (9, 400)
    features = features_of(pair, ids)
    ours = draft(pair, *with_context(pair, features), 33, follow)
    assert_close(ours, reference_drafts(pair, features, ids, 33, follow))


def test_it_taps_embeddings_and_all_streams(pair: Pair) -> None:
    ids = ids_of(12)
    features = features_of(pair, ids)
    assert pair.drafter.config.target_layer_ids == (-1, 2)
    assert features.shape == (12, 5 * 64)
    assert torch.equal(features[:, :64], pair.target.embedding(ids))
    hidden, means = pair.target.forward(
        ForwardBatch(ids, torch.arange(12), (0,), (0, 12)), _fresh_cache(pair), tap_layers=(1,)
    )
    assert means is not None
    assert_close(features[:, 64:].unflatten(-1, (4, 64)).mean(1), means)
    assert hidden.shape == (12, 64)


def _fresh_cache(pair: Pair):  # type: ignore[no-untyped-def]
    cache = pair.target.new_cache(1, 64, 32)
    cache.allocate()
    return cache


@pytest.mark.parametrize("cuts", [(1, 2, 3), (16, 17, 39), (99,), tuple(range(1, 100))])
def test_context_in_pieces_is_context_at_once(pair: Pair, cuts: tuple[int, ...]) -> None:
    features = features_of(pair, ids_of(100))
    whole = draft(pair, *with_context(pair, features), 5, (6, 7))
    assert torch.equal(draft(pair, *with_context(pair, features, cuts), 5, (6, 7)), whole)


def test_drafted_rows_are_not_kept(pair: Pair) -> None:
    ids = ids_of(80)
    features = features_of(pair, ids)
    cache, row = with_context(pair, features[:77])
    first = draft(pair, cache, row, 5, (6, 7))
    draft(pair, cache, row, 8, (9, 10))
    assert torch.equal(draft(pair, cache, row, 5, (6, 7)), first)
    extend(pair, cache, row, features[77:], 77)
    assert_close(draft(pair, cache, row, 1, (2,)), reference_drafts(pair, features, ids, 1, (2,)))


@pytest.mark.parametrize("back", [0, 1, 30])
def test_going_back_pairs_the_kept_streams_with_the_new_token(pair: Pair, back: int) -> None:
    ids, other = ids_of(200), ids_of(200, seed=4)
    cache, row = with_context(pair, features_of(pair, ids))
    draft(pair, cache, row, 5, (6, 7))
    length = 200 - back
    cache.truncate(row, length)
    whole = torch.cat([ids[:length], other[:3]])
    features = features_of(pair, whole)
    extend(pair, cache, row, features[length:], length)
    assert_close(draft(pair, cache, row, 1, (2, 3)), reference_drafts(pair, features, whole, 1, (2, 3)))


def test_requests_side_by_side_and_of_different_lengths(pair: Pair) -> None:
    texts = [ids_of(n, seed=n) for n in (3, 40, 120)]
    cache = pair.drafter.new_cache(3, 1024)
    taken = tuple(cache.allocate() for _ in texts)
    features = [features_of(pair, ids) for ids in texts]
    where = torch.cat([torch.arange(len(ids)) for ids in texts])
    starts = (0, 3, 43, 163)
    pair.drafter.extend_context(torch.cat(features), ForwardBatch(where, where, taken, starts), cache)
    ids = torch.tensor([11, 0, 0, 12, 13, 0])
    batch = ForwardBatch(ids, torch.tensor([3, 4, 5, 40, 120, 121]), taken, (0, 3, 4, 6))
    hidden = pair.drafter.backbone(batch, cache)
    base, state = pair.drafter.base_logits(hidden), pair.drafter.initial_state(3)
    assert not base[[1, 2, 5]].any()
    bias, state = pair.drafter.markov_step(torch.tensor([11, 12, 13]), hidden[[0, 3, 4]], state)
    assert not bias.any()
    keep = torch.tensor([0, 2])
    second, state = pair.drafter.markov_step(torch.tensor([21, 23]), hidden[[1, 5]], state[keep])
    third, _ = pair.drafter.markov_step(torch.tensor([31]), hidden[[2]], state[torch.tensor([0])])
    alone = draft(pair, *with_context(pair, features[0]), 11, (21, 31))
    assert torch.equal(torch.stack([base[0], second[0], third[0]]), alone)
    assert torch.equal(base[3], draft(pair, *with_context(pair, features[1]), 12, ())[0])
    alone = draft(pair, *with_context(pair, features[2]), 13, (23,))
    assert torch.equal(torch.stack([base[4], second[1]]), alone)


def test_a_state_belongs_to_the_blocks_that_were_run(pair: Pair) -> None:
    cache, row = with_context(pair, features_of(pair, ids_of(8)))
    draft(pair, cache, row, 5, ())
    with pytest.raises(ValueError, match="no state of 2 blocks"):
        pair.drafter.initial_state(2)


def test_it_says_what_it_is(pair: Pair) -> None:
    config = pair.drafter.config
    assert (config.block_size, config.markov_head_type) == (MOST_DRAFTS, None)
    assert not pair.drafter.has_confidence
