"""Compiles every kernel for an H200 on a machine without one: ``PYTHONPATH=. python tests/kernels/ahead.py [NAME]``.

``--card=8.9`` compiles for another make. The launches are the real ones, with tensors on the CPU; compiling takes the
place of starting. Prints a line a kernel: what it is, registers spilled, shared memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

from sparkchat.engine.captured.state import Block, Records, Seats, StepInputs
from sparkchat.kernels.accept import AcceptBuffers
from sparkchat.kernels.accept.kernel import launch_accept_block
from sparkchat.kernels.activation.kernel import launch_silu_mul
from sparkchat.kernels.attention import attention_workspace
from sparkchat.kernels.attention.kernel import EXACT_TILE, HALF_TILE, launch_decode_attention
from sparkchat.kernels.cards import H200, Card, assumed, card_of
from sparkchat.kernels.gemm import gemm_splits
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.launch import Overlap, overlap, started_by
from sparkchat.kernels.markov import MarkovBuffers
from sparkchat.kernels.markov.kernel import launch_markov_block
from sparkchat.kernels.norm.kernel import launch_add_rms_norm
from sparkchat.kernels.planner.kernel import launch_plan_lengths
from sparkchat.kernels.rope.kernel import launch_write_context, launch_write_qkv
from sparkchat.kernels.row_places import RowPlaces
from sparkchat.kernels.row_places.kernel import launch_place_rows
from sparkchat.kernels.sampling import DrawSettings
from sparkchat.kernels.seats import PackedRows
from sparkchat.kernels.seats.kernel import launch_enter_block, launch_enter_rows, launch_limit, launch_settle

CPU = torch.device("cpu")
HALF = torch.bfloat16
CARDS = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": H200.shared_bytes, "10.0": 232_448, "12.0": 101_376}
"""Shared memory of a program by compute capability (CUDA C++ programming guide, technical specifications)."""


def card_named(capability: str) -> Card:
    major, minor = capability.split(".")
    return Card((int(major), int(minor)), CARDS[capability])


class Driver:
    """What the compiler asks of a device: which one it is."""

    def get_current_target(self) -> GPUTarget:
        major, minor = card_of(CPU).capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


def resources_of(ptx: str) -> tuple[int, int]:
    """Bytes a thread keeps in memory for want of registers, and registers of a thread."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        arch = Driver().get_current_target().arch
        make = sm_arch_from_capability(arch)
        command = [get_ptxas(arch).path, "-v", f"-arch={make}", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack = max(int(number) for number in re.findall(r"(\d+) bytes stack frame", said))
    return stack, max(int(number) for number in re.findall(r"Used (\d+) registers", said))


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    begin = time.perf_counter()
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    ptx = compiled.asm["ptx"]
    stack, registers = resources_of(ptx)
    print(
        f"{kernel.fn.__name__:20} grid {grid!s:18} shared {compiled.metadata.shared:7} stack {stack}"
        f" registers {registers:3} warps {compiled.metadata.num_warps:2} wgmma {ptx.count('wgmma.mma_async')}"
        f" {time.perf_counter() - begin:.1f} s",
        flush=True,
    )


def norm() -> None:
    x, weight = torch.zeros(8, 4096), torch.ones(4096)
    launch_add_rms_norm(x, torch.zeros(4, 8, 4096), weight, 1e-6, torch.zeros(8, 4096, dtype=HALF), None)
    launch_add_rms_norm(x, None, weight, 1e-6, torch.zeros(8, 4096, dtype=HALF), torch.zeros(8, 4096, dtype=HALF))


def rope() -> None:
    cache, q = torch.zeros(4, 16, 1024, 128, dtype=HALF), torch.zeros(8, 32, 128, dtype=HALF)
    rows, positions = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    table, pages = torch.zeros(1024, 128), torch.zeros(4, 8, dtype=torch.int32)
    launch_write_qkv(torch.zeros(4, 8, 6144), positions, rows, table, cache, q, torch.ones(40, 128), 1e-6, None)
    launch_write_qkv(torch.zeros(8, 6144, dtype=HALF), positions, rows, table, cache, q, None, 0.0, pages)
    rows, positions, q = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int64), q.repeat(32, 1, 1)
    launch_write_qkv(
        torch.zeros(256, 6144, dtype=HALF), positions, rows, table, cache, q, torch.ones(40, 128), 1e-6, None
    )
    launch_silu_mul(torch.zeros(256, 24576, dtype=HALF), torch.zeros(256, 12288, dtype=HALF))
    context, rows, positions = torch.zeros(5, 4, 16, 1024, 128, dtype=HALF), rows[:8], positions[:8]
    launch_write_context(torch.zeros(2, 8, 10240), positions, rows, table, context, torch.ones(5, 8, 128), 1e-6)
    launch_write_context(torch.zeros(2, 8, 10240), positions, rows, table, context, torch.ones(5, 8, 128), 1e-6, pages)


