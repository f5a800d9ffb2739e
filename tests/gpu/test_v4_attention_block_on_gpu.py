"""Joined launches of an attention sub-block of DeepSeek-V4-Flash on a GPU, at the shapes of one of two ranks: the bits
of the launches by themselves, again and again.

Needs torch, triton and pytest, and no other package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
CUDA = torch.device("cuda")
NAN = float("nan")
BEGIN = 2170
"""Of the first row: the sixth closes an entry of 128 tokens, and the second one of four."""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def tensors_of(block) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """What is given of a layer beside its rows."""
    pools = [t for p in block.pools for t in (p.bias, p.norm, p.raw)]
    norms = [block.written.latent_norm, block.written.low_rank_norm]
    return [block.cache, block.keys, block.rope, block.sinks, *norms, *pools]


def run(block, weights, first_plan, last_plan, asks: bool = False, cut=None) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """What rows leave, the layer's state as it was before."""
    before = [t.clone() for t in tensors_of(block)]
    for left in (block.parts, block.plain, block.whole, block.low, block.queries, block.heads, block.inner, block.out,
                 *(space.mixed for space in block.spaces.values())):  # fmt: skip
        left.fill_(NAN)
    tiles = (weights.output.inner.tiles, weights.output.output.tiles) if asks else ()
    block.keep(weights, first_plan, asks)
    block.choose(tiles)
    block.attend(weights, last_plan, tiles, cut)
    found = [t.clone() for t in (block.low, block.queries, block.out, block.chosen, *tensors_of(block))]
    assert not any(t.isnan().any() for t in found)
    for tensor, old in zip(tensors_of(block), before, strict=True):
        tensor.copy_(old)
    return found


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("rows", [6, 1, 24])
def test_joined_launches_leave_the_bits_of_launches_by_themselves(ratio: int, rows: int) -> None:
    from kernel_inputs import Maker
    from v4_attention import SubBlock, Weights

    from sparkchat.kernels.compressor.input import InputPlan
    from sparkchat.kernels.compressor.kernel import Tile, tile_of
    from sparkchat.kernels.fp8.plan import Fp8Plan
    from sparkchat.kernels.latent_attention.output import OutputPlan

    make = Maker(CUDA)
    weights = Weights.of(make, ratio)
    block = SubBlock(make, ratio, rows, weights.product, BEGIN)
    # With as many warps as the joined launch has: they decide in what order numbers of a row are added.
    block.pool_tile = Tile(tile_of(block.pool_shape).tokens, 4)
    want = run(block, weights, None, None, cut=Fp8Plan(8, 1, 3))
    ways = [
        (None, None, True),
        (None, OutputPlan(), False),
        (InputPlan(), None, False),
        (InputPlan(), OutputPlan(), True),
    ]
    if rows < 8:
        ways += [(None, OutputPlan(ahead=n), False) for n in (0, 2)]
        ways += [(None, OutputPlan(launches), True) for launches in (((0, 1), (2, 3)), ((0, 0), (1, 3)))]
        ways += [(InputPlan(ahead=n), None, False) for n in (0, 1)]
        ways += [(InputPlan(launches), None, True) for launches in (((0, 0), (1, 2)), ((0, 1), (2, 2)))]
    wrong = []
    for first, last, asks in ways:
        # Counts go on from where the launch before has left them.
        for _ in range(5):
            got = run(block, weights, first, last, asks, Fp8Plan(8, 1, 3))
            same = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
            if not all(same):
                wrong.append((first, last, same))
                break
    assert not wrong, "\n".join(map(str, wrong))
    # Another cut of the last products, which sums in another order.
    apart = run(block, weights, None, None, True, Fp8Plan(4, 1, 4))
    torch.testing.assert_close(apart[2].float(), want[2].float(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_row_does_not_depend_on_how_many_there_are(ratio: int) -> None:
    from kernel_inputs import Maker
    from v4_attention import SubBlock, Weights

    from sparkchat.kernels.compressor.input import InputPlan
    from sparkchat.kernels.latent_attention.output import OutputPlan

    make = Maker(CUDA)
    weights = Weights.of(make, ratio)
    block = SubBlock(make, ratio, 24, weights.product, BEGIN)
    together = run(block, weights, InputPlan(), OutputPlan())
    for count in (1, 6, 8, 9, 17):
        some = SubBlock(make, ratio, count, weights.product, BEGIN)
        some.x.copy_(block.x[:count])
        for to, tensor in zip(tensors_of(some), tensors_of(block), strict=True):
            to.copy_(tensor)
        alone = run(some, weights, InputPlan(), OutputPlan())
        assert [torch.equal(a, b[:count]) for a, b in zip(alone[:4], together[:4], strict=True)] == [True] * 4, count
