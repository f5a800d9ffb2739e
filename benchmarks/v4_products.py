"""What benchmarks/kernels.py times of a layer of DeepSeek-V4-Flash on one of two GPUs: projections, router, experts.

Plans that win are written into sparkchat/kernels/{fp8,experts}/plan.py by hand; those that change the order of sums
(warps, splits) for one weight shape and all numbers of rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from kernel_inputs import HALF, Case, Maker, Run, logits_of, settings_of
from torch import Tensor
from v4_attention import attention_block_cases

from sparkchat.kernels.experts import COUNTERS, ExpertBuffers, TiledBank, TiledExperts
from sparkchat.kernels.experts.kernel import launch_add_parts, launch_down, launch_gate_up
from sparkchat.kernels.experts.plan import WHOLE_TRIED, ExpertPlan, down_plan, gate_up_plan
from sparkchat.kernels.experts.plan import tried as tried_for_experts
from sparkchat.kernels.experts.whole import launch_mix_experts
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.expand_kernel import launch_expand
from sparkchat.kernels.fp8.expanded import linear_expanded, multiply_plain
from sparkchat.kernels.fp8.joint import JointPlan, JointProduct
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.fp8.plan import (
    EXPANSION,
    MOST_EXPANDED,
    TRIED_EXPANSIONS,
    Fp8Plan,
    plan_of,
    tried,
)
from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.gate.plan import PLAN, GatePlan
from sparkchat.kernels.gate.plan import TRIED as GATE_PLANS
from sparkchat.kernels.gemm import gemm_splits
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import Plan
from sparkchat.kernels.launch import overlap
from sparkchat.kernels.markov import MarkovBuffers
from sparkchat.kernels.markov.kernel import BiasPlan, launch_markov_block
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.tiles.packing import STEP

D, WIDTH, EXPERTS, PER_ROW = 4096, 1024, 256, 6
LINEARS = (
    ("wq_a and wkv", 1536, D, True),
    ("wq_b", 16384, 1024, False),
    ("wq_b and index wq_b", 24576, 1024, False),
    ("wo_a", D, D, False),
    ("wo_b", D, D, True),
    ("main_proj", D, 3 * D, True),
    ("draft head", 64640, D, False),
)
"""Outputs, inputs, whether the inputs may be summed in parts. wo_a: all groups of heads in one launch."""
ROWS = (1, 6, 16, 64)
MANY = (24, 96, 192, 384)
"""Rows that products with 8 bits are timed for besides"""
EXPANDED = (96, 192, 384)
"""Of these: where the weight is also expanded, and multiplied by the library"""
GROUPS = {"wo_a": 4}
"""Of heads, that read inputs of their own."""
IN_CACHE = 24 << 20
"""Bytes of a piece of an expanded weight that half of the L2 cache holds."""
FP4_SCALE = 120
"""e8m0: 2^-7, as made-up weights have it."""


def tiles_of(make: Maker, out: int, size: int) -> TiledFp8:
    tiles = torch.zeros(out // 32, size // 128, 2, 2048, dtype=torch.int8, device=make.device)
    if make.is_real:
        tiles.view(torch.float8_e4m3fn).copy_(make.half(*tiles.shape, scale=1.0))
    return TiledFp8(tiles, torch.full((out // 32, size // 128, 2), 2.0**-6, device=make.device))


def linear_cases(make: Maker) -> Iterator[Case]:
    for name, out, size, has_parts in LINEARS:
        count = make.sets(out * size)
        weights = [tiles_of(make, out, size) for _ in range(count)]
        plain = [make.half(out, size) for _ in range(make.sets(2 * out * size))] if make.is_real else []
        for rows in (*ROWS, *MANY):
            plans = tried(out, size, rows, has_parts)
            # One row runs the program of six; some are timed with the plan in use alone.
            some = plans if rows in (6, 24, 96, 384) else plans[:1]
            yield linear_case(make, f"{name} {rows} rows", weights, plain, rows, some, has_parts, GROUPS.get(name, 1))


JOINT = (("input of a sparse layer", 2624, 2560), ("input of a dense layer", 1024, None))
"""Outputs of the plain weight beside wq_a and wkv, and from where on they are added up."""


def joint_cases(make: Maker) -> Iterator[Case]:
    for name, plain, whole_from in JOINT:
        size = 1536 * D + 2 * plain * D
        products = [
            JointProduct(tiles_of(make, 1536, D), make.half(plain, D), whole_from) for _ in range(make.sets(size))
        ]
        for rows in (*ROWS, *EXPANDED):
            yield joint_case(make, f"{name} {rows} rows", products, rows, size)


def joint_case(make: Maker, name: str, products: list[JointProduct], rows: int, size: int) -> Case:
    x, plain = make.half(rows, D, scale=1.0), products[0].plain.shape[0]
    whole = make.floats(rows, plain - products[0].whole_from)

    def runner(plan: JointPlan) -> Run:
        out = torch.empty((plan.codes.splits, rows, 1536), device=make.device)
        to = torch.empty((plan.plain_splits, rows, plain), device=make.device)
        return lambda i: launch_joint(x, products[i], out, to, whole, False, plan)

    used = products[0].plan
    plans = [used]
    if rows == 6:
        plans += [
            JointPlan(Fp8Plan(4, splits, stages), plain_splits, plain_stages)
            for splits, stages in ((used.codes.splits, 2), (used.codes.splits // 2, 2), (used.codes.splits, 1))
            for plain_splits in (2, 4, 8)
            for plain_stages in (2, 3, 4)
        ]
    variants = {
        f"split {p.codes.splits} stages {p.codes.stages}, plain split {p.plain_splits} stages {p.plain_stages}": runner(
            p
        )
        for p in dict.fromkeys(plans)
    }

    def by_library(i: int) -> None:
        product, one = products[i], torch.empty((rows, 1536), device=x.device)
        expanded(make, x, product.codes, one)
        if make.is_real:
            multiply_plain(x, product.plain, torch.empty((rows, plain), device=x.device))

    if rows in EXPANDED:
        variants["expanded"] = by_library

    def apart(i: int) -> None:
        codes, weight = products[i].codes, products[i].plain
        parts = plan_of(*codes.shape).splits
        launch_fp8_linear(x, codes, torch.empty((parts, rows, 1536), device=x.device), 1, False)
        to = torch.empty((gemm_splits(weight), rows, plain), device=x.device)
        launch_small_gemm(x, weight, to, None, None, "partials")

    return Case(name, size, len(products), variants, apart)


def expanded(
    make: Maker,
    x: Tensor,
    weight: TiledFp8,
    out: Tensor,
    groups: int = 1,
    expansion: tuple[int, int] = EXPANSION,
    most: int = MOST_EXPANDED,
) -> None:
    """The product by the library; where kernels are only compiled, what comes before it."""
    if make.is_real:
        linear_expanded(x, weight, out, groups, expansion=expansion, most=most)
    else:
        launch_expand(weight, torch.empty(weight.shape, dtype=x.dtype, device=make.device), expansion)


def expanded_variants(make: Maker, x: Tensor, weights: list[TiledFp8], out: Tensor, groups: int) -> dict[str, Run]:
    """As it is done; at 384 rows also other programs, and pieces that stay in the L2 cache, where a piece is larger."""
    ways: dict[str, dict[str, Any]] = {"expanded": {}}
    if x.shape[0] == EXPANDED[-1]:
        others = [cut for cut in TRIED_EXPANSIONS if cut != EXPANSION]
        ways |= {f"expanded by {steps} steps, warps {warps}": {"expansion": (steps, warps)} for steps, warps in others}
        outs, size = weights[0].shape
        if 2 * outs * size > IN_CACHE:
            ways["expanded in pieces"] = {"most": IN_CACHE}
    return {name: lambda i, way=way: expanded(make, x, weights[i], out, groups, **way) for name, way in ways.items()}


def linear_case(
    make: Maker,
    name: str,
    weights: list[TiledFp8],
    plain: list[Tensor],
    rows: int,
    plans: list[Fp8Plan],
    has_parts: bool,
    groups: int,
) -> Case:
    out, size = weights[0].shape
    x = make.half(rows, groups * size, scale=1.0)

    def runner(plan: Fp8Plan) -> Run:
        shape = (plan.splits, rows, out) if has_parts else (rows, out)
        to = torch.empty(shape, dtype=torch.float32 if has_parts else HALF, device=make.device)
        return lambda i: launch_fp8_linear(x, weights[i], to, groups, False, plan)

    variants = {
        f"warps {p.warps} split {p.splits} stages {p.stages} pairs {p.pairs} rows {p.row_tile(rows)}": runner(p)
        for p in plans
    }
    if rows in EXPANDED:
        to = torch.empty((rows, out), dtype=torch.float32 if has_parts else HALF, device=make.device)
        variants |= expanded_variants(make, x, weights, to, groups)
    # cuBLAS with the same weight in bfloat16, which is what unpacking once would run: twice the bytes.
    some = x[:, :size].contiguous()
    peer = (lambda i: _drop(F.linear(some, plain[i % len(plain)]))) if plain else None
    return Case(name, out * size, len(weights), variants, peer)


@dataclass
class Layer:
    """The experts of one layer, and ways to go through them."""

    weights: TiledExperts
    gate: Tensor
    bias: Tensor

    @classmethod
    def make(cls, make: Maker) -> Layer:
        def bank(out: int, size: int) -> TiledBank:
            # Where kernels are only compiled one expert stands for all: only shapes count.
            count, shape = EXPERTS if make.is_real else 1, (out // 32, size // 128, 2)
            tiles = torch.zeros(count, *shape, 1024, dtype=torch.int8, device=make.device)
            scales = torch.full((count, *shape, 16, 4), FP4_SCALE, dtype=torch.uint8, device=make.device)
            if make.is_real:
                tiles.random_(-128, 128)
            return TiledBank(tiles.expand(EXPERTS, *shape, 1024), scales.expand(EXPERTS, *shape, 16, 4))

        shared = tiles_of(make, 2 * WIDTH, D), tiles_of(make, D, WIDTH)
        weights = TiledExperts(bank(2 * WIDTH, D), bank(D, WIDTH), *shared)
        return cls(weights, make.half(EXPERTS, D), make.floats(EXPERTS, scale=0.1))

    def routings(self, make: Maker, rows: int) -> list[Routing]:
        """As many as read more than the L2 cache holds."""
        found = []
        for _ in range(max(2, 10 // rows) if make.is_real else 1):
            routing, logits = Routing.empty(rows, PER_ROW, EXPERTS, make.device), make.floats(rows, EXPERTS)
            if make.is_real:
                launch_route(logits, routing, 1.5, self.bias, None, None)
            found.append(routing)
        return found


def bytes_of(routings: list[Routing], make: Maker) -> tuple[int, int]:
    """Bytes of gate and up, and of down, that a run must read: the mean over the routings."""
    hit = sum(len(r.chosen.unique()) for r in routings) / len(routings) if make.is_real else 1
    fp4, fp8 = WIDTH * D * 17 // 32, WIDTH * D
    return int(2 * (hit * fp4 + fp8)), int(hit * fp4 + fp8)


def expert_cases(make: Maker) -> Iterator[Case]:
    layer = Layer.make(make)
    # Of 1 and 64 rows the programs are those of 6, which are compiled first.
    for rows in (6, 1, 16, 64, 96, 384):
        routings = layer.routings(make, rows)
        space, x = ExpertBuffers.empty(rows, PER_ROW, layer.weights, HALF), make.half(rows, D, scale=1.0)
        if make.is_real:
            space.inner.normal_()
        first, second = bytes_of(routings, make)
        first_run, second_run = gate_up(layer, x, routings, space), down(layer, routings, space)
        first_plan, second_plan = gate_up_plan(2 * WIDTH, D, rows), down_plan(D, WIDTH, rows)
        for name, size, used, steps, run in (
            ("gate and up", first, first_plan, D // STEP, first_run),
            ("down", second, second_plan, WIDTH // STEP, second_run),
        ):
            plans = tried_for_experts(used, steps, rows) if rows in (1, 6, 64, 384) else [used]
            variants = {named(p): run(p) for p in plans}
            yield Case(f"experts {name} {rows} rows", size, len(routings), variants)
        both = both_launches(first_run(first_plan), second_run(second_plan))
        yield Case(f"experts, both {rows} rows", first + second, len(routings), both)


def whole_cases(make: Maker) -> Iterator[Case]:
    """Gate, up and down in two launches, and in one."""
    layer = Layer.make(make)
    for rows in (6, 1, 3, 5, 8, 12):
        routings = layer.routings(make, rows)
        space, x = ExpertBuffers.empty(rows, PER_ROW, layer.weights, HALF), make.half(rows, D, scale=1.0)
        state = torch.zeros(COUNTERS, dtype=torch.int32, device=make.device)
        first, second = gate_up(layer, x, routings, space), down(layer, routings, space)
        two = both_launches(first(gate_up_plan(2 * WIDTH, D, rows)), second(down_plan(D, WIDTH, rows)))
        variants = {"two launches": two["used"]}
        for name, plan in WHOLE_TRIED.items():
            fixed = (layer.weights, routings, space.inner, space.parts, state, plan)
            variants[f"{name} programs"] = partial(_mix, x=x, fixed=fixed)
        yield Case(f"experts, whole {rows} rows", sum(bytes_of(routings, make)), len(routings), variants)


def _mix(i: int, x: Tensor, fixed: tuple) -> None:
    weights, routings, inner, parts, state, plan = fixed
    launch_mix_experts(x, weights, routings[i], inner, parts, state, 10.0, False, plan)


def both_launches(first: Run, second: Run) -> dict[str, Run]:
    def run(i: int) -> None:
        first(i)
        second(i)

    def overlapped(i: int) -> None:
        with overlap():
            run(i)

    return {"used": run, "overlapped": overlapped}


def named(plan: ExpertPlan) -> str:
    cut = f"split {plan.split} pairs {plan.pairs} warps {plan.warps} stages {plan.stages}, {plan.shared_stages}"
    cut += f", {plan.registers} registers" * (plan.registers > 0)
    return cut if plan.is_late else f"{cut} early"


def gate_up(layer: Layer, x: Tensor, routings: list[Routing], space: ExpertBuffers) -> Callable[[ExpertPlan], Run]:
    def runner(plan: ExpertPlan) -> Run:
        return lambda i: launch_gate_up(x, layer.weights, routings[i], space.inner, 10.0, False, plan)

    return runner


def down(layer: Layer, routings: list[Routing], space: ExpertBuffers) -> Callable[[ExpertPlan], Run]:
    def runner(plan: ExpertPlan) -> Run:
        return lambda i: launch_down(space.inner, layer.weights, routings[i], space.parts, False, plan)

    return runner


def gate_variants(make: Maker, x: Tensor) -> dict[str, Run]:
    """The router's product in more parts than it has, with weights that do not stay in L2."""
    weights = [make.half(EXPERTS, D) for _ in range(make.sets(2 * EXPERTS * D) if make.is_real else 1)]

    def runner(splits: int, stages: int) -> Run:
        plan = Plan(64, 128, splits, D // splits, stages)
        out = torch.empty((splits, x.shape[0], EXPERTS), device=make.device)
        return lambda i: launch_small_gemm(x, weights[i % len(weights)], out, None, None, "partials", plan)

    sizes = ((8, 3), (16, 2), (32, 1)) if x.shape[0] in (1, 6) else ()
    return {f"cold, split {splits} stages {stages}": runner(splits, stages) for splits, stages in sizes}


def route_cases(make: Maker) -> Iterator[Case]:
    layer = Layer.make(make)
    for rows in (*ROWS, 384):
        x = make.half(rows, D, scale=1.0)
        logits = torch.empty((gemm_splits(layer.gate), rows, EXPERTS), device=make.device)
        routing = Routing.empty(rows, PER_ROW, EXPERTS, make.device)
        space, total = ExpertBuffers.empty(rows, PER_ROW, layer.weights, HALF), make.floats(rows, D)

        def scores(i: int, x: Tensor = x, logits: Tensor = logits) -> None:
            launch_small_gemm(x, layer.gate, logits, None, None, "partials")

        arrived = torch.zeros(1, dtype=torch.int32, device=make.device)

        def route(
            i: int, plan: GatePlan = PLAN, logits: Tensor = logits, routing: Routing = routing, arrived=arrived
        ) -> None:
            launch_route(logits, routing, 1.5, layer.bias, None, None, arrived, plan)

        def whole(i: int, x=x, routing=routing, space=space, total=total, scores=scores, route=route) -> None:  # type: ignore[no-untyped-def]
            scores(i)
            route(i)
            launch_gate_up(x, layer.weights, routing, space.inner, 10.0, False)
            launch_down(space.inner, layer.weights, routing, space.parts, False)
            launch_add_parts(space.parts, total)

        def overlapped(i: int, whole: Run = whole) -> None:
            with overlap():
                whole(i)

        if make.is_real:
            scores(0)
            route(0)
        size = sum(bytes_of([routing], make)) + 2 * EXPERTS * D
        gate = 2 * EXPERTS * D
        yield Case(f"gate scores {rows} rows", gate, make.sets(gate), {"used": scores, **gate_variants(make, x)})
        ways = {
            f"warps {p.warps}{', one launch' * p.is_one}, {p.listed} listed": partial(route, plan=p) for p in GATE_PLANS
        }
        yield Case(f"route {rows} rows", logits.nbytes, 1, ways)
        # Always the same experts: of 1 row they stay in the L2 cache, so that this shows what launches cost.
        yield Case(f"a layer's mixture {rows} rows", size, 1, {"used": whole, "overlapped": overlapped})


def draft_cases(make: Maker) -> Iterator[Case]:
    """The sequential head of a block over the whole vocabulary, W2 as it is stored and in 8 bits."""
    vocab, rank, width = 129280, 256, 5
    for requests in (1, 8):
        base, w1, w2 = logits_of(make, requests, width, vocab), make.half(vocab, rank), make.half(vocab, rank)
        codes = torch.empty(vocab, rank, dtype=torch.float8_e4m3fn, device=make.device)
        tables = {"stored": w2, "8 bits": RoundedRows(codes.copy_(w2) if make.is_real else codes, make.floats(vocab))}
        anchors = torch.zeros(requests, dtype=torch.int64, device=make.device)
        settings, buffers = settings_of(make, requests, (1.0, 0, 1.0)), MarkovBuffers.empty(base)

        def run(i: int, w2: Tensor | RoundedRows, plan: BiasPlan, fixed=(base, w1, anchors, settings, buffers)) -> None:  # type: ignore[no-untyped-def]
            base, w1, anchors, settings, buffers = fixed
            launch_markov_block(base, w1, w2, anchors, settings, buffers, None, None, None, plan=plan)

        variants = {
            f"{name}, step {p.step} warps {p.warps} stages {p.stages}": partial(run, w2=table, plan=p)
            for p in (BiasPlan(), *(BIAS_PLANS if requests == 1 else ()))
            for name, table in tables.items()
        }
        yield Case(f"markov block {requests}x{width}", width * vocab * (rank + 8 * requests), 1, variants)


BIAS_PLANS = tuple(BiasPlan(*each) for each in ((128, 4, 2), (128, 4, 3), (64, 4, 4), (64, 2, 3), (32, 4, 4)))


def _drop(value: Tensor) -> None:
    del value


V4_GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "v4-fp8": linear_cases,
    "v4-joint": joint_cases,
    "v4-draft": draft_cases,
    "v4-experts": expert_cases,
    "v4-whole": whole_cases,
    "v4-route": route_cases,
    "v4-block": attention_block_cases,
}
