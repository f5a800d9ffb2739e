"""Compiles decode attention for an H200, with and without pages: ``PYTHONPATH=.:tests python FILE``.

Prints for each how many copies the loops let be under way while they wait for one, divisions of whole numbers that are
left, and the instructions and calls of the machine code's longest loop.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.ahead import CPU, HALF, Driver
from sparkchat.kernels.attention import attention_workspace
from sparkchat.kernels.attention.kernel import launch_decode_attention
from sparkchat.kernels.launch import started_by


def longest_loop(ptx: str) -> tuple[int, int]:
    """Instructions of the longest loop of sm_90a's machine code, and calls among them."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        tools = triton.knobs.nvidia
        subprocess.run([tools.ptxas.path, "-arch=sm_90a", source, "-o", binary], check=True)
        listing = subprocess.run([tools.nvdisasm.path, "-c", binary], check=True, capture_output=True, text=True).stdout
    labels: dict[str, int] = {}
    code: list[str] = []
    loops = [(0, 0)]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            jump = re.search(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if jump and jump[1] in labels:
                loops.append((labels[jump[1]], len(code)))
    start, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return end - start, sum("CALL" in instruction for instruction in code[start:end])


def compile_one(name: str, requests: int, most: int, *, is_paged: bool) -> None:
    def show(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if kernel.fn.__name__ == "_attend":
            code = kernel.warmup(*arguments, grid=grid, **options).asm
            under_way = max(map(int, re.findall(r"async_wait.*?num = (\d+)", code["ttgir"])))
            divisions = len(re.findall(r"\b(?:div|rem)\.[su]\d", code["ptx"]))
            print(name, under_way, divisions, *longest_loop(code["ptx"]), flush=True)

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
