"""Projections, router and experts of DeepSeek-V4-Flash on a GPU at the shapes of one of two ranks, against references.

``tests/kernels`` runs on a GPU as well, where there is one. Needs torch, triton and pytest, and no other package.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CUDA = torch.device("cuda")
HALF = torch.bfloat16
D, WIDTH, EXPERTS, PER_ROW, LIMIT = 4096, 1024, 256, 6, 10.0
BELOW = 127
"""The most rows that are multiplied by codes: sparkchat.kernels.fp8.plan.EXPANDED_ROWS are not"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def error(got: Tensor, want: Tensor) -> float:
    """Relative size of the difference."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA).to(HALF)


def fp8_of(out: int, size: int):  # type: ignore[no-untyped-def]
    """By powers of two, as weights are published."""
    from sparkchat.kernels.fp8 import TiledFp8

    scales = torch.exp2(torch.randint(-9, -5, (-(-out // 128), size // 128), device=CUDA).float())
    return TiledFp8.of(normal(out, size).to(torch.float8_e4m3fn), scales)


def two_fp8_of(out: int, size: int):  # type: ignore[no-untyped-def]
    from sparkchat.kernels.fp8 import TiledFp8

    scales = torch.rand(out // 128, size // 128, device=CUDA) * size**-0.5 + 1e-3
    return TiledFp8.of_two(*((normal(out, size).to(torch.float8_e4m3fn), scales) for _ in range(2)))


@pytest.mark.parametrize(("out", "size"), [(1536, D), (16384, 1024), (D, D), (D, 3 * D)])
@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_projections(out: int, size: int, has_parts: bool, is_rounded: bool) -> None:
    from sparkchat.kernels.fp8 import fp8_linear
    from sparkchat.kernels.fp8.reference import fp8_linear_reference

    weight = fp8_of(out, size)

    def product(x: Tensor) -> Tensor:
        parts = (weight.splits(x.shape[0], is_rounded),) if has_parts else ()
        to = torch.full((*parts, x.shape[0], out), float("nan"), device=CUDA)
        fp8_linear(x, weight, to, is_rounded=is_rounded)
        return to

    x, want = normal(384, size), torch.empty(384, out, device=CUDA)
    fp8_linear_reference(x, weight, want, 1, is_rounded)
    # Of most of these rows the library multiplies by the expanded weight, unless inputs are rounded.
    for count in (BELOW, BELOW + 1, 384):
        some = product(x[:count].clone())
        assert error(some.sum(0) if has_parts else some, want[:count]) < 1e-4, count
    together = product(x if is_rounded else x[:BELOW].clone())
    # A row's bits do not depend on the rows beside it, whatever tile it lies in.
    for count in (1, 6, 8, 9, 16, 17, 64, 96, *([200] if is_rounded else [])):
        assert torch.equal(product(x[:count].clone()), together[..., :count, :]), count


@pytest.mark.parametrize(("plain", "whole_from"), [(2624, 2560), (1024, None)])
def test_one_launch_for_what_reads_the_input(plain: int, whole_from: int | None) -> None:
    from sparkchat.kernels.fp8.joint import JointProduct, joint_reference
    from sparkchat.kernels.launch import overlap

    product = JointProduct(fp8_of(1536, D), normal(plain, D) * D**-0.5, whole_from)
    x = normal(384, D)
    together = product(x[:BELOW].clone())
    want = [torch.empty_like(each) for each in together]
    joint_reference(x[:BELOW], product, *want, False)
    assert error(together[0], want[0]) < 1e-4 and not product.arrived.any()
    assert error(together[1][..., : product.whole_from], want[1][..., : product.whole_from]) < 1e-4
    assert whole_from is None or error(together[2], want[2]) < 1e-4
    for count in (BELOW + 1, 384):
        with overlap():
            codes, parts, whole = product(x[:count].clone())
        plain = x[:count].float() @ product.plain.float().T
        assert error(codes[0], x[:count].float() @ product.codes.dense().T) < 1e-4 and len(codes) == len(parts) == 1
        assert error(parts[0], plain) < 1e-4
        assert whole_from is None or error(whole, plain[:, whole_from:]) < 1e-4
    for count in (1, 6, 8, 9, 16, 17, 64, 96):
        with overlap():
            alone = product(x[:count].clone())
        for some, all_of_them in zip(alone[::2], together[::2], strict=True):
            assert torch.equal(some, all_of_them[..., :count, :]), count
        columns = slice(product.whole_from)
        assert torch.equal(alone[1][..., columns], together[1][:, :count, columns]), count


def test_a_drafters_head_and_markov_rows_in_8_bits() -> None:
    from sparkchat.kernels.fp8 import fp8_linear
    from sparkchat.kernels.markov import MarkovBuffers, markov_block
    from sparkchat.kernels.markov.reference import markov_block_reference
    from sparkchat.kernels.markov.rows import RoundedRows
    from sparkchat.kernels.sampling import DrawSettings
    from sparkchat.models.deepseek_v4.vocabulary import rounded_head

    head, x = normal(64640, D) * 0.02, normal(5, D)
    rounded, out = rounded_head(head), torch.empty(5, 64640, device=CUDA)
    assert rounded is not None
    fp8_linear(x, rounded, out)
    assert error(out, x.float() @ rounded.dense().T) < 1e-4 and error(out, x.float() @ head.float().T) < 0.04
    w1, w2 = normal(1000, 256), RoundedRows.of(normal(1000, 256) * 0.1)
    settings, anchors, found = DrawSettings.empty(2, CUDA), torch.tensor([3, 7], device=CUDA), []
    settings.temperature.fill_(0.0)
    base = torch.randn(2, 5, 1000, device=CUDA)
    for run in (markov_block, None):
        drawn = base.clone()
        buffers = MarkovBuffers.empty(drawn)
        if run is None:
            markov_block_reference(drawn, w1, w2, anchors, settings, buffers, None, None, None)
        else:
            run(drawn, w1, w2, anchors, settings, buffers)
        found.append((drawn, buffers.tokens.clone()))
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-3, rtol=1e-3)


def test_projections_by_groups() -> None:
    from sparkchat.kernels.fp8 import fp8_linear
    from sparkchat.kernels.fp8.reference import fp8_linear_reference

    weight, x, want = fp8_of(D, D), normal(384, 4 * D), torch.empty(384, D, device=CUDA)
    fp8_linear_reference(x, weight, want, 4, False)
    for count in (384, BELOW + 1, BELOW):
        for dtype, most in ((torch.float32, 1e-4), (HALF, 4e-3)):
            got = torch.full((count, D), float("nan"), dtype=dtype, device=CUDA)
            fp8_linear(x[:count].clone(), weight, got, groups=4)
            assert error(got, want[:count]) < most, (count, dtype)
    few = torch.full((6, D), float("nan"), dtype=HALF, device=CUDA)
    fp8_linear(x[:6].clone(), weight, few, groups=4)
    assert torch.equal(few, got[:6])
    # Rows and outputs that lie in a larger piece of memory.
    wide, room = normal(384, 5 * D), torch.full((384, 2 * D), float("nan"), dtype=HALF, device=CUDA)
    wide[:, : 4 * D] = x
    fp8_linear(wide[:, : 4 * D], weight, room[:, D:], groups=4)
    assert error(room[:, D:], want) < 4e-3 and room[:, :D].isnan().all()


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_a_weight_is_expanded_to_the_bit(dtype: torch.dtype) -> None:
    from sparkchat.kernels.fp8 import TiledFp8
    from sparkchat.kernels.fp8.expand_kernel import launch_expand
    from sparkchat.kernels.fp8.plan import TRIED_EXPANSIONS

    raw = torch.arange(256, dtype=torch.uint8, device=CUDA)
    raw = raw[(raw & 0x7F) != 0x7F]
    for out, size in ((1536, D), (24576, 1024), (D, 3 * D)):
        codes = raw[torch.randint(0, len(raw), (out, size), device=CUDA)].view(torch.float8_e4m3fn)
        # Down to codes that are too small by 2^120 in registers, and up to what a published scale never is.
        scales = torch.exp2(torch.randint(-100, 20, (out // 128, size // 128), device=CUDA).float())
        weight = TiledFp8.of(codes, scales)
        for expansion in TRIED_EXPANSIONS:
            plain = torch.full((out, size), float("nan"), dtype=dtype, device=CUDA)
            launch_expand(weight, plain, expansion)
            assert torch.equal(plain.float(), weight.dense()), (out, size, expansion)


def test_a_head_is_expanded_in_pieces() -> None:
    """One that does not go into the room at once, by any scales: its numbers are rounded once."""
    from sparkchat.kernels.fp8 import fp8_linear
    from sparkchat.kernels.fp8.plan import expanded_pieces
    from sparkchat.models.deepseek_v4.vocabulary import rounded_head

    head, x = normal(64640, D) * 0.02, normal(384, D)
    rounded = rounded_head(head)
    assert rounded is not None and len(expanded_pieces(64640, D, 1, 2)) == 4
    plain = rounded.dense().to(HALF).float()
    for dtype, most in ((torch.float32, 1e-4), (HALF, 4e-3)):
        out = torch.full((384, 64640), float("nan"), dtype=dtype, device=CUDA)
        fp8_linear(x, rounded, out)
        assert error(out, x.float() @ plain.T) < most
    assert error(out, x.float() @ rounded.dense().T) < 6e-3


@pytest.mark.parametrize("rows", [128, 384])
def test_a_captured_graph_fills_the_room_again(rows: int) -> None:
    """Two weights in one graph, and other weights in the room between its replays."""
    from sparkchat.kernels.fp8 import fp8_linear
    from sparkchat.kernels.fp8.joint import JointProduct
    from sparkchat.kernels.launch import overlap

    first, second, other = fp8_of(16384, 1024), fp8_of(D, D), fp8_of(D, 3 * D)
    joint = JointProduct(fp8_of(1536, D), normal(1024, D) * D**-0.5)
    low, x, long = normal(rows, 1024), normal(rows, D), normal(rows, 3 * D)
    queries, output = torch.empty(rows, 16384, dtype=HALF, device=CUDA), torch.empty(1, rows, D, device=CUDA)

    def step() -> list[Tensor]:
        made = list(joint(x))
        fp8_linear(low, first, queries)
        fp8_linear(x, second, output)
        return made

    def between() -> None:
        fp8_linear(long, other, torch.empty(1, rows, D, device=CUDA))

    with overlap():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with overlap(), torch.cuda.graph(graph):
        for _ in range(3):
            made = step()
    for _ in range(2):
        between()
        for each in (low, x):
            each.copy_(normal(*each.shape))
        for each in (queries, output, *made):
            each.fill_(float("nan"))
        graph.replay()
        between()
        torch.cuda.synchronize()
        assert error(queries, low.float() @ first.dense().T) < 4e-3
        assert error(output[0], x.float() @ second.dense().T) < 1e-4
        assert error(made[0][0], x.float() @ joint.codes.dense().T) < 1e-4
        assert error(made[1][0], x.float() @ joint.plain.float().T) < 1e-4


@pytest.mark.parametrize("rows", [1, 6, 33, 384])
@pytest.mark.parametrize("is_hashed", [False, True])
def test_router(rows: int, is_hashed: bool) -> None:
    from sparkchat.kernels.gate import Routing, route
    from sparkchat.kernels.gate.reference import route_reference
    from sparkchat.kernels.gemm import gemm_splits, small_gemm

    x, weight = normal(rows, D), normal(EXPERTS, D) * D**-0.5
    weight[7], weight[200] = weight[3], weight[3]  # equal scores
    logits = torch.full((gemm_splits(weight), rows, EXPERTS), float("nan"), device=CUDA)
    small_gemm(x, weight, logits, epilogue="partials")
    assert error(logits.sum(0), x.float() @ weight.float().T) < 1e-5
    table = torch.stack([torch.randperm(EXPERTS, device=CUDA)[:PER_ROW] for _ in range(50)])
    tokens = torch.randint(0, 50, (rows,), device=CUDA)
    choice = {"table": table, "token_ids": tokens} if is_hashed else {"bias": torch.zeros(EXPERTS, device=CUDA)}
    got, want = (Routing.empty(rows, PER_ROW, EXPERTS, device) for device in (CUDA, torch.device("cpu")))
    apart, arrived = Routing.empty(rows, PER_ROW, EXPERTS, CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    route(logits, apart, 1.5, **choice)
    # Again and again: the count of programs starts from where the launch before has left it.
    for _ in range(20):
        for made in (got.chosen, got.counts, got.items, got.lists):
            made.fill_(-1)
        route(logits, got, 1.5, **choice, arrived=arrived)
        assert torch.equal(got.weights, apart.weights) and torch.equal(got.chosen, apart.chosen)
        assert torch.equal(got.counts, apart.counts)
        count = int(got.counts[0])
        assert torch.equal(got.items[:count], apart.items[:count])
        for expert in apart.items[:count].bitwise_and(0xFFFF).tolist():
            size = int(got.counts[1 + expert])
            assert torch.equal(got.lists[expert, :size], apart.lists[expert, :size])
    cpu = {"bias": None, "table": None, "token_ids": None, **{name: t.cpu() for name, t in choice.items()}}
    route_reference(logits.cpu(), cpu["bias"], cpu["table"], cpu["token_ids"], 1.5, want)
    # Scores that differ in the last place may be ordered otherwise by another exponential.
    same = (got.chosen.cpu() == want.chosen).all(dim=1)
    assert same.float().mean() > (0.999 if is_hashed else 0.98)
    torch.testing.assert_close(got.weights.cpu()[same], want.weights[same], atol=1e-5, rtol=1e-5)
    if same.all():
        assert torch.equal(got.counts.cpu(), want.counts)
        count = int(want.counts[0])
        assert torch.equal(got.items.cpu()[:count], want.items[:count])
    # A row is routed alike whatever is beside it.
    alone = Routing.empty(1, PER_ROW, EXPERTS, CUDA)
    route(logits[:, :1].contiguous(), alone, 1.5, **{**choice, **({"token_ids": tokens[:1]} if is_hashed else {})})
    assert torch.equal(alone.chosen, got.chosen[:1]) and torch.equal(alone.weights, got.weights[:1])


@pytest.fixture(scope="module")
def layer():  # type: ignore[no-untyped-def]
    """Experts of 1.7 GB, made once."""
    from sparkchat.kernels.experts import TiledBank, TiledExperts

    def codes_of(out: int, size: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(EXPERTS, out, size // 2, dtype=torch.int8, device=CUDA).random_(-128, 128)
        scales = torch.randint(118, 122, (EXPERTS, out, size // 32), device=CUDA, dtype=torch.uint8)
        return codes, scales

    return TiledExperts(
        TiledBank.of_two(codes_of(WIDTH, D), codes_of(WIDTH, D)), TiledBank.in_place(*codes_of(D, WIDTH)),
        two_fp8_of(WIDTH, D), fp8_of(D, WIDTH),
    )  # fmt: skip


def mixed(x: Tensor, layer, logits: Tensor, is_rounded: bool = False) -> tuple[Tensor, Tensor, object]:  # type: ignore[no-untyped-def]
    """(parts, inner, routing) of the kernels"""
    from sparkchat.kernels.experts import ExpertBuffers, run_experts
    from sparkchat.kernels.gate import Routing, route

    routing = Routing.empty(x.shape[0], PER_ROW, EXPERTS, CUDA)
    route(logits, routing, 1.5, bias=torch.zeros(EXPERTS, device=CUDA))
    space = ExpertBuffers.empty(x.shape[0], PER_ROW, layer, HALF)
    space.parts.fill_(float("nan"))
    run_experts(x, layer, routing, space, limit=LIMIT, is_rounded=is_rounded)
    return space.parts, space.inner, routing


@pytest.mark.parametrize(("rows", "is_rounded"), [(1, False), (6, False), (6, True), (40, False)])
def test_experts(rows: int, is_rounded: bool, layer) -> None:  # type: ignore[no-untyped-def]
    from sparkchat.kernels.experts import add_parts
    from sparkchat.kernels.experts.reference import run_experts_reference

    x, logits = normal(rows, D), torch.randn(rows, EXPERTS, device=CUDA) * 2
    if rows == 40:
        logits[:, 9] += 50  # one expert for all
    parts, inner, routing = mixed(x, layer, logits, is_rounded)
    want_inner, want = torch.empty_like(inner), torch.empty_like(parts)
    run_experts_reference(x, layer, routing, want_inner, want, LIMIT, is_rounded)
    # Where inputs are rounded, one on the edge between two codes may fall to either side.
    assert error(inner, want_inner) < 5e-3
    assert error(parts, want) < (2e-2 if is_rounded else 5e-3)
    total = torch.full((rows, D), float("nan"), device=CUDA)
    add_parts(parts, total)
    assert error(total, want.sum(0)) < (2e-2 if is_rounded else 5e-3)


def test_a_row_of_experts_does_not_depend_on_the_rows_beside_it(layer) -> None:  # type: ignore[no-untyped-def]
    # More than 128 rows go in tiles of sixteen.
    x, logits = normal(140, D), torch.randn(140, EXPERTS, device=CUDA) * 2
    logits[:, 9] += 50
    together = mixed(x, layer, logits)[0]
    for count in (1, 6, 8, 9, 128, 130):
        assert torch.equal(mixed(x[:count].clone(), layer, logits[:count].clone())[0], together[:, :count]), count


def test_how_experts_are_cut_changes_no_bit_where_the_parts_are_the_same(layer) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from sparkchat.kernels.experts.kernel import launch_down, launch_gate_up
    from sparkchat.kernels.experts.plan import down_plan, gate_up_plan

    x, logits = normal(6, D), torch.randn(6, EXPERTS, device=CUDA) * 2
    parts, inner, routing = mixed(x, layer, logits)
    first, second = gate_up_plan(2 * WIDTH, D, 6), down_plan(D, WIDTH, 6)
    for pairs, warps in ((1, 2), (2, 2), (4, 4)):
        again = [torch.full_like(t, float("nan")) for t in (inner, parts)]
        cut = {"pairs": pairs, "warps": max(warps, first.split), "stages": 2 + pairs % 3}
        launch_gate_up(x, layer, routing, again[0], LIMIT, False, replace(first, **cut))
        launch_down(inner, layer, routing, again[1], False, replace(second, **{**cut, "warps": min(warps, pairs)}))
        assert torch.equal(again[0], inner) and torch.equal(again[1], parts)


@pytest.mark.parametrize("name", ["8", "9", "12", "5 of 2 pairs, 4 stages", "6 of 2 pairs, 3 stages"])
def test_experts_in_one_launch(name: str, layer) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from sparkchat.kernels.experts import COUNTERS
    from sparkchat.kernels.experts.kernel import launch_down, launch_gate_up
    from sparkchat.kernels.experts.plan import WHOLE_TRIED, down_plan, gate_up_plan
    from sparkchat.kernels.experts.reference import run_experts_reference
    from sparkchat.kernels.experts.whole import launch_mix_experts

    plan, state = WHOLE_TRIED[name], torch.zeros(COUNTERS, dtype=torch.int32, device=CUDA)
    x, logits = normal(64, D), torch.randn(64, EXPERTS, device=CUDA) * 2
    logits[40:, 9] += 50  # more rows of one expert than a tile has
    together = None
    for rows, is_rounded in ((64, False), (24, False), (6, False), (1, False), *(((6, True),) * (name == "8"))):
        parts, inner, routing = mixed(x[:rows].clone(), layer, logits[:rows].clone(), is_rounded)
        given, want, got = x[:rows].clone(), [torch.full_like(t, float("nan")) for t in (inner, parts)], None
        first, second = (
            replace(used, split=cut.split, pairs=1, warps=cut.split)
            for used, cut in ((gate_up_plan(2 * WIDTH, D, rows), plan.gate_up), (down_plan(D, WIDTH, rows), plan.down))
        )
        launch_gate_up(given, layer, routing, want[0], LIMIT, is_rounded, first)
        launch_down(want[0], layer, routing, want[1], is_rounded, second)
        # Again and again: the counters start from where the launch before has left them.
        for _ in range(20):
            got = [torch.full_like(t, float("nan")) for t in (inner, parts)]
            launch_mix_experts(given, layer, routing, *got, state, LIMIT, is_rounded, plan)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), rows
        assert not state.any() and got is not None
        if rows == 6:
            run_experts_reference(given, layer, routing, inner, parts, LIMIT, is_rounded)
            assert error(got[0], inner) < 5e-3 and error(got[1], parts) < (2e-2 if is_rounded else 5e-3)
        # A row's bits do not depend on the rows beside it.
        together = got[1] if together is None else together
        assert is_rounded or torch.equal(got[1], together[:, :rows])


def test_experts_in_one_launch_in_a_graph_whose_routing_changes(layer) -> None:  # type: ignore[no-untyped-def]
    from sparkchat.kernels.experts import COUNTERS, ExpertBuffers
    from sparkchat.kernels.experts.plan import WHOLE_TRIED
    from sparkchat.kernels.experts.whole import launch_mix_experts
    from sparkchat.kernels.gate import Routing, route
    from sparkchat.kernels.launch import overlap

    state = torch.zeros(COUNTERS, dtype=torch.int32, device=CUDA)
    x, logits, bias = normal(6, D), torch.randn(6, EXPERTS, device=CUDA) * 2, torch.zeros(EXPERTS, device=CUDA)
    routing, space = Routing.empty(6, PER_ROW, EXPERTS, CUDA), ExpertBuffers.empty(6, PER_ROW, layer, HALF)

    def mix() -> None:
        route(logits, routing, 1.5, bias=bias)
        launch_mix_experts(x, layer, routing, space.inner, space.parts, state, LIMIT, False, WHOLE_TRIED["9"])

    with overlap():
        mix()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with overlap(), torch.cuda.graph(graph):
        for _ in range(4):
            mix()
    for _ in range(5):
        x.copy_(normal(6, D))
        logits.normal_(0, 2)
        space.parts.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(space.parts, mixed(x, layer, logits)[0]) and not state.any()


def test_a_mixture_in_a_graph_with_overlap_has_the_same_bits(layer) -> None:  # type: ignore[no-untyped-def]
    from sparkchat.kernels.launch import overlap

    x, logits = normal(6, D), torch.randn(6, EXPERTS, device=CUDA) * 2
    mixed(x, layer, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with overlap(), torch.cuda.graph(graph):
        parts = mixed(x, layer, logits)[0]
    for _ in range(3):
        # Other experts, in the same graph.
        x.copy_(normal(6, D))
        logits.normal_(0, 2)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(parts, mixed(x, layer, logits)[0])


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize("has_roundings", [False, True])
def test_the_models_mixture_takes_the_kernels(is_hashed: bool, has_roundings: bool) -> None:
    from fixtures.deepseek_v4 import full_layout, parsed, random_weights, v4_config
    from sparkchat.models.deepseek_v4.experts import ExpertMixture
    from sparkchat.models.deepseek_v4.formats import quantize
    from sparkchat.models.deepseek_v4.scope import Scope, TensorTable

    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2, "compress_ratios": [0, 0]}
    config = parsed(v4_config(drafter="none", **sizes))
    layout, prefix = full_layout(config), f"layers.{0 if is_hashed else 1}.ffn."
    stored = {
        name: quantize(weight, fp4=layout[name].storage == "fp4")
        if layout[name].storage in ("fp4", "fp8")
        else weight.to(HALF)
        if layout[name].storage == "bf16"
        else weight
        for name, weight in random_weights(config).items()
        if name.startswith(prefix)
    }

    def mixture_on(device: torch.device, dtype: torch.dtype) -> ExpertMixture:
        scope = Scope(TensorTable(stored), device, dtype, has_roundings=has_roundings, is_packed=True, prefix=prefix)
        return ExpertMixture(scope, config, is_hashed=is_hashed)

    x, ids = torch.randn(9, 512).to(HALF), torch.arange(9)
    ours, plain = mixture_on(CUDA, HALF), mixture_on(torch.device("cpu"), torch.float32)
    assert ours._tiles is not None and plain._tiles is None
    assert error(ours(x.to(CUDA), ids.to(CUDA)).cpu(), plain(x.float(), ids)) < (4e-2 if has_roundings else 1e-2)
