"""What benchmarks/kernels.py times of chains of a layer of DeepSeek-V4-Flash side by side (kernels/branches.py)
on one of two GPUs: as few launches as there can be, launches taken apart on one stream, and on two.

    python benchmarks/kernels.py --only v4-branches --no-steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_inputs import HALF, Case, Maker
from v4_attention import DENSE, HEADS, LATENT, SPARSE, SubBlock, Weights
from v4_products import EXPERTS, PER_ROW, WIDTH, D, Layer, bytes_of

from sparkchat.kernels.branches import Branch
from sparkchat.kernels.compressor.kernel import launch_norm_low_ranks
from sparkchat.kernels.experts import COUNTERS, ExpertBuffers
from sparkchat.kernels.experts.kernel import launch_down, launch_gate_up
from sparkchat.kernels.experts.plan import whole_plan
from sparkchat.kernels.experts.shared import launch_shared
from sparkchat.kernels.experts.whole import launch_mix_experts
from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.gate import Routing
from sparkchat.kernels.gate.kernel import launch_route
from sparkchat.kernels.gemm import gemm_splits
from sparkchat.kernels.gemm.kernel import launch_small_gemm

LIMIT = 10.0
WAYS = {"one stream": (False, False), "apart on one stream": (True, False), "side by side": (True, True)}
"""Whether launches are taken apart, and whether on two streams."""


class Sides:
    """Branches on a stream beside, where a graph is captured."""

    def __init__(self, make: Maker) -> None:
        self._side = torch.cuda.Stream(make.device) if make.is_real else None

    def branch(self, is_beside: bool) -> Branch:
        is_forked = is_beside and self._side is not None and torch.cuda.is_current_stream_capturing()
        return Branch(self._side if is_forked else None)


class Mixture:
    """The sub-block of experts for some rows, which go elsewhere in every turn."""

    def __init__(self, make: Maker, layer: Layer, rows: int) -> None:
        self.layer, self.rows, self.sides = layer, rows, Sides(make)
        self.x = make.half(rows, D, scale=1.0)
        self.logits = [make.floats(rows, EXPERTS) for _ in range(max(2, 10 // rows))]
        self.scores = torch.empty((gemm_splits(layer.gate), rows, EXPERTS), device=make.device)
        self.routing = Routing.empty(rows, PER_ROW, EXPERTS, make.device)
        self.space = ExpertBuffers.empty(rows, PER_ROW, layer.weights, HALF)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=make.device)
        self.state = torch.zeros(COUNTERS, dtype=torch.int32, device=make.device)

    def run(self, i: int, is_apart: bool, is_beside: bool) -> None:
        shared, space = self.sides.branch(is_beside), self.space
        with shared.aside():
            if is_apart:
                launch_shared(self.x, self.layer.weights, space.inner, space.parts, LIMIT, False)
        launch_small_gemm(self.x, self.layer.gate, self.scores, None, None, "partials")
        # Not of these scores, so that every turn has experts of its own.
        launch_route(self.logits[i], self.routing, 1.5, self.layer.bias, None, None, self.arrived)
        plan, weights = whole_plan(self.rows), self.layer.weights
        if plan is not None:
            launch_mix_experts(
                self.x, weights, self.routing, space.inner, space.parts, self.state, LIMIT, False, plan,
                has_shared=not is_apart,
            )  # fmt: skip
        else:
            launch_gate_up(self.x, weights, self.routing, space.inner, LIMIT, False, has_shared=not is_apart)
            launch_down(space.inner, weights, self.routing, space.parts, False, has_shared=not is_apart)
        shared.join()

    def bytes(self, make: Maker) -> int:
        found = []
        for logits in self.logits if make.is_real else ():
            found.append(Routing.empty(self.rows, PER_ROW, EXPERTS, make.device))
            launch_route(logits, found[-1], 1.5, self.layer.bias, None, None)
        return 2 * EXPERTS * D + (sum(bytes_of(found, make)) if found else 3 * WIDTH * D)


class AttentionBlock:
    """A layer's attention with what is not waited for taken out of its chain."""

    def __init__(self, make: Maker, block: SubBlock, layers: list[Weights]) -> None:
        self.block, self.layers, self.sides = block, layers, Sides(make)
        cut = HEADS * LATENT // 32
        self.queries = [TiledFp8(w.queries.tiles[:cut], w.queries.scales[:cut]) for w in layers]
        self.index = [TiledFp8(w.queries.tiles[cut:], w.queries.scales[cut:]) for w in layers]

    def run(self, i: int, has_state: bool, has_queries: bool, is_beside: bool) -> None:
        b, w = self.block, self.layers[i]
        state, asked = self.sides.branch(is_beside), self.sides.branch(is_beside)
        launch_joint(b.x, w.product, b.parts, b.plain, b.whole, False, w.product.plan)
        low, norm, out = b.written.low_rank, b.written.low_rank_norm, b.written.out
        assert low is not None and norm is not None and out is not None
        if has_state:
            with state.aside():
                b.compress(has_low_ranks=False)
            launch_norm_low_ranks(low, norm, out, b.pool_shape)
        else:
            b.compress()
        if b.ratio == SPARSE and has_queries:
            launch_fp8_linear(b.low, self.index[i], b.queries[:, HEADS * LATENT :], 1, False)
            with asked.aside():
                launch_fp8_linear(b.low, self.queries[i], b.queries[:, : HEADS * LATENT], 1, False)
        else:
            launch_fp8_linear(b.low, w.queries, b.queries, 1, False)
        if b.ratio == SPARSE:
            state.join()
        b.choose()
        state.join()
        asked.join()
        b.attend(w)


def branch_cases(make: Maker) -> Iterator[Case]:
    layer = Layer.make(make)
    for rows in (6, 1):
        mixture = Mixture(make, layer, rows)
        variants = {name: partial(mixture.run, is_apart=a, is_beside=b) for name, (a, b) in WAYS.items()}
        yield Case(f"v4 mixture, {rows} rows", mixture.bytes(make), len(mixture.logits), variants)
    del layer, mixture
    for ratio in (SPARSE, DENSE):
        first = Weights.of(make, ratio)
        size = first.first_bytes + first.last_bytes
        layers = [first, *(Weights.of(make, ratio) for _ in range(make.sets(size) - 1))]
        for rows in (6, 1):
            run = AttentionBlock(make, SubBlock(make, ratio, rows, first.product), layers).run
            taken = {"queries": (False, True), "state": (True, False), "both": (True, True)}
            variants = {"one stream": partial(run, has_state=False, has_queries=False, is_beside=False)}
            for name, (s, q) in taken.items() if ratio == SPARSE else [("state", taken["state"])]:
                for way in ("apart on one stream", "side by side"):
                    beside = WAYS[way][1]
                    variants[f"{name} {way}"] = partial(run, has_state=s, has_queries=q, is_beside=beside)
            yield Case(f"v4 attention /{ratio}, {rows} rows", size, len(layers), variants)


V4_BRANCH_GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {"v4-branches": branch_cases}