def attention() -> None:
    starts = torch.tensor([0, 8], dtype=torch.int32)
    rows, positions = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    for heads, kv_heads, dim, dtype, most, window in (
        (32, 8, 128, HALF, 8, None),
        (32, 8, 128, HALF, 1, None),
        (32, 16, 256, HALF, 8, None),
        (9, 3, 64, HALF, 8, None),
        (9, 3, 64, torch.float32, 8, 100),
    ):
        cache, q = torch.zeros(2, 2 * kv_heads, 2048, dim, dtype=dtype), torch.zeros(8, heads, dim, dtype=dtype)
        space = attention_workspace(8, heads, dim, 2048, CPU)
        launch_decode_attention(q, cache, starts, rows, positions, positions, q, space, most, window, None)
        with overlap(Overlap.SMALL if card_of(CPU).starts_early else Overlap.NONE):
            given = (q, cache, starts, rows, positions, positions, q, space, most, window, None)
            launch_decode_attention(*given, is_settled=True)
            if window is None:
                paged, table = cache.view(-1, 2 * kv_heads, 64, dim), torch.zeros(2, 32, dtype=torch.int32)
                given = (q, paged, starts, rows, positions, positions, q, space, most, window, table)
                launch_decode_attention(*given, is_settled=True)
        many = torch.zeros(33, dtype=torch.int32)
        launch_decode_attention(
            q, cache, many, rows, positions, positions, q, space, most, window, rows[None],
            replace(EXACT_TILE if dtype == torch.float32 else HALF_TILE, many_groups=1),
        )  # fmt: skip


