"""Weights that kernels read as they are stored: the model with them says what it says without, in every part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.deepseek_v4 import write_tiny_v4
from fixtures.triton_interpreter import interpreter_that_copes  # noqa: F401
from models.deepseek_v4.trunks import CPU, random_ids, run
from sparkchat.models.deepseek_v4 import packed
from sparkchat.models.deepseek_v4.experts import ExpertMixture
from sparkchat.models.deepseek_v4.formats import FP8_BLOCK, dense, quantize
from sparkchat.models.deepseek_v4.loading import load_trunk
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.deepseek_v4.packed import StoredLinear, TiledLinear, WeightBank, keep

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4],
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "hc_sinkhorn_iters": 2,
    "dspark_target_layer_ids": [0, 1, 1],
}


@pytest.fixture
def folder(build_once: Callable[..., Any]) -> Path:
    sizes = {**SIZES, "vocab_size": 97}
    return build_once("v4-tiled", lambda path: write_tiny_v4(path, drafter="none", **sizes))


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("packed", "gate"):
        monkeypatch.setattr(f"sparkchat.models.deepseek_v4.{module}.has_kernels", lambda device, dtype: True)


def load(folder: Path, *, has_roundings: bool = False) -> DeepseekV4:
    return load_trunk(folder, device=CPU, dtype=None, has_roundings=has_roundings, is_packed=True)


def hidden_of(model: DeepseekV4, ids: Tensor) -> Tensor:
    cache = model.new_cache(1, 64, 32)
    row = cache.allocate()
    return torch.cat([run(model, cache, [(row, part)]) for part in ids.split([17, 1, 6])])


@pytest.mark.parametrize("has_roundings", [False, True])
def test_a_model_of_tiles_says_what_one_without_says(
    has_roundings: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    ids = random_ids(24)
    want = hidden_of(load(folder, has_roundings=has_roundings), ids)
    request.getfixturevalue("kernels_everywhere")
    model = load(folder, has_roundings=has_roundings)
    mixtures = [layer._experts for layer in model.stack.layers]
    assert all(mixture._tiles is not None and not mixture.banks for mixture in mixtures)
    assert model.stack.layers[0].attention.kernel == TiledLinear.kernel
    got = hidden_of(model, ids)
    # A rounded input on the edge between two codes may fall to either side.
    off = (got - want).abs().amax(dim=-1) > 1e-3 * want.abs().max()
    assert off.sum() <= (3 if has_roundings else 0)


@pytest.mark.usefixtures("kernels_everywhere")
def test_a_mixture_runs_its_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches themselves stand in for the references that a CPU takes."""
    from sparkchat.kernels.experts import kernel as experts_kernel
    from sparkchat.kernels.gate import kernel as gate_kernel

    mixture = load(folder).stack.layers[1]._experts
    x, ids = torch.randn(1, 128), torch.tensor([5])
    want, called = mixture(x, ids), []

    def run_experts(x: Tensor, tiles: Any, routing: Any, inner: Tensor, parts: Tensor, limit: float, is_rounded: bool):  # type: ignore[no-untyped-def]
        experts_kernel.launch_gate_up(x, tiles, routing, inner, limit, is_rounded)
        experts_kernel.launch_down(inner, tiles, routing, parts, is_rounded)
        called.append("experts")

    def route(logits: Tensor, bias: Any, table: Any, token_ids: Any, scale: float, routing: Any) -> None:
        gate_kernel.launch_route(logits, routing, scale, bias, table, token_ids)
        called.append("route")

    monkeypatch.setattr("sparkchat.kernels.experts.run_experts_reference", run_experts)
    monkeypatch.setattr("sparkchat.kernels.experts.add_parts_reference", experts_kernel.launch_add_parts)
    monkeypatch.setattr("sparkchat.kernels.gate.route_reference", route)
    torch.testing.assert_close(mixture(x, ids), want, atol=1e-4, rtol=1e-4)
    assert called == ["route", "experts"]


@pytest.mark.usefixtures("kernels_everywhere")
def test_rows_cut_into_pieces_keep_their_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = load(folder).stack.layers[0]._experts
    x, ids = torch.randn(5, 128), torch.arange(5)
    whole = [mixture(x[at : at + 2], ids[at : at + 2]) for at in (0, 2, 4)]
    monkeypatch.setattr("sparkchat.models.deepseek_v4.experts.MOST", 2)
    assert torch.equal(mixture(x, ids), torch.cat(whole))


@pytest.mark.usefixtures("kernels_everywhere")
def test_the_gate_routes_as_it_says(folder: Path) -> None:
    model, ids = load(folder), torch.arange(40) % 97
    x = torch.randn(40, 128)
    for layer in model.stack.layers:
        mixture: ExpertMixture = layer._experts
        weights, chosen = mixture.gate(x, ids)
        routing = mixture.gate.route(x, ids)
        assert torch.equal(routing.chosen.long(), chosen)
        torch.testing.assert_close(routing.weights, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels_everywhere")
def test_weights_that_do_not_lie_in_tiles_are_unpacked_for_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize(torch.randn(64, 256), fp4=False)
    kept, x = keep(weight, torch.float32, CPU), torch.randn(3, 256)
    assert isinstance(kept, TiledLinear)
    assert isinstance(keep(weight.part(0, 0, 48), torch.float32, CPU), StoredLinear)
    assert isinstance(keep(weight.part(1, 0, 64), torch.float32, CPU), StoredLinear)
    want = x @ dense(weight).T
    torch.testing.assert_close(kept(x), want)
    monkeypatch.setattr(packed, "MOST_ROWS", 2)
    torch.testing.assert_close(kept(x), want)
    assert weight.block == FP8_BLOCK


def test_a_bank_of_other_codes_has_no_tiles() -> None:
    assert WeightBank.fill(2, lambda index: quantize(torch.randn(32, 128), fp4=True), CPU).has_tiles()
    for other in (
        quantize(torch.randn(32, 128), fp4=False),
        torch.randn(32, 128),
        quantize(torch.randn(16, 128), fp4=True),
        quantize(1e3 * torch.randn(32, 128), fp4=True),
    ):
        assert not WeightBank.fill(2, lambda index, other=other: other, CPU).has_tiles()
