"""Every kernel of a decode step beside cuBLAS or torch and beside its floor, at the shapes of Qwen3-8B,
and of a rank of two of DeepSeek-V4-Flash (``--only v4-fp8 v4-experts v4-route --no-steps``).

    python benchmarks/kernels.py [--out FILE.json] [--commit ID] [--only NAME ...]

Needs one GPU, torch and triton. The floor is the bytes that must be read over the read bandwidth of the same run.
Kernels are timed inside a CUDA graph that goes round several sets of inputs, larger together than the L2 cache.
Where a kernel has settings, a few are tried (compiled first, in parallel) and the best is shown; settings that win are
written into sparkchat/kernels by hand. The last lines are 36 layers and the head in one graph.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
import triton
from gpu_timing import machine, read_bandwidth, time_graph
from kernel_inputs import (
    DIM,
    HALF,
    HEADS,
    INTER,
    KV,
    PRODUCTS,
    RANK,
    VOCAB,
    Case,
    D,
    Maker,
    Run,
    logits_of,
    settings_of,
)
from kernel_steps import KINDS, Step, time_steps
from torch import Tensor
from v4_products import V4_GROUPS
from v4_rows import V4_ROW_GROUPS

from sparkchat.kernels.accept import AcceptBuffers
from sparkchat.kernels.accept import kernel as accept_kernel
from sparkchat.kernels.accept.kernel import launch_accept_block
from sparkchat.kernels.activation.kernel import launch_silu_mul
from sparkchat.kernels.attention import attention_workspace
from sparkchat.kernels.attention.kernel import HALF_TILE, Tile, launch_decode_attention
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import Plan, plan_of
from sparkchat.kernels.launch import overlap, started_by
from sparkchat.kernels.markov import MarkovBuffers
from sparkchat.kernels.markov import kernel as markov_kernel
from sparkchat.kernels.markov.kernel import launch_markov_block
from sparkchat.kernels.norm.kernel import launch_add_rms_norm
from sparkchat.kernels.planner.kernel import launch_plan_lengths
from sparkchat.kernels.rope.kernel import launch_write_qkv
from sparkchat.models.page_table import PAGE_SIZE

# Small products

TILES = ((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 4), (128, 128, 4, 8))
"""Outputs, inputs of a tile, stages, warps."""


def plans(weight: Tensor, epilogue: str, rows: int) -> Iterator[tuple[str, Plan]]:
    """The plan in use, then others."""
    k = weight.shape[1]
    used = plan_of(weight, epilogue, max(16, rows))
    yield f"used {used.block_out}x{used.block_k} split {used.splits} stages {used.stages} warps {used.warps}", used
    for block_out, block_k, stages, warps in TILES:
        for splits in (2, 4, 8) if epilogue == "partials" else (1,):
            if splits == 2 and (block_out, block_k) != (64, 128):
                continue
            part = triton.cdiv(triton.cdiv(k, block_k), splits) * block_k
            if stages * (block_out + max(16, rows)) * block_k * 2 <= 225_000:
                name = f"{block_out}x{block_k} split {splits} stages {stages} warps {warps}"
                yield name, Plan(block_out, block_k, splits, part, stages, warps)
                if epilogue != "silu_mul" and splits > 2 - (epilogue == "none"):
                    yield f"{name} bulk", Plan(block_out, block_k, splits, part, stages, warps, is_bulk=True)


def product_cases(make: Maker) -> Iterator[Case]:
    for name, n, k, epilogue in PRODUCTS:
        for rows in (1, 8, 64):
            yield product_case(make, name, n, k, epilogue, rows)


WIDE_TILES = (
    (128, 64, 64, 4, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8), (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 4), (256, 128, 64, 3, 8), (64, 256, 64, 4, 8), (128, 128, 128, 3, 8),
)  # fmt: skip
"""Outputs, rows, inputs of a tile, stages, warps: for more rows than a step of one request has."""


def wide_cases(make: Maker) -> Iterator[Case]:
    for name, n, k, epilogue in PRODUCTS:
        for rows in (128, 256):
            yield product_case(make, name, n, k, epilogue, rows)


def wide_plans(weight: Tensor, epilogue: str, rows: int) -> Iterator[tuple[str, Plan]]:
    used = plan_of(weight, epilogue, 64)
    yield "used", used
    for out, most_rows, block_k, stages, warps in WIDE_TILES:
        if most_rows <= rows and stages * (out + most_rows) * block_k * 2 <= 225_000:
            plan = replace(used, block_out=out, block_k=block_k, stages=stages, warps=warps, most_rows=most_rows)
            yield f"{out}x{block_k} rows {most_rows} stages {stages} warps {warps}", plan


def product_case(make: Maker, name: str, n: int, k: int, epilogue: str, rows: int) -> Case:
    count = make.sets(2 * n * k)
    weights = [make.half(n, k) for _ in range(count)]
    x = make.half(rows, k, scale=1.0)
    outs = torch.empty(8, rows, n, device=make.device)
    up = torch.empty(rows, n // 2, dtype=HALF, device=make.device)

    def runner(plan: Plan) -> Run:
        out = up if epilogue == "silu_mul" else outs[: plan.splits] if epilogue == "partials" else outs[0]
        return lambda i: launch_small_gemm(x, weights[i], out, None, None, epilogue, plan)

    # One row runs the same program as sixteen; only larger tiles are searched again.
    chosen = dict((plans if rows <= 64 else wide_plans)(weights[0], epilogue, rows))
    if rows == 1:
        chosen = dict(list(chosen.items())[:1])
    variants = {label: runner(plan) for label, plan in chosen.items()}
    return Case(f"{name} {rows} rows", 2 * n * k, count, variants, lambda i: _drop(F.linear(x, weights[i])))


FP8_TILES = ((64, 3, 4), (64, 4, 4), (64, 5, 4), (64, 6, 4), (128, 3, 4), (128, 4, 4), (128, 5, 4), (128, 4, 8))
"""Outputs, stages, warps: what is on its way to a multiprocessor is outputs x 128 x (stages - 1) for each program."""


def fp8_plans(weight: Tensor, epilogue: str) -> Iterator[tuple[str, Plan]]:
    """The plan in use; it with the card's conversion; others, also with other parts of k, whose sums differ."""
    used, k = plan_of(weight, epilogue), weight.shape[1]
    yield f"used {used.block_out} split {used.splits} stages {used.stages} warps {used.warps}", used
    yield "used, the card's conversion", replace(used, widens=False)
    for block_out, stages, warps in FP8_TILES:
        for splits in (used.splits, 2, 8) if epilogue == "partials" else (1,):
            part = triton.cdiv(triton.cdiv(k, 128), splits) * 128
            name = f"{block_out} split {splits} stages {stages} warps {warps}"
            yield name, Plan(block_out, 128, splits, part, stages, warps)
            if epilogue == "partials" and splits == used.splits:
                yield f"{name} bulk", Plan(block_out, 128, splits, part, stages, warps, is_bulk=True)


