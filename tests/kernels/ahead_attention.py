"""Compiles decode attention for an H200, with and without pages: ``PYTHONPATH=.:tests python FILE``.

Prints for each how many copies the loops let be under way while they wait for one, divisions of whole numbers that are
left, and the instructions and calls of the machine code's longest loop.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import triton

from kernels.ahead import CPU, HALF, Driver
from kernels.listing import listing_of
from sparkchat.kernels.attention import attention_workspace
from sparkchat.kernels.attention.kernel import launch_decode_attention
from sparkchat.kernels.launch import started_by


def compile_one(name: str, requests: int, most: int, *, is_paged: bool) -> None:
    def show(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if kernel.fn.__name__ == "_attend":
            code = kernel.warmup(*arguments, grid=grid, **options).asm
            under_way = max(map(int, re.findall(r"async_wait.*?num = (\d+)", code["ttgir"])))
            divisions = len(re.findall(r"\b(?:div|rem)\.[su]\d", code["ptx"]))
            loop = listing_of(code["ptx"]).longest
            print(name, under_way, divisions, len(loop), loop.calls, flush=True)

    count = requests * most
    rows, positions = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
    starts, q = torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(count, 32, 128, dtype=HALF)
    pages = torch.zeros(requests, 32, dtype=torch.int32) if is_paged else None
    cache = torch.zeros(requests, 16, 64 if is_paged else 2048, 128, dtype=HALF)
    space = attention_workspace(count, 32, 128, 2048, CPU)
    with started_by(show):
        launch_decode_attention(q, cache, starts, rows, positions, positions, q, space, most, None, pages)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    for name, requests, most in (("alone", 1, 8), ("bundles", 8, 8), ("inside", 32, 8)):
        for is_paged in (False, True):
            compile_one(f"{name},{'pages' if is_paged else 'rows'}", requests, most, is_paged=is_paged)
