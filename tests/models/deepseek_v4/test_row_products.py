"""Weights that are multiplied together give what each gives by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.plan import EXPANDED_ROWS as MANY
from sparkchat.models.deepseek_v4.packed import TiledLinear
from sparkchat.models.deepseek_v4.pooling import PoolProducts
from sparkchat.models.deepseek_v4.row_products import ContextLatents, RowProducts
from sparkchat.models.deepseek_v4.scope import RoundedLinear
from sparkchat.models.deepseek_v4.tile_products import TileProducts, in_parts, into_room
from sparkchat.models.linear import PlainLinear

SIZE, RANK, LATENT = 256, 128, 64


def weight_of(out: int, size: int) -> TiledFp8:
    codes = torch.randn(out, size).to(torch.float8_e4m3fn)
    return TiledFp8.of(codes, torch.rand(-(-out // 128), size // 128) + 0.5)


def tiles_of(is_rounded: bool) -> TileProducts:
    joint, inner = weight_of(RANK + LATENT, SIZE), weight_of(64, 128)
    return TileProducts(joint, RANK, inner, 2, is_rounded, torch.bfloat16)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=0.02, rtol=0.02)


def test_latents_of_all_stages_are_those_of_each() -> None:
    stages, x = [tiles_of(False) for _ in range(3)], torch.randn(5, SIZE).to(torch.bfloat16)
    together = ContextLatents.of(stages)
    assert together is not None and ContextLatents.of([*stages, None]) is None
    for parts, stage in zip(together(x), stages, strict=True):
        close(parts.sum(dim=0), x.float() @ stage.joint.dense()[RANK:].T)


def products(is_rounded: bool, queries: Any, monkeypatch: Any) -> tuple[RowProducts, TileProducts, list[PlainLinear]]:
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    plain = [PlainLinear(torch.randn(n, SIZE).to(torch.bfloat16), None) for n in (32, 32, 32, 32, 8)]
    for linear in plain:
        linear.dtype = torch.float32
    compressor = SimpleNamespace(projections=plain[:2])
    indexer = SimpleNamespace(compressor=SimpleNamespace(projections=plain[2:4]), projections=(queries[1], plain[4]))
    tiles = tiles_of(is_rounded)
    made = RowProducts(tiles, (plain[0], plain[1]), queries[0], compressor, indexer)  # type: ignore[arg-type]
    monkeypatch.undo()
    return made, tiles, plain


def test_what_reads_the_input_and_the_low_ranks(monkeypatch: Any) -> None:
    for is_rounded in (False, True):
        inner = [TiledLinear(weight_of(out, RANK), torch.bfloat16) for out in (96, 32)]
        queries = [RoundedLinear(linear) for linear in inner] if is_rounded else inner
        made, tiles, plain = products(is_rounded, queries, monkeypatch)
        x, low = torch.randn(3, SIZE).to(torch.bfloat16), torch.randn(3, RANK).to(torch.bfloat16)
        wanted = [x.float() @ linear.weight.float().T for linear in plain]
        want_queries = [linear(low) for linear in queries]
        ranks, latents, pooled = made.of_input(x)
        assert pooled is not None and pooled.index is not None and pooled.weights is not None
        both = torch.empty(tiles.joint.splits(3), 3, RANK + LATENT)
        both[..., :RANK], both[..., RANK:] = tiles.project(x)
        close(torch.cat([ranks, latents], dim=-1), both)
        found = [each.sum(dim=0) for each in (*pooled.main, *pooled.index)]
        for got, want in zip([*found, pooled.weights], wanted, strict=True):
            close(got, want)
        for got, want in zip(made.of_low_ranks(low, True), want_queries, strict=True):
            assert got is not None
            close(got, want)
        alone, none = made.of_low_ranks(low, False)
        assert none is None and torch.equal(alone, queries[0](low))
        # What the linears multiply by lies in the common piece.
        assert made._both is not None and made._both.tiles.data_ptr() == inner[0].weight.tiles.data_ptr()


class RoomGroup:
    """What ``into_room`` asks of a group."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    def room(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    def meeting(self, room: Tensor, programs: int) -> None:
        self.programs.append(programs)


def test_of_many_rows_sums_are_one_part_and_no_launch_of_ours_meets_other_ranks() -> None:
    linear, group = TiledLinear(weight_of(64, 1024), torch.bfloat16), RoomGroup()
    parts = linear.weight.splits(1)
    assert parts > 1
    for output, shapes in (
        (linear, [(parts, MANY - 1, 64), (MANY, 64)]),
        (RoundedLinear(linear), [(parts, MANY - 1, 64), (parts, MANY, 64)]),
    ):
        for rows, shape in zip((MANY - 1, MANY), shapes, strict=True):
            x = torch.randn(rows, 1024).to(torch.bfloat16)
            got, want = in_parts(output, x), output(x)
            assert tuple(got.shape) == shape and got.dtype == torch.float32
            close(got.sum(0) if got.dim() == 3 else got, want)
            group.programs.clear()
            close(into_room(output, x, group), want)  # type: ignore[arg-type]
            assert bool(group.programs) == (got.dim() == 3)


def test_the_weights_of_index_heads_are_the_last() -> None:
    pool = PoolProducts([PlainLinear(torch.zeros(n, 4), None) for n in (3, 3, 2, 2, 5)], torch.zeros(15, 4))
    assert pool.whole_from == 10
    cut = pool.cut(torch.arange(30.0).view(2, 1, 15), torch.full((1, 5), 7.0))
    assert cut.index is not None and cut.weights is not None and cut.weights.shape == (1, 5)
    assert cut.main[1][1, 0].tolist() == [18.0, 19.0, 20.0] and cut.index[1][0, 0].tolist() == [8.0, 9.0]