def fp8_cases(make: Maker) -> Iterator[Case]:
    for name, n, k, epilogue in PRODUCTS[:4]:
        count = make.sets(n * k)
        weights = [torch.empty(n, k, dtype=torch.float8_e4m3fn, device=make.device) for _ in range(count)]
        for weight in weights if make.is_real else ():
            weight.copy_(make.half(n, k, scale=1.0))
        scales = make.floats(-(-n // 128), -(-k // 128))
        for rows in (1, 8, 64):
            x, outs = make.half(rows, k, scale=1.0), torch.empty(8, rows, n, device=make.device)
            up = torch.empty(rows, n // 2, dtype=HALF, device=make.device)

            def run(i: int, plan: Plan, given=(x, weights, scales, outs, up, epilogue)) -> None:
                x, weights, scales, outs, up, epilogue = given
                out = up if epilogue == "silu_mul" else outs[: plan.splits]
                launch_small_gemm(x, weights[i], out, scales, None, epilogue, plan)

            chosen = dict(fp8_plans(weights[0], epilogue))
            if rows != 8:
                chosen = dict(list(chosen.items())[:1])
            yield Case(f"{name} fp8 {rows} rows", n * k, count, {c: partial(run, plan=p) for c, p in chosen.items()})


# Attention, norm, rope

NEVER = 1 << 30
KEY_TILES = {
    "used": HALF_TILE,
    "stages 2": replace(HALF_TILE, stages=2),
    "8 warps": replace(HALF_TILE, warps=8),
    "264 programs": replace(HALF_TILE, programs=264),
    "a program for spans": replace(HALF_TILE, many_groups=NEVER, some_groups=NEVER),
    "a program for bundles": replace(HALF_TILE, many_groups=NEVER, some_groups=1),
    "one program folds": replace(HALF_TILE, many_groups=1),
}


def attention_cases(make: Maker) -> Iterator[Case]:
    for requests, context, rows in (
        (1, 1024, 1),
        (1, 1024, 8),
        (1, 32768, 1),
        (1, 32768, 8),
        (4, 1024, 8),
        (8, 1024, 1),
        (8, 1024, 8),
        (16, 1024, 8),
        (32, 1024, 1),
        (32, 1024, 8),
    ):
        size = requests * context * 2 * KV * DIM * 2
        count = make.sets(size)
        capacity = context + 256
        total = requests * rows
        caches = [make.half(requests, 2 * KV, capacity, DIM, scale=1.0) for _ in range(count)]
        q, out = make.half(total, HEADS, DIM, scale=1.0), make.half(total, HEADS, DIM)
        space = attention_workspace(total, HEADS, DIM, capacity, make.device)
        starts = make.ints(*range(0, total + 1, rows))
        row = make.ints(*[r for r in range(requests) for _ in range(rows)])
        at = make.ints(*[context + i for _ in range(requests) for i in range(rows)]).long()
        ends = at + 1

        # The same bytes as pages of all requests, wherever they lie.
        shape = (requests * (capacity // PAGE_SIZE), 2 * KV, PAGE_SIZE, DIM)
        anywhere = torch.randperm(shape[0], device=make.device).int().view(requests, -1)
        fixed = (q, starts, row, at, ends, out, space)

        def attend(i: int, tile: Tile, pages=None, rows=rows, caches=caches, shape=shape, fixed=fixed) -> None:
            q, starts, row, at, ends, out, space = fixed
            cache = caches[i] if pages is None else caches[i].view(shape)
            launch_decode_attention(q, cache, starts, row, at, ends, out, space, rows, None, pages, tile)

        variants = {
            label: partial(attend, tile=tile)
            for label, tile in KEY_TILES.items()
            # One program a group at 32k keys takes a millisecond.
            if tile.many_groups > 1 or context < 4096
        }
        variants["pages"] = partial(attend, tile=HALF_TILE, pages=anywhere)
        for label in ("8 warps", "a program for bundles", "stages 2"):
            variants[f"pages, {label}"] = partial(attend, tile=KEY_TILES[label], pages=anywhere)

        def peer(i: int, q=q, caches=caches, requests=requests, rows=rows, context=context) -> None:
            keys, values = caches[i][:, :KV, :context], caches[i][:, KV:, :context]
            queries = q.view(requests, rows, HEADS, DIM).transpose(1, 2)
            _drop(F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True))

        yield Case(f"attention {requests}x{context} keys, {rows} rows", size, count, variants, peer)


def small_cases(make: Maker) -> Iterator[Case]:
    for rows in (1, 8, 64, 256):
        x, parts, out = make.floats(rows, D), make.floats(4, rows, D), make.half(rows, D)
        weight = make.floats(D)
        yield Case(
            f"add + norm {rows} rows", 4 * rows * D * 5, 1,
            {"used": lambda i, x=x, parts=parts, out=out, weight=weight: launch_add_rms_norm(
                x, parts, weight, 1e-6, out, None)},
            lambda i, x=x, weight=weight: _drop(F.rms_norm(x, (D,), weight)),
        )  # fmt: skip
        width = (HEADS + 2 * KV) * DIM
        qkv, q, cache = make.floats(4, rows, width), make.half(rows, HEADS, DIM), make.half(1, 2 * KV, 2048, DIM)
        at, row, rope, norm = make.ints(*range(rows)).long(), make.ints(*[0] * rows), make.floats(2048, DIM), make.floats(HEADS + KV, DIM)  # fmt: skip  # noqa: E501
        yield Case(
            f"qkv write {rows} rows", 4 * rows * width * 4, 1,
            {"used": lambda i, qkv=qkv, q=q, cache=cache, at=at, row=row, rope=rope, norm=norm: launch_write_qkv(
                qkv, at, row, rope, cache, q, norm, 1e-6, None)},
        )  # fmt: skip
    both, mixed = make.half(256, 2 * INTER), make.half(256, INTER)
    yield Case(
        "silu mul 256 rows", 2 * 256 * 3 * INTER, 1, {"used": lambda i: launch_silu_mul(both, mixed)},
        lambda i: _drop(F.silu(both[:, :INTER]) * both[:, INTER:]),
    )  # fmt: skip


# Sampling, acceptance, plan

LAWS = {"greedy": (0.0, 0, 1.0), "T 1": (1.0, 0, 1.0), "T .7 k 20 p .8": (0.7, 20, 0.8), "T 1 p .95": (1.0, 0, 0.95),
        "T .3 p .95": (0.3, 0, 0.95)}  # fmt: skip
"""On the logits below the last keeps a few dozen tokens, as a trained model's law does, the one before 36,000."""


def with_row_warps(run: Run) -> dict[str, Run]:
    """The program that finds a law with as many warps as it has, and with fewer."""

    def run_with(i: int, warps: int) -> None:
        before = markov_kernel.ROW_WARPS
        markov_kernel.ROW_WARPS = accept_kernel.ROW_WARPS = warps
        try:
            run(i)
        finally:
            markov_kernel.ROW_WARPS = accept_kernel.ROW_WARPS = before

    def overlapped(i: int) -> None:
        with overlap():
            run(i)

    return {"used": run, "8 warps a row": partial(run_with, warps=8), "overlapped": overlapped}


def sampling_cases(make: Maker) -> Iterator[Case]:
    width = 7
    w1, w2 = make.half(VOCAB, RANK), make.half(VOCAB, RANK)
    for requests, names in ((1, tuple(LAWS)), (8, ("greedy",)), (32, ("T .7 k 20 p .8",))):
        base = logits_of(make, requests, width, VOCAB)
        anchors = torch.zeros(requests, dtype=torch.int64, device=make.device)
        rows = requests * (width + 1)
        logits = logits_of(make, rows, VOCAB)
        starts, lens = make.ints(*range(0, rows + 1, width + 1)), make.ints(*[width] * requests)
        blocks = [MarkovBuffers.empty(base, has_filters) for has_filters in (False, True)]
        buffers = [AcceptBuffers.empty(logits, requests, width, has_filters) for has_filters in (False, True)]
        for name in names:
            settings = settings_of(make, requests, LAWS[name])
            is_filtered = int(LAWS[name][1:] != (0, 1.0))

            def draft(i: int, kind: int, fixed=(base, anchors, blocks, settings)) -> None:
                base, anchors, blocks, settings = fixed
                launch_markov_block(base, w1, w2, anchors, settings, blocks[kind], None, None, None)

            def accept(i: int, kind: int, fixed=(logits, starts, lens, settings, buffers, blocks)) -> None:
                logits, starts, lens, settings, buffers, blocks = fixed
                block = blocks[kind]
                launch_accept_block(
                    logits, starts, lens, settings, buffers[kind], block.tokens, block.laws, block.index, None, None
                )

            for what, run, size in (
                (f"markov block {requests}x{width}", draft, width * (VOCAB * RANK * 2 + 4 * requests * VOCAB)),
                (f"accept {requests}x{width}", accept, 4 * rows * VOCAB),
            ):
                variants = with_row_warps(partial(run, kind=is_filtered))
                if is_filtered:
                    variants["one multiprocessor a row"] = partial(run, kind=0)
                yield Case(f"{what}, {name}", size, 1, variants)
    for requests in (1, 32, 256):
        confidence, scale = make.floats(requests, width), torch.ones(width, device=make.device)
        limits, out = make.ints(*[width] * requests), make.ints(*[0] * requests)
        cost = torch.linspace(3, 9, 2100, dtype=torch.float64, device=make.device)
        # With a budget as captured steps plan, without one as Algorithm 1 does.
        budget = make.ints(2 * requests)
        yield Case(
            f"plan {requests}x{width}", 0, 1,
            {label: lambda i, confidence=confidence, scale=scale, limits=limits, cost=cost, out=out, budget=budget:
             launch_plan_lengths(confidence, scale, limits, cost, out, 0, 0.0, budget)
             for label, budget in (("by budget", budget), ("early stop", None))},
        )  # fmt: skip


def _drop(_: Tensor) -> None:
    """A result that only had to be computed."""


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    kernel.warmup(*arguments, grid=grid, **options)


GROUPS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "products": product_cases,
    "wide-products": wide_cases,
    "fp8": fp8_cases,
    "attention": attention_cases,
    "small": small_cases,
    "sampling": sampling_cases,
    **V4_GROUPS,
    **V4_ROW_GROUPS,
}


def prepare(share: tuple[int, int, tuple[str, ...]]) -> int:
    """Compile every n-th variant into Triton's cache, with tensors that have no contents."""
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    first, step, names = share
    triton.runtime.driver.set_active(Driver())
    make, number, done = Maker(torch.device("cpu")), 0, 0
    with started_by(compile_only):
        for name in names:
            for case in GROUPS[name](make):
                for run in case.variants.values():
                    if number % step == first:
                        run(0)
                        done += 1
                    number += 1
        for which, prefetch in dict.fromkeys((which, prefetch) for _, which, prefetch, _ in KINDS):
            if number % step == first:
                with overlap(which):
                    for rows in (1, 8):
                        Step(make, rows).run(prefetch)
                        done += 1
            number += 1
    return done


def main() -> None:
    options = parse_options()
    names = tuple(options.only or GROUPS)
    begin = time.perf_counter()
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        compiled = sum(pool.map(prepare, [(i, workers, names) for i in range(workers)], chunksize=1))
    print(f"compiled {compiled} variants in {time.perf_counter() - begin:.0f} s", flush=True)
    bandwidth = read_bandwidth()
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s")
    report: dict[str, Any] = {**machine(options.commit), "read_bytes_per_second": bandwidth, "cases": []}
    print(f"{'':34} {'us':>8} {'TB/s':>6} {'peer us':>8} {'floor':>7}  best settings")
    for name in names:
        for case in GROUPS[name](Maker(torch.device("cuda"))):
            measure(case, bandwidth, report)
            torch.cuda.empty_cache()
            # Again after every case: a run that is cut leaves what it had.
            write(options.out, report)
    if not options.no_steps:
        time_steps(report, bandwidth)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    write(options.out, report)


def write(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


def measure(case: Case, bandwidth: float, report: dict[str, Any]) -> None:
    launches = max(4, min(40, 2 * case.sets))
    for label, run in case.variants.items():
        try:
            case.found[label] = time_graph(run, case.sets, launches)
        except triton.runtime.errors.OutOfResources as error:
            print(f"{case.name}: {label} does not fit ({error})")
    peer = None if case.peer is None else time_graph(case.peer, case.sets, launches)
    if not case.found:
        return
    best = min(case.found, key=case.found.__getitem__)
    us = case.found[best]
    rate = case.bytes / us / 1e6
    floor = case.bytes / bandwidth * 1e6
    used = next(iter(case.found.values()))
    print(
        f"{case.name:34} {us:8.1f} {rate:6.2f} {'' if peer is None else format(peer, '.1f'):>8} {floor:7.1f}  {best}"
        + (f"   (first: {used:.1f})" if used > 1.01 * us else ""),
        flush=True,
    )
    report["cases"].append({"name": case.name, "bytes": case.bytes, "us": case.found, "peer_us": peer, "best": best})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what is measured, where the folder is no git checkout")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS))
    parser.add_argument("--no-steps", action="store_true", help="leave out the 36 layers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
