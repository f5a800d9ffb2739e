"""The DSpark drafter in a checkpoint: against the written-out formulas, over any history of its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fixtures.deepseek_v4 import parsed, random_weights, rounded_weights, v4_config, write_tiny_v4
from models.deepseek_v4.reference import Reference
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models import load_drafter, load_target
from sparkchat.models.base import ForwardBatch
from sparkchat.models.deepseek_v4.drafter import SPARE_POSITIONS, ContextCache, DsparkDrafter
from sparkchat.models.deepseek_v4.model import DeepseekV4

CPU = torch.device("cpu")
BLOCK, WINDOW, NOISE = 5, 16, 511
SIZES = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 16], "dspark_target_layer_ids": [0, 1, 2]}


@dataclass(frozen=True)
class Pair:
    target: DeepseekV4
    drafter: DsparkDrafter
    reference: Reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_tiny_v4(tmp_path_factory.mktemp("v4") / "tiny", **SIZES)
    target = load_target(folder, device=CPU)
    config = parsed(v4_config(**SIZES))
    reference = Reference(config, rounded_weights(config, random_weights(config)))
    return Pair(target, load_drafter(folder, target, device=CPU), reference)


def rows(length: int, start: int = 0, row: int = 0) -> ForwardBatch:
    where = torch.arange(start, start + length)
    return ForwardBatch(torch.zeros_like(where), where, (row,), (0, length))


def features_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3 * 64, generator=torch.Generator().manual_seed(seed))


def block_ids(anchor: int, length: int = BLOCK) -> Tensor:
    return torch.tensor([anchor] + [NOISE] * (length - 1))


def with_context(pair: Pair, features: Tensor, cuts: Sequence[int] = ()) -> tuple[ContextCache, int]:
    """A cache that was given the features in pieces, cut at these positions."""
    cache = pair.drafter.new_cache(2, 1024)
    row = cache.allocate()
    for start, stop in zip((0, *cuts), (*cuts, len(features)), strict=True):
        pair.drafter.extend_context(features[start:stop], rows(stop - start, start, row), cache)
    return cache, row


def run_block(pair: Pair, cache: ContextCache, row: int, ids: Tensor) -> Tensor:
    start = cache.length(row)
    batch = ForwardBatch(ids, start + torch.arange(len(ids)), (row,), (0, len(ids)))
    hidden = pair.drafter.backbone(batch, cache)
    assert cache.length(row) == start
    return hidden


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    assert ours.dtype == torch.float32
    assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 90, 300])
def test_a_block_is_what_the_formulas_say(pair: Pair, length: int) -> None:
    features, ids = features_of(length), block_ids(7)
    hidden = run_block(pair, *with_context(pair, features), ids)
    wanted = pair.reference.draft_block(features, ids)
    assert_close(hidden, wanted)
    assert_close(pair.drafter.base_logits(hidden), pair.reference.logits("mtp.2.", wanted))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_shorter_blocks_are_blocks_of_their_own(pair: Pair, length: int) -> None:
    features, ids = features_of(40), block_ids(3, length)
    hidden = run_block(pair, *with_context(pair, features), ids)
    assert_close(hidden, pair.reference.draft_block(features, ids))


def test_heads_take_the_token_before_the_draft(pair: Pair) -> None:
    w = pair.reference.weights
    previous, hidden = torch.tensor([5, 300]), torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    state = pair.drafter.initial_state(2)
    bias, state = pair.drafter.markov_step(previous, hidden, state)
    e = w["mtp.2.markov_head.markov_w1.weight"][previous]
    assert_close(bias, e @ w["mtp.2.markov_head.markov_w2.weight"].T)
    vector, _ = pair.drafter.markov_vector(previous, hidden, state)
    columns = torch.tensor([[1, 2, 500], [0, 511, 9]])
    chosen = (pair.drafter.markov_rows(columns) @ vector.unsqueeze(-1)).squeeze(-1)
    assert_close(chosen, bias.gather(1, columns))
    logit = torch.cat([hidden.double(), e], dim=1) @ w["mtp.2.confidence_head.proj.weight"][0]
    assert_close(pair.drafter.confidence(previous, hidden), logit)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (16, 17, 39), (50,), (99,), tuple(range(1, 100))])
def test_context_in_pieces_is_context_at_once(pair: Pair, cuts: tuple[int, ...]) -> None:
    features, ids = features_of(100), block_ids(11)
    whole = run_block(pair, *with_context(pair, features), ids)
    assert torch.equal(run_block(pair, *with_context(pair, features, cuts), ids), whole)


def test_a_span_longer_than_the_ring_keeps_its_end(pair: Pair) -> None:
    features, ids = features_of(500), block_ids(2)
    cache, row = with_context(pair, features, (3,))
    assert cache.stores[0].ring < 497
    assert_close(run_block(pair, cache, row, ids), pair.reference.draft_block(features, ids))


def test_drafted_rows_are_not_kept(pair: Pair) -> None:
    features = features_of(60)
    cache, row = with_context(pair, features[:57])
    first = run_block(pair, cache, row, block_ids(9))
    assert torch.equal(run_block(pair, cache, row, block_ids(9)), first)
    pair.drafter.extend_context(features[57:], rows(3, 57, row), cache)
    clean, own = with_context(pair, features)
    assert torch.equal(run_block(pair, cache, row, block_ids(4)), run_block(pair, clean, own, block_ids(4)))


@pytest.mark.parametrize("back", [0, 1, 5, SPARE_POSITIONS - BLOCK - 1])
def test_going_back_is_never_having_gone_on(pair: Pair, back: int) -> None:
    features, other = features_of(400), features_of(400, seed=5)
    cache, row = with_context(pair, features)
    run_block(pair, cache, row, block_ids(1))
    length = 400 - back
    assert cache.can_truncate(row, length)
    cache.truncate(row, length)
    pair.drafter.extend_context(other[:2], rows(2, length, row), cache)
    whole = torch.cat([features[:length], other[:2]])
    assert_close(run_block(pair, cache, row, block_ids(1)), pair.reference.draft_block(whole, block_ids(1)))


def test_going_back_too_far_is_refused(pair: Pair) -> None:
    cache, row = with_context(pair, features_of(400))
    run_block(pair, cache, row, block_ids(1))
    ring = cache.stores[0].ring
    last = 400 + BLOCK - ring + WINDOW
    assert cache.can_truncate(row, last)
    assert not cache.can_truncate(row, last - 1)
    with pytest.raises(ValueError, match="cannot go back"):
        cache.truncate(row, last - 1)


def test_rows_of_a_block_see_each_other_and_the_whole_window_before_them(pair: Pair) -> None:
    features = features_of(40)
    plain = run_block(pair, *with_context(pair, features), block_ids(5))
    changed_end = block_ids(5)
    changed_end[-1] = 6
    assert not torch.allclose(run_block(pair, *with_context(pair, features), changed_end)[0], plain[0])
    for position, is_seen in ((40 - WINDOW, True), (40 - WINDOW - 1, False)):
        changed = features.clone()
        changed[position] += 1.0
        hidden = run_block(pair, *with_context(pair, changed), block_ids(5))
        assert [not torch.allclose(a, b) for a, b in zip(hidden, plain, strict=True)] == [is_seen] * BLOCK


def test_a_request_drafts_alone_what_it_drafts_beside_others(pair: Pair) -> None:
    lengths, sizes = (3, 40, 200), (5, 1, 3)
    cache = pair.drafter.new_cache(3, 1024)
    taken = [cache.allocate() for _ in lengths]
    features = [features_of(length, seed=length) for length in lengths]
    where = torch.cat([torch.arange(n) for n in lengths])
    starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    pair.drafter.extend_context(torch.cat(features), ForwardBatch(where, where, tuple(taken), starts), cache)
    ids = torch.cat([block_ids(8 + n, size) for n, size in enumerate(sizes)])
    where = torch.cat([n + torch.arange(size) for n, size in zip(lengths, sizes, strict=True)])
    starts = (0, *torch.tensor(sizes).cumsum(0).tolist())
    together = pair.drafter.backbone(ForwardBatch(ids, where, tuple(taken), starts), cache)
    for n, own in enumerate(features):
        alone = run_block(pair, *with_context(pair, own), block_ids(8 + n, sizes[n]))
        assert torch.equal(together[starts[n] : starts[n + 1]], alone)


def test_it_taps_the_means_of_its_layers(pair: Pair) -> None:
    assert pair.drafter.config.target_layer_ids == (0, 1, 2)
    cache = pair.target.new_cache(1, 64, 32)
    row = cache.allocate()
    ids = torch.arange(20)
    _, taps = pair.target.forward(ForwardBatch(ids, ids, (row,), (0, 20)), cache, pair.drafter.config.target_layer_ids)
    assert taps is not None and taps.shape == (20, 3 * 64)
    reference, everything = pair.reference, torch.arange(20)
    streams = reference.spread(reference.weights["embed.weight"][ids])
    # Layer 0 chooses its experts by token id, which the reference layer does not know: only its attention is compared.
    u, post, c = reference.read("layers.0.hc_attn", streams)
    x = reference.norm(u, "layers.0.attn_norm.weight")
    own = reference.latents("layers.0.attn.", x, everything)
    keys = [own[max(0, t + 1 - WINDOW) : t + 1] for t in range(20)]
    streams = reference.merge(reference.attend("layers.0.attn.", x, everything, keys), post, c, streams)
    u, post, c = reference.read("layers.0.hc_ffn", streams)
    x = reference.norm(u, "layers.0.ffn_norm.weight")
    experts = reference.weights["layers.0.ffn.gate.tid2eid"].long()[ids]
    outputs = [hashed_experts(reference, row, picks) for row, picks in zip(x, experts, strict=True)]
    streams = reference.merge(torch.stack(outputs), post, c, streams)
    assert_close(taps[:, :64], streams.mean(1))


def hashed_experts(reference: Reference, x: Tensor, picks: Tensor) -> Tensor:
    scores = torch.nn.functional.softplus(reference.linear("layers.0.ffn.gate.weight", x)).sqrt()[picks]
    total = reference.expert("layers.0.ffn.shared_experts.", x, 1.0)
    for pick, score in zip(picks.tolist(), scores, strict=True):
        weight = float(score / scores.sum() * reference.config.routed_scale)
        total = total + reference.expert(f"layers.0.ffn.experts.{pick}.", x, weight)
    return total


def test_a_checkpoint_without_drafter_is_refused_by_name(pair: Pair, tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path / "v4", drafter="none", num_hidden_layers=3, compress_ratios=[0, 4, 16])
    with pytest.raises(UsageError, match="has no drafter"):
        load_drafter(folder, pair.target, device=CPU)


def test_a_drafter_of_another_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path / "v4")
    with pytest.raises(UsageError, match="its layer count of the target is 5, the model's 3"):
        load_drafter(folder, pair.target, device=CPU)


def test_a_damaged_drafter_does_not_stop_the_target(tmp_path: Path) -> None:
    folder = write_tiny_v4(tmp_path / "v4", **SIZES)
    last = sorted(folder.glob("*.safetensors"))[-1]
    save_file(load_file(last) | {"mtp.2.hc_head_base": torch.full((4,), torch.nan)}, last)
    target = load_target(folder, device=CPU)
    with pytest.raises(DamagedFile, match=r"mtp\.2\.hc_head_base holds NaN"):
        load_drafter(folder, target, device=CPU)
