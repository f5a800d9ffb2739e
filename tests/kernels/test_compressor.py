"""Compressed entries against their reference, at every alignment, as they grow, and after rows are taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.latent_rows import FIRST_SLOT, NAN, rope_of, rows_of
from sparkchat.kernels.compressor import Pool, PoolShape
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.compressor.reference import compress_rows_reference, rounded_e2m1
from sparkchat.kernels.latent_attention import LatentRows, LatentShape
from sparkchat.kernels.latent_attention.kernel import launch_write_latents
from sparkchat.models.deepseek_v4.rounding import LATENT_BLOCK, hadamard, round_e2m1

ROPE, CONTEXT, ROWS = 16, 160, 3
SPARSE, HEAVY = PoolShape(4, True, ROPE, 1e-6), PoolShape(12, False, ROPE, 1e-6)
Spans = list[tuple[int, int, int]]


def tokens_of(shape: PoolShape, width: int, device: torch.device) -> Tensor:
    """[2, ROWS, CONTEXT, h*c] what projections give of every token: values and scores."""
    return torch.randn(2, ROWS, CONTEXT, width * (1 + shape.overlaps), device=device) * 2


def pool_of(tokens: Tensor, shape: PoolShape, width: int, *, is_index: bool = False, rounds: bool = False) -> Pool:
    device, halves = tokens.device, 1 + shape.overlaps
    ring = halves * shape.ratio + 15
    first = 0 if is_index else FIRST_SLOT
    turn = torch.Generator(device).manual_seed(width)
    return Pool(
        tokens[0, 0],
        tokens[1, 0],
        torch.randn(shape.ratio, halves * width, device=device, generator=turn),
        torch.rand(width, device=device, generator=turn) + 0.5,
        torch.full((ROWS, ring, 2 * halves * width), NAN, device=device),
        torch.full((ROWS, first + CONTEXT // shape.ratio, width), NAN, device=device),
        first,
        is_index,
        hadamard(width, device) if is_index and rounds else None,
        rounds,
    )


def with_rows(pool: Pool, tokens: Tensor, spans: Spans, parts: int = 1) -> Pool:
    """The same pool with the products of these rows, and two rows of nobody behind them."""
    here = torch.cat([tokens[:, row, start : start + count] for row, start, count in spans], dim=1)
    here = torch.cat([here, torch.full_like(here[:, :2], NAN)], dim=1)
    if parts > 1:
        pieces = torch.randn(2, parts, *here.shape[1:], device=here.device)
        pieces[:, -1] = here - pieces[:, :-1].sum(1)
        here = pieces
    return replace(pool, kv=here[0], scores=here[1])


def run(
    pools: list[Pool], spans: Spans, shape: PoolShape, rope: Tensor, written: LatentRows | None = None
) -> tuple[Tensor, Tensor]:
    """Positions and cache rows of the launch."""
    rows = rows_of(spans, 1, rope.device)

    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, t[-1:], t[-1:]])

    launch_compress_rows(
        pools, longer(rows.positions), longer(rows.rows), rows.starts, longer(rows.span_starts), rope, shape, written
    )  # fmt: skip
    return longer(rows.positions), longer(rows.rows)


def both(
    spans_in_order: list[Spans], shape: PoolShape, device: torch.device, parts: int = 1, **kind: bool
) -> list[Pool]:
    """The pools that the kernel and the reference leave behind the same passes."""
    width, rope = 32, rope_of(CONTEXT, ROPE, device)
    tokens = tokens_of(shape, width, device)
    got, want = (pool_of(tokens, shape, width, **kind) for _ in range(2))
    for spans in spans_in_order:
        run([with_rows(got, tokens, spans, parts)], spans, shape, rope)
        rows = rows_of(spans, 1, device)
        compress_rows_reference(with_rows(want, tokens, spans), rows.positions, rows.rows, rows.starts, rope, shape)
    return [got, want]


def assert_agree(pools: list[Pool], atol: float = 2e-5) -> None:
    got, want = pools
    for name in ("raw", "entries"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=atol, rtol=atol, equal_nan=True)
    assert not want.entries.isnan().all()


@pytest.mark.parametrize("shape", [SPARSE, HEAVY], ids=["sparse", "heavy"])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_spans_from_the_first_token_on(width: int, shape: PoolShape, device: torch.device) -> None:
    """Every entry closes at every place in a span, its tokens in the ring, in the pass, or in both."""
    last = 13
    passes = [[(1, at, width), (2, at + 3, min(width + 1, 8))] for at in range(0, last, width)]
    assert_agree(both([[(2, 0, 3)], *passes], shape, device))


def test_rows_that_are_taken_back(device: torch.device) -> None:
    """Eight rows a pass of which one to eight stay, as a verified block leaves them."""
    torch.manual_seed(3)
    at, passes = 0, []
    while at < 30:
        passes.append([(0, at, 8)])
        at += int(torch.randint(1, 9, ()))
    # Other tokens than those that stay were there when entries were first made.
    width, rope = 32, rope_of(CONTEXT, ROPE, device)
    tokens = tokens_of(SPARSE, width, device)
    pool, wanted = pool_of(tokens, SPARSE, width), pool_of(tokens, SPARSE, width)
    for number, (spans, following) in enumerate(zip(passes, [*passes[1:], [(0, at, 0)]], strict=True)):
        keep = following[0][1] - spans[0][1]
        drafted = tokens.clone()
        drafted[:, 0, spans[0][1] + keep :] = torch.randn_like(drafted[:, 0, spans[0][1] + keep :]) + number
        run([with_rows(pool, drafted, spans)], spans, SPARSE, rope)
    whole = [(0, 0, at)]
    rows = rows_of(whole, 1, device)
    large = replace(with_rows(wanted, tokens, whole), raw=torch.zeros(ROWS, CONTEXT, 4 * width, device=device))
    compress_rows_reference(large, rows.positions, rows.rows, rows.starts, rope, SPARSE)
    # A last pass writes what the drafts before it left.
    final = [(0, at - at % 4, 8)]
    run([with_rows(pool, tokens, final)], final, SPARSE, rope)
    got, want = (p.entries[0, FIRST_SLOT : FIRST_SLOT + at // 4] for p in (pool, large))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", [{}, {"is_index": True}], ids=["latents", "index keys"])
def test_roundings(kind: dict[str, bool], device: torch.device) -> None:
    got, want = both([[(0, 0, 8)], [(0, 8, 8)]], SPARSE, device, rounds=True, **kind)
    # A value that is rounded the other way is a step off.
    off = (got.entries - want.entries).abs() > 1e-3
    assert off.float().mean() < 0.02 and int((~want.entries.isnan()).sum()) == 4 * 32


def test_partial_sums(device: torch.device) -> None:
    assert_agree(both([[(0, 0, 6)], [(0, 6, 8), (1, 0, 5)]], SPARSE, device, parts=3))


def test_two_pools_in_one_launch(device: torch.device) -> None:
    """As a layer with an indexer has them."""
    rope, spans = rope_of(CONTEXT, ROPE, device), [(0, 0, 7), (2, 0, 4)]
    wide, narrow = tokens_of(SPARSE, 64, device), tokens_of(SPARSE, 16, device)
    together = [pool_of(wide, SPARSE, 64), pool_of(narrow, SPARSE, 16, is_index=True)]
    apart = [replace(p, raw=p.raw.clone(), entries=p.entries.clone()) for p in together]
    run([with_rows(p, t, spans) for p, t in zip(together, (wide, narrow), strict=True)], spans, SPARSE, rope)
    for pool, tokens, made in zip(apart, (wide, narrow), together, strict=True):
        run([with_rows(pool, tokens, spans)], spans, SPARSE, rope)
        assert torch.equal(pool.entries.nan_to_num(), made.entries.nan_to_num())
        assert torch.equal(pool.raw.nan_to_num(), made.raw.nan_to_num())


@pytest.mark.parametrize("has_second", [False, True])
def test_latents_beside_pools(has_second: bool, device: torch.device) -> None:
    """Latents and low ranks that are written in the same launch are those of a launch of their own, for all rows."""
    rope, spans = rope_of(CONTEXT, ROPE, device), [(0, 0, 7), (2, 0, 4)]
    tokens = [tokens_of(SPARSE, width, device) for width in (64, 16)[: 1 + has_second]]
    pools = [pool_of(t, SPARSE, width, is_index=width == 16) for t, width in zip(tokens, (64, 16), strict=False)]
    apart = [replace(p, raw=p.raw.clone(), entries=p.entries.clone()) for p in pools]
    shape = LatentShape(FIRST_SLOT, 32, 4, ROPE, 1e-6)
    count, low = 13, 24
    product, norms = torch.randn(2, count, low + 64, device=device), torch.rand(low + 64, device=device)
    made = []
    for _ in range(2):
        cache, out = torch.zeros(ROWS, FIRST_SLOT + 32, 64, device=device), torch.zeros(count, low, device=device)
        made.append(
            LatentRows(product[..., low:], norms[low:], cache, shape, product[..., :low], norms[:low], out)
        )  # fmt: skip
    run([with_rows(p, t, spans) for p, t in zip(pools, tokens, strict=True)], spans, SPARSE, rope, made[0])
    rows = run([with_rows(p, t, spans) for p, t in zip(apart, tokens, strict=True)], spans, SPARSE, rope)
    one, two = made
    launch_write_latents(
        two.latents, two.latent_norm, *rows, rope, two.cache, shape, two.low_rank, two.low_rank_norm, two.out
    )  # fmt: skip
    assert torch.equal(one.cache, two.cache) and torch.equal(one.out, two.out)
    assert one.cache.count_nonzero() and one.out[-1].count_nonzero()
    for pool, alone in zip(pools, apart, strict=True):
        assert torch.equal(pool.entries.nan_to_num(), alone.entries.nan_to_num())
        assert torch.equal(pool.raw.nan_to_num(), alone.raw.nan_to_num())


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    """Nor on whether the tokens of its entry came before or with it."""
    got, _ = both([[(0, 0, 8), (1, 0, 3)]], SPARSE, device)
    torch.manual_seed(0)
    alone, _ = both([[(0, at, 1)] for at in range(8)], SPARSE, device)
    assert torch.equal(got.entries[0].nan_to_num(), alone.entries[0].nan_to_num())


def test_the_reference_rounds_as_the_model_does(device: torch.device) -> None:
    x = torch.cat([torch.randn(40, 64, device=device), torch.tensor([0.25, 0.75, 2.5, 5.0, -3.5, 6.0, 0.0, 1.75]).repeat(8)[None]])  # fmt: skip  # noqa: E501
    assert torch.equal(rounded_e2m1(x, 32), round_e2m1(x, 32))
    assert LATENT_BLOCK == 64


def test_shapes_without_a_kernel_are_refused(device: torch.device) -> None:
    tokens = torch.randn(2, ROWS, CONTEXT, 48, device=device)
    with pytest.raises(ValueError, match="48 dimensions"):
        run([pool_of(tokens, HEAVY, 48)], [(0, 0, 1)], HEAVY, rope_of(8, ROPE, device))
