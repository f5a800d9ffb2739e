"""Weights that stay as they are stored: the same bits as unpacked ones, in the memory that the load plan counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import open_runner
from fixtures.deepseek_v4 import TINY_SIZES, full_layout, parsed, v4_config, write_tiny_v4
from models.deepseek_v4.memory_walk import held_bytes
from models.deepseek_v4.trunks import CPU, random_ids, run
from sparkchat.models.deepseek_v4 import loading
from sparkchat.models.deepseek_v4.formats import ScaledWeight, dense, quantize
from sparkchat.models.deepseek_v4.headers import read_headers
from sparkchat.models.deepseek_v4.load_plan import packed_bytes, plan_load
from sparkchat.models.deepseek_v4.loading import load_drafter, load_trunk
from sparkchat.models.deepseek_v4.packed import StoredLinear, WeightBank, keep, unpack

# Projections outweigh norms and stream weights here, as they do in the published model.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 16],
    "moe_intermediate_size": 512,
    "vocab_size": 2048,
    "hc_mult": 2,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_noise_token_id": 2047,
    "dspark_markov_rank": 64,
}

FEW_TAPS: dict[str, Any] = {"dspark_target_layer_ids": [0, 1, 2], "hc_sinkhorn_iters": 2}


@pytest.fixture
def wide(build_once: Callable[..., Any]) -> Path:
    return build_once("v4-packed-wide", lambda folder: write_tiny_v4(folder, **WIDE))


@pytest.fixture
def tiny(build_once: Callable[..., Any]) -> Path:
    return build_once("v4-packed-tiny", lambda folder: write_tiny_v4(folder, hc_sinkhorn_iters=2))


def stored(kind: str, seed: int = 3) -> Any:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(seed))
    if kind in ("fp4", "fp8"):
        return quantize(weight, fp4=kind == "fp4")
    return weight.to(torch.bfloat16) if kind == "bf16" else weight


@pytest.mark.parametrize("kind", ["fp4", "fp8", "bf16", "f32"])
def test_a_kept_weight_gives_the_bits_of_an_unpacked_one(kind: str) -> None:
    x, weight = torch.randn(5, 96), stored(kind)
    kept = keep(weight, torch.float32, CPU)
    assert torch.equal(kept(x), unpack(weight, torch.float32, CPU)(x))
    assert isinstance(kept, StoredLinear) == (kind != "f32")


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
@pytest.mark.parametrize(("axis", "start", "stop"), [(0, 0, 16), (0, 16, 40), (1, 32, 64), (1, 8, 96), (1, 40, 48)])
def test_a_part_of_a_stored_weight_is_that_part_of_its_numbers(kind: str, axis: int, start: int, stop: int) -> None:
    weight = stored(kind)
    part = weight.part(axis, start, stop)
    assert torch.equal(part.dense(), weight.dense().narrow(axis, start, stop - start))


@pytest.mark.parametrize("kind", ["fp4", "fp8", "bf16"])
def test_a_bank_hands_out_views_of_what_went_in(kind: str) -> None:
    weights = [stored(kind, seed) for seed in range(3)]
    bank = WeightBank.fill(3, lambda index: weights[index], CPU)
    for index, weight in enumerate(weights):
        assert torch.equal(dense(bank[index]), dense(weight))
        codes = bank[index].codes if isinstance(bank[index], ScaledWeight) else bank[index]
        assert codes.untyped_storage().data_ptr() == bank.codes.untyped_storage().data_ptr()


@pytest.mark.parametrize("has_roundings", [False, True])
def test_a_packed_trunk_gives_the_bits_of_an_unpacked_one(tiny: Path, has_roundings: bool) -> None:
    hidden, ids = [], random_ids(40)
    for is_packed in (False, True):
        model = load_trunk(tiny, device=CPU, dtype=None, has_roundings=has_roundings, is_packed=is_packed)
        cache = model.new_cache(1, 64, 32)
        row = cache.allocate()
        parts = [run(model, cache, [(row, part)]) for part in ids.split([30, 1, 6, 3])]
        hidden.append(torch.cat([torch.cat(parts), model.logits(torch.cat(parts))], dim=-1))
    assert torch.equal(*hidden)


@pytest.mark.parametrize(("drafter", "mode"), [("dspark", "compact"), ("mtp", "static")])
def test_a_packed_pair_drafts_and_decodes_as_an_unpacked_one(
    drafter: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_v4(tmp_path, drafter=drafter, num_hidden_layers=3, compress_ratios=[0, 4, 16], **FEW_TAPS)
    line = {"prompt_ids": list(range(9, 40)), "max_tokens": 9, "mode": mode, "ignore_eos": True}
    answers = []
    for most in (loading.UNPACKED_BYTES, 0):
        monkeypatch.setattr(loading, "UNPACKED_BYTES", most)
        runner = open_runner(folder, folder, context=80)
        assert runner.engine.info["dtype"] == ("float32" if most else "fp4+fp8")
        outcome = runner.watch([line])[0]
        answers.append((outcome.ids, [step["draft_ids"] for step in outcome.steps]))
    assert answers[0] == answers[1]


def test_memory_held_is_what_the_plan_counts(wide: Path) -> None:
    target = load_trunk(wide, device=CPU, dtype=None, is_packed=True)
    drafter = load_drafter(wide, target, device=CPU, dtype=None)
    plan = plan_load(read_headers(wide), target.config, 1)
    assert plan.rank_bytes == packed_bytes(full_layout(parsed(v4_config({**TINY_SIZES, **WIDE}))))
    assert held_bytes(target, drafter) == pytest.approx(plan.rank_bytes, rel=0.03)


def test_unpacked_weights_take_what_is_said_of_them(wide: Path) -> None:
    target = load_trunk(wide, device=CPU, dtype=None, is_packed=False)
    assert held_bytes(target) == pytest.approx(
        loading.unpacked_bytes(loading.trunk_layout(target.config), torch.float32), rel=0.05
    )
