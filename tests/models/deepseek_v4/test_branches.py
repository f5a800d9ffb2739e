"""Chains of a layer side by side: every launch is behind those whose results it takes, and results stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.deepseek_v4 import write_tiny_v4
from models.deepseek_v4.launch_order import LaunchOrder, fork
from models.deepseek_v4.test_fused import CONTEXT, by_rows, filled
from models.deepseek_v4.trunks import CPU, random_ids
from sparkchat.errors import UsageError
from sparkchat.kernels import branches
from sparkchat.kernels.fp8.joint import JointProduct
from sparkchat.models.deepseek_v4 import attention, experts, fused, gate, packed, row_products, tile_products
from sparkchat.models.deepseek_v4.loading import load_trunk

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "q_lora_rank": 128,
    "num_attention_heads": 16,
    "o_lora_rank": 32,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 2,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 8],
    "hc_sinkhorn_iters": 2,
    "dspark_target_layer_ids": [0, 1, 1],
}
LAUNCHES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (fused, ("connect_streams",)),
    (
        attention,
        ("write_latents", "compress_rows", "norm_low_ranks", "choose_entries", "latent_attention"),
    ),
    (experts, ("run_shared", "run_experts", "add_parts")),
    (gate, ("small_gemm", "route")),
    (row_products, ("fp8_linear",)),
    (tile_products, ("fp8_linear",)),
    (packed, ("fp8_linear",)),
    (packed.StoredLinear, ("__call__",)),
    (JointProduct, ("__call__",)),
)


@pytest.fixture
def folder(build_once: Callable[..., Any]) -> Path:
    return build_once("v4-branches", lambda path: write_tiny_v4(path, drafter="none", **SIZES))


def steps(folder: Path, monkeypatch: pytest.MonkeyPatch, order: LaunchOrder | None = None) -> Tensor:
    """hidden rows of a text, some rows at a time."""
    for module in ("packed", "gate", "tile_products"):
        monkeypatch.setattr(f"sparkchat.models.deepseek_v4.{module}.has_kernels", lambda device, dtype: True)
    model = load_trunk(folder, device=CPU, dtype=None, is_packed=True)
    cache, ids = filled(model, 1), random_ids(22)
    with monkeypatch.context() as watched:
        if order is not None:
            for owner, names in LAUNCHES:
                for name in names:
                    order.watch(watched, owner, name)
        cut = ids.split([6, 1, 6, 6, 3])
        at = [sum(map(len, cut[:n])) for n in range(len(cut))]
        return torch.cat([by_rows(model, cache, [(0, n, part)], taps=())[0] for n, part in zip(at, cut, strict=True)])


def test_no_launch_is_before_what_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SIZES["index_topk"] < CONTEXT // 4
    wanted = steps(folder, monkeypatch)
    for names in (*branches.BRANCHES, "1"):
        order = LaunchOrder()
        with monkeypatch.context() as patch:
            fork(patch, order, names)
            found = steps(folder, monkeypatch, order)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert not order.races(), names
        aside = {launch.name for launch in order.launches if launch.lane == "side"}
        of_names = {"shared": {"run_shared"}, "queries": {"fp8_linear"}, "state": {"compress_rows"}, "features": set()}
        assert aside == (set().union(*of_names.values()) if names == "1" else of_names[names])


def test_what_is_not_joined_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = LaunchOrder()
    with monkeypatch.context() as patch:
        fork(patch, order, "1")
        patch.setattr(branches.Branch, "join", lambda self: None)
        steps(folder, monkeypatch, order)
    found = set(order.races())
    assert {("fp8_linear", "latent_attention"), ("run_shared", "connect_streams")} <= found
    assert ("compress_rows", "choose_entries") in found or ("compress_rows", "latent_attention") in found


def test_nothing_is_forked_where_nothing_is_captured() -> None:
    with branches.branch("shared", torch.zeros(6, 4)) as shared:
        assert not shared.is_beside
        with shared.aside():
            pass
        shared.join()


def test_branches_are_asked_for_by_name() -> None:
    assert branches.wanted(None) == branches.USED and branches.wanted("0") == branches.wanted("") == frozenset()
    assert branches.wanted("1") == branches.BRANCHES.keys()
    assert branches.wanted("state,shared") == {"state", "shared"}
    with pytest.raises(UsageError, match=r"no branch others; give 0, 1 or some of shared, queries"):
        branches.wanted("shared,others")