def gemm() -> None:
    for n, k, epilogue in ((6144, 4096, "partials"), (24576, 4096, "silu_mul"), (4096, 12288, "partials")):
        for rows in (1, 16, 64):
            weight, x = torch.zeros(n, k, dtype=HALF), torch.zeros(rows, k, dtype=HALF)
            shape = (rows, n // 2) if epilogue == "silu_mul" else (gemm_splits(weight, epilogue), rows, n)
            out = torch.zeros(shape, dtype=HALF if epilogue == "silu_mul" else torch.float32)
            launch_small_gemm(x, weight, out, None, None, epilogue)
    weight, x = torch.zeros(960, 576), torch.zeros(8, 576)
    launch_small_gemm(x, weight, torch.zeros(8, 960), None, torch.zeros(960), "add")


def gemm_of_codes() -> None:
    weight = torch.zeros(6144, 4096, dtype=torch.float8_e4m3fn)
    x, scales = torch.zeros(8, 4096, dtype=HALF), torch.ones(48, 32)
    launch_small_gemm(x, weight, torch.zeros(gemm_splits(weight), 8, 6144), scales, None, "partials")


def markov() -> None:
    base = torch.zeros(2, 2, 151936)
    w, anchors = torch.zeros(151936, 256, dtype=HALF), torch.zeros(2, dtype=torch.int64)
    settings, hidden = DrawSettings.empty(2, CPU), torch.zeros(2, 2, 4096)
    judge = (torch.zeros(4352), torch.zeros(1))
    for has_filters in (False, True):
        buffers = MarkovBuffers.empty(base, has_filters)
        launch_markov_block(base, w, w, anchors, settings, buffers, None, hidden, judge)
    mapping = torch.zeros(151936, dtype=torch.int64)
    launch_markov_block(base, None, None, anchors, settings, MarkovBuffers.empty(base), mapping, None, None)


def accept() -> None:
    logits, base = torch.zeros(16, 151936), torch.zeros(2, 7, 151936)
    starts, lens = torch.tensor([0, 8, 16], dtype=torch.int32), torch.tensor([7, 7], dtype=torch.int32)
    settings, buffers, block = DrawSettings.empty(2, CPU), AcceptBuffers.empty(logits, 2, 7), MarkovBuffers.empty(base)
    launch_accept_block(
        logits, starts, lens, settings, buffers, block.tokens, block.laws, block.index, None, lens
    )  # fmt: skip
    mapping = torch.zeros(151936, dtype=torch.int32)
    launch_accept_block(
        logits.to(HALF), starts, lens, settings, buffers, block.tokens, block.laws, block.index, mapping, None
    )  # fmt: skip
    launch_accept_block(logits, starts, lens, settings, buffers, None, None, None, None, None)
    buffers, chance = AcceptBuffers.empty(logits, 2, 7, has_filters=True), torch.zeros(2, 7, dtype=torch.float64)
    launch_accept_block(
        logits, starts, lens, settings, buffers, block.tokens, block.laws, block.index, None, lens, chance
    )  # fmt: skip


def seats() -> None:
    block, logits, base = Block.empty(4, 7, 1, CPU), torch.zeros(16, 151936), torch.zeros(2, 7, 151936)
    buffers, laws = AcceptBuffers.empty(logits, 2, 7), MarkovBuffers.empty(base).laws
    words, seats, table = StepInputs(4, 7, CPU), Seats.empty(4, CPU), torch.zeros(151936, 4096, dtype=HALF)
    records, ids = Records(4, 7, CPU).device_rows, torch.zeros(151936, 1)
    limits, exponents = torch.zeros(2, dtype=torch.int32), torch.zeros(7, dtype=torch.float64)
    for given, planned in ((None, None), (exponents, limits)):
        launch_enter_block(words, seats, table, 151000, PackedRows.empty(2, 14, 4096, CPU), block, 3, given)
        rows = PackedRows.empty(2, 16, 4096, CPU)
        launch_enter_rows(words, seats, table, rows, block, 3, 3, planned)
    launch_enter_block(words, seats, ids, 151000, PackedRows.empty(2, 14, 1, CPU, has_ids=True), block, 3, None)
    launch_enter_rows(words, seats, ids, PackedRows.empty(2, 16, 1, CPU, has_ids=True), block, 3, 3, None)
    launch_limit(words, seats.remaining, limits, limits[:1])
    launch_settle(words, seats, rows, buffers, block, laws, records)
    launch_settle(words, seats, rows, buffers, block, None, records)


def row_places() -> None:
    numbers, starts = torch.zeros(70, dtype=torch.int64), torch.zeros(17, dtype=torch.int32)
    places = RowPlaces(*[numbers] * 6)
    for is_block, repeats_last in ((False, True), (True, False)):
        launch_place_rows(*[numbers] * 4, starts, places, 128, is_block, repeats_last)


def planner() -> None:
    for requests in (1, 32, 256):
        limits, lens = (torch.zeros(requests, dtype=torch.int32) for _ in range(2))
        cost = torch.ones(300, dtype=torch.float64)
        budget = torch.zeros(1, dtype=torch.int32) if requests == 32 else None
        launch_plan_lengths(torch.zeros(requests, 7), torch.ones(7), limits, cost, lens, 0, 0.0, budget)


ALL: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (norm, rope, attention, gemm, gemm_of_codes, markov, accept, seats, row_places, planner)
}


def main(arguments: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    names = [name for name in arguments if not name.startswith("--card=")]
    capability = next((a.removeprefix("--card=") for a in arguments if a.startswith("--card=")), "9.0")
    with assumed(card_named(capability)), started_by(compile_only), overlap(card_of(CPU).starts_early):
        for name in names or ALL:
            ALL[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
