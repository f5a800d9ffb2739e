"""Single parts of the trunk at their edges: ties, duplicates, sinks, the published rope, halves, bad configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.deepseek_v4 import FULL_SIZES, parsed, v4_config
from models.deepseek_v4.trunks import CPU, SIZES, make_trunk, random_ids, run
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.attention import open_spans
from sparkchat.models.deepseek_v4.activation import sigmoid, silu, sqrt_softplus
from sparkchat.models.deepseek_v4.attention import LatentAttention
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.experts import ExpertMixture
from sparkchat.models.deepseek_v4.gate import Gate
from sparkchat.models.deepseek_v4.hyper import HyperConnection
from sparkchat.models.deepseek_v4.indexer import best_entries, index_scores
from sparkchat.models.deepseek_v4.layout import trunk_layout
from sparkchat.models.deepseek_v4.rope import Ropes
from sparkchat.models.deepseek_v4.scope import Scope, TensorTable
from sparkchat.models.deepseek_v4.sight import Sight, attend_with_sinks
from sparkchat.models.rope import inverse_frequencies


def scope_of(weights: dict[str, Tensor], prefix: str) -> Scope:
    return Scope(TensorTable(weights), CPU, torch.float32, prefix=prefix)


def test_streams_are_mixed_by_columns() -> None:
    """Stream k behind a sub-block gets combination[j, k] of stream j, and the columns of the combination sum to 1."""
    trunk = make_trunk()
    connection = HyperConnection(scope_of(trunk.weights, "layers.0."), "hc_attn", trunk.ours.config)
    streams = torch.randn(5, 4, 64)
    _, mix = connection.read(streams)
    assert torch.allclose(mix.combination.sum(dim=1), torch.ones(5, 4), atol=1e-5)
    assert not torch.allclose(mix.combination, mix.combination.transpose(1, 2), atol=1e-2)
    behind = mix.merge(torch.zeros(5, 64), streams)
    wanted = sum(mix.combination[:, 2, k, None] * streams[:, 2] for k in [3])
    others = sum(mix.combination[:, j, 3, None] * streams[:, j] for j in (0, 1, 3))
    assert torch.allclose(behind[:, 3], wanted + others, atol=1e-5)


def test_published_rope() -> None:
    """Compressed layers: dimensions below 15 as they are, from 25 on a sixteenth, amplitude 1; others plain."""
    config = parsed(v4_config(FULL_SIZES))
    stretched, amplitude = inverse_frequencies(config.compress_rope, config.rope_dim)
    plain = 160000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert amplitude == 1.0
    assert torch.allclose(stretched[:16], plain[:16]) and torch.allclose(stretched[25:], plain[25:] / 16)
    assert bool((stretched[16:25] < plain[16:25]).all() & (stretched[16:25] > plain[16:25] / 16).all())
    window, amplitude = inverse_frequencies(config.rope_of(0), config.rope_dim)
    assert amplitude == 1.0 and torch.allclose(window, 10000.0 ** (-torch.arange(0, 64, 2) / 64))
    assert config.rope_of(4) == config.rope_of(128) == config.compress_rope


def test_turning_back_undoes_turning() -> None:
    ropes = Ropes(parsed(v4_config(SIZES, drafter="none")), CPU)
    rotations = ropes.rows(4, torch.tensor([0, 7, 1000]), 1001)
    x = torch.randn(3, 2, 32)
    turned = rotations.turn(x)
    assert torch.equal(turned[0], x[0]) and torch.equal(turned[..., :16], x[..., :16])
    assert not torch.allclose(turned[1:, :, 16:], x[1:, :, 16:])
    assert torch.allclose(rotations.turn_back(turned), x, atol=1e-5)


def test_smooth_functions_do_not_overflow() -> None:
    x = torch.tensor([-200.0, -30.0, -1.0, 0.0, 1.0, 19.9, 20.1, 200.0])
    assert torch.allclose(sigmoid(x), torch.sigmoid(x))
    assert torch.allclose(silu(x), torch.nn.functional.silu(x))
    assert torch.allclose(sqrt_softplus(x), torch.nn.functional.softplus(x).sqrt(), atol=1e-6)


def test_sinks_take_weight_and_give_nothing() -> None:
    torch.manual_seed(0)
    q, latents, sinks = torch.randn(2, 8, 4, 32), torch.randn(2, 32, 32), torch.randn(4) * 3
    latents[:, 0] = 0.0
    mask = torch.zeros(2, 8, 32).masked_fill(torch.rand(2, 8, 32) < 0.4, float("-inf"))
    mask[..., 0] = float("-inf")
    scores = torch.einsum("rqhc,rtc->rqht", q, latents) / 32**0.5 + mask.unsqueeze(2)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp().unsqueeze(-1))
    wanted = torch.einsum("rqht,rtc->rqhc", weights, latents)
    assert torch.allclose(attend_with_sinks(q, latents, mask, sinks), wanted, atol=1e-5)
    half = attend_with_sinks(q.bfloat16(), latents.bfloat16(), mask, sinks)
    assert half.dtype == torch.bfloat16 and (half - wanted).norm() / wanted.norm() < 0.02


def test_a_row_that_sees_little_may_give_nearly_all_to_the_sink() -> None:
    latents, q = torch.ones(1, 16, 32), torch.ones(1, 16, 1, 32)
    latents[:, 0] = 0.0
    mask = torch.full((1, 16, 16), float("-inf"))
    mask[..., 1] = 0.0
    assert attend_with_sinks(q, latents, mask, torch.tensor([200.0])).abs().max() < 1e-30


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_best_entries_against_a_sort(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    # Few different scores: ties everywhere, also at the edge of what is taken.
    scores = torch.randint(0, 3, (200, 7), generator=draw).float() - 1.0
    scores[torch.rand(200, 7, generator=draw) < 0.3] = float("-inf")
    chosen = best_entries(scores, count)
    for row, picked in zip(scores.tolist(), chosen.tolist(), strict=True):
        visible = [i for i, score in enumerate(row) if score > float("-inf")]
        wanted = sorted(visible, key=lambda i: (-row[i], i))[:count]
        assert [i for i, is_picked in enumerate(picked) if is_picked] == sorted(wanted)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_index_scores_do_not_depend_on_the_rows_beside(heads: int) -> None:
    """A last bit would be enough to pick another entry."""
    torch.manual_seed(heads)
    queries, keys, weights = torch.randn(1, 9, heads, 128), torch.randn(1, 48, 128), torch.randn(1, 9, heads)
    together = index_scores(queries, keys, weights)
    products = torch.einsum("rqhc,rec->rqhe", queries, keys).relu()
    assert torch.allclose(together, (products * weights.unsqueeze(-1)).sum(2), atol=1e-3)
    for count in (1, 2, 3):
        assert torch.equal(index_scores(queries[:, :count], keys, weights[:, :count]), together[:, :count])


def test_equal_gate_scores_take_the_lowest_experts() -> None:
    trunk = make_trunk()
    weights = {
        **trunk.weights,
        "layers.1.ffn.gate.weight": torch.zeros(8, 64),
        "layers.1.ffn.gate.bias": torch.zeros(8),
    }
    gate = Gate(scope_of(weights, "layers.1.ffn."), trunk.ours.config, is_hashed=False)
    share, experts = gate(torch.randn(3, 64), torch.zeros(3, dtype=torch.int64))
    assert experts.tolist() == [[0, 1]] * 3
    assert torch.allclose(share, torch.full((3, 2), 0.75))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    trunk = make_trunk()
    bias = torch.zeros(8)
    bias[[3, 6]] = 100.0
    weights = {**trunk.weights, "layers.1.ffn.gate.bias": bias}
    x = torch.randn(4, 64)
    share, experts = Gate(scope_of(weights, "layers.1.ffn."), trunk.ours.config, is_hashed=False)(x, x[:, 0].long())
    assert experts.tolist() == [[3, 6]] * 4
    scores = torch.nn.functional.softplus(x @ weights["layers.1.ffn.gate.weight"].T).sqrt()[:, [3, 6]]
    assert torch.allclose(share, 1.5 * scores / scores.sum(-1, keepdim=True))


def test_a_token_may_name_one_expert_twice() -> None:
    trunk = make_trunk()
    table = torch.tensor([[5, 5], [2, 5]] * 48 + [[0, 1]])
    weights = {**trunk.weights, "layers.0.ffn.gate.tid2eid": table}
    mixture = ExpertMixture(scope_of(weights, "layers.0.ffn."), trunk.ours.config, is_hashed=True)
    once = {**weights, "layers.0.ffn.gate.tid2eid": torch.tensor([[5, 0], [2, 5]] * 48 + [[0, 1]])}
    x, ids = torch.randn(3, 64), torch.tensor([0, 1, 0])
    both = mixture(x, ids)
    share, experts = mixture.gate(x, ids)
    assert experts.tolist() == [[5, 5], [2, 5], [5, 5]] and torch.allclose(share[0], torch.full((2,), 0.75))
    other = ExpertMixture(scope_of(once, "layers.0.ffn."), trunk.ours.config, is_hashed=True)(x, ids)
    assert torch.equal(both[1], other[1]) and not torch.allclose(both[0], other[0], atol=1e-3)


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_that_names_no_expert_is_damage(expert: int) -> None:
    trunk = make_trunk()
    table = trunk.weights["layers.0.ffn.gate.tid2eid"].clone()
    table[40, 1] = expert
    with pytest.raises(DamagedFile, match=r"layers\.0\.ffn\.gate\.tid2eid"):
        Gate(
            scope_of({"g": table} | trunk.weights | {"layers.0.ffn.gate.tid2eid": table}, "layers.0.ffn."),
            trunk.ours.config,
            is_hashed=True,
        )


def half_of(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What one of two ranks holds of a layer: half the heads and groups, half the width of every expert."""
    cut = {}
    for name, tensor in weights.items():
        rows = name.endswith(("wq_b.weight", "wo_a.weight", "attn_sink", "w1.weight", "w3.weight"))
        if rows and "indexer" not in name:
            tensor = tensor.chunk(2)[rank]
        elif name.endswith(("wo_b.weight", "w2.weight")):
            tensor = tensor.chunk(2, dim=1)[rank]
        cut[name] = tensor.contiguous()
    return cut


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_halves_of_two_ranks_sum_to_the_whole(layer: int) -> None:
    trunk = make_trunk(num_attention_heads=8, o_groups=4)
    config, ratio = trunk.ours.config, trunk.ours.config.compress_ratios[layer]
    x, ids = torch.randn(20, 64), random_ids(20)

    def outputs(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scope = scope_of(weights, f"layers.{layer}.")
        cache = StateCache(config, [ratio], max_rows=1, context=64, max_span=32, dtype=torch.float32, device=CPU)
        spans = open_spans((cache.allocate(),), (0, 20), cache)  # type: ignore[arg-type]
        sight = Sight(cache, spans, torch.arange(20), Ropes(config, CPU), config.num_heads)
        attended = LatentAttention(scope.within("attn"), config, ratio)(x, 0, sight)
        return attended, ExpertMixture(scope.within("ffn"), config, is_hashed=layer == 0)(x, ids)

    whole = outputs(trunk.weights)
    halves = [outputs(half_of(trunk.weights, rank)) for rank in (0, 1)]
    for kind in (0, 1):
        assert torch.allclose(halves[0][kind] + halves[1][kind], whole[kind], atol=1e-4)
        assert not torch.allclose(halves[0][kind], whole[kind], atol=1e-1)


def test_every_tensor_of_the_layout_is_used_once() -> None:
    class Counting(TensorTable):
        taken: list[str]

        def take(self, name: str) -> Any:
            self.taken.append(name)
            return super().take(name)

    trunk = make_trunk()
    table = Counting(trunk.weights)
    table.taken = []
    type(trunk.ours)(table, trunk.ours.config, CPU, torch.float32)
    assert sorted(table.taken) == sorted(trunk_layout(trunk.ours.config))


def test_the_published_config() -> None:
    config = parsed(v4_config(FULL_SIZES))
    assert config.compress_ratios.count(0) == 2 and config.compress_ratios.count(128) == 20
    assert [i for i in range(43) if config.is_hashed(i)] == [0, 1, 2]
    assert config.drafter_ratios == (0, 0, 0) and config.eos_token_ids == (1,)
    assert config.dspark is not None and config.dspark.block_size == 5
    assert config.kv_bytes_per_token == 2 * 6880
    preview = parsed(v4_config(FULL_SIZES, drafter="mtp"))
    assert preview.dspark is None and preview.num_mtp_layers == 1 and preview.drafter_ratios == (0,)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"scoring_func": "softmax"}, UsageError, "scoring_func"),
        ({"topk_method": "greedy"}, UsageError, "topk_method"),
        ({"num_key_value_heads": 2}, UsageError, "num_key_value_heads"),
        ({"n_shared_experts": 2}, UsageError, "n_shared_experts"),
        ({"hidden_act": "gelu"}, UsageError, "hidden_act"),
        ({"tie_word_embeddings": True}, UsageError, "tie_word_embeddings"),
        ({"expert_dtype": "int4"}, UsageError, "expert_dtype"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UsageError, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, DamagedFile, "original_max_position_embeddings"),
        ({"rope_scaling": "yarn"}, DamagedFile, "rope_scaling"),
        ({"compress_ratios": [0, 4]}, DamagedFile, "compress_ratios"),
        ({"compress_ratios": [0, 1, 8, 4, 8, 0]}, DamagedFile, "compress_ratios"),
        ({"compress_ratios": None}, DamagedFile, "compress_ratios"),
        ({"compress_ratios": [0, -4, 8, 4, 8, 0]}, DamagedFile, "compress_ratios"),
        ({"compress_ratios": [0, 4, 8, 4, 8, 0, 4]}, DamagedFile, "compress_ratios"),
        ({"compress_rope_theta": 1}, DamagedFile, "compress_rope_theta"),
        ({"rope_theta": 0.5}, DamagedFile, "rope_theta"),
        ({"quantization_config": [1]}, DamagedFile, "quantization_config"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, UsageError, "quant_method 'nvfp4'"),
        ({"quantization_config": {"weight_block_size": [1, 32]}}, UsageError, "weight_block_size"),
        ({"quantization_config": {"scale_fmt": None}}, UsageError, "scale_fmt"),
        ({"num_hash_layers": 7}, DamagedFile, "num_hash_layers"),
        ({"qk_rope_head_dim": 33}, DamagedFile, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 15}, DamagedFile, "qk_rope_head_dim"),
        ({"index_head_dim": 8}, DamagedFile, "index_head_dim"),
        ({"o_groups": 3}, DamagedFile, "o_groups"),
        ({"num_experts_per_tok": 9}, DamagedFile, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, DamagedFile, "num_experts_per_tok"),
        ({"hidden_size": "64"}, DamagedFile, "hidden_size"),
        ({"hc_eps": 0}, DamagedFile, "hc_eps"),
        ({"vocab_size": 10**12}, DamagedFile, "vocab_size"),
        ({"dspark_block_size": 5, "dspark_target_layer_ids": [4, 3]}, DamagedFile, "dspark_target_layer_ids"),
        ({"dspark_block_size": 5, "dspark_target_layer_ids": [4, 6]}, DamagedFile, "dspark_target_layer_ids"),
    ],
)
def test_configs_that_are_refused_name_the_key(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    config = {**v4_config(SIZES, drafter="none"), **changes}
    with pytest.raises(error, match=named):
        parsed(config)


def test_the_block_size_may_be_spelt_as_in_drafters_of_their_own() -> None:
    config = v4_config(FULL_SIZES)
    del config["dspark_block_size"]
    with pytest.raises(DamagedFile, match="dspark_block_size is None, must be a whole number"):
        parsed(config)
    short = parsed(config | {"block_size": 4}).dspark
    assert short is not None and short.block_size == 4


def test_stages_and_ratios_that_do_not_match_are_refused() -> None:
    config = v4_config(FULL_SIZES)
    config["compress_ratios"] = config["compress_ratios"][:-1]
    with pytest.raises(DamagedFile, match="3 stages"):
        parsed(config)


def test_hidden_rows_and_logits_are_float32() -> None:
    trunk = make_trunk(compress_ratios=[0, 4], num_hidden_layers=2)
    cache = trunk.ours.new_cache(1, 32, 16)
    hidden = run(trunk.ours, cache, [(cache.allocate(), random_ids(5))])
    logits = trunk.ours.logits(hidden[:2])
    assert hidden.dtype == logits.dtype == torch.float32
    assert hidden.shape == (5, 64) and logits.shape == (2, 97)
