"""36 layers and the head of Qwen3-8B in one CUDA graph: all launches of a step but its bookkeeping, and parts of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_timing import time_graph
from kernel_inputs import DIM, HEADS, INTER, KV, LAYERS, PRODUCTS, VOCAB, D, Maker
from torch import Tensor

from sparkchat.kernels.attention import attention_workspace
from sparkchat.kernels.attention.kernel import launch_decode_attention
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.gemm.plan import plan_of
from sparkchat.kernels.launch import Overlap, overlap, starts_early
from sparkchat.kernels.norm.kernel import launch_add_rms_norm
from sparkchat.kernels.rope.kernel import launch_write_qkv

PREFETCHES = (0, 256, 512, 1024)
ALL_PARTS = "pnwas"
"""Products, norms, writes of keys and values, attention; small kernels read what is settled before they wait."""
KINDS: list[tuple[str, Overlap, int, str]] = [
    ("no overlap", Overlap.NONE, 0, ALL_PARTS),
    ("small kernels early", Overlap.SMALL, 0, ALL_PARTS),
    ("small kernels early, all reads wait", Overlap.SMALL, 0, "pnwa"),
    *((f"prefetch {n}", Overlap.ALL, n, ALL_PARTS) for n in PREFETCHES),
    *(
        (f"{how}, {without}", which, 0, parts)
        for how, which in (("no overlap", Overlap.NONE), ("small kernels early", Overlap.SMALL))
        for without, parts in (
            ("products only", "p"), ("no products", "nwa"), ("no norms", "pwas"), ("no writes", "pnas"),
            ("no attention", "pnws"),
        )
    ),
]  # fmt: skip
"""What is run: which kernels start early, bytes of each weight row called into L2 before, and which parts."""


class Step:
    """36 layers and the head on static buffers."""

    def __init__(self, make: Maker, rows: int, context: int = 1024) -> None:
        layers = LAYERS if make.is_real else 1
        self.weights = [
            [make.half(n, k) for _, n, k, _ in PRODUCTS[:4]] for _ in range(layers)
        ]  # fmt: skip
        self.head = make.half(VOCAB, D)
        self.parts = [torch.zeros(plan_of(w, "partials").splits, rows, w.shape[0], device=make.device)
                      for w in (self.weights[0][0], self.weights[0][1], self.weights[0][3])]  # fmt: skip
        self.x, self.h, self.norm = make.floats(rows, D), make.half(rows, D), torch.ones(D, device=make.device)
        self.q, self.mixed, self.up = make.half(rows, HEADS, DIM), make.half(rows, HEADS, DIM), make.half(rows, INTER)
        self.caches = [make.half(1, 2 * KV, context + 256, DIM, scale=1.0) for _ in range(layers)]
        self.at = torch.arange(context, context + rows, device=make.device)
        self.ends, self.row, self.starts = self.at + 1, make.ints(*[0] * rows), make.ints(0, rows)
        self.rope, self.qk = make.floats(context + 256, DIM), torch.ones(HEADS + KV, DIM, device=make.device)
        self.space = attention_workspace(rows, HEADS, DIM, context + 256, make.device)
        self.logits = torch.empty(rows, VOCAB, device=make.device)
        self.rows = rows
        self.bytes = 2 * layers * sum(n * k for _, n, k, _ in PRODUCTS[:4]) + 2 * VOCAB * D

    def run(self, prefetch: int, parts: str = ALL_PARTS) -> None:
        """All launches, or those of the ``parts`` named by their letters."""
        is_settled = "p" in parts and "s" in parts

        def product(x: Tensor, weight: Tensor, out: Tensor, epilogue: str) -> None:
            if "p" in parts:
                plan = replace(plan_of(weight, epilogue, max(16, self.rows), starts_early(True)), prefetch=prefetch)
                launch_small_gemm(x, weight, out, None, None, epilogue, plan)

        def norm(delta: Tensor) -> None:
            if "n" in parts:
                launch_add_rms_norm(self.x, delta, self.norm, 1e-6, self.h, None, is_settled)

        qkv, o, down = self.parts
        for (w_qkv, w_o, w_up, w_down), cache in zip(self.weights, self.caches, strict=True):
            norm(down)
            product(self.h, w_qkv, qkv, "partials")
            if "w" in parts:
                launch_write_qkv(qkv, self.at, self.row, self.rope, cache, self.q, self.qk, 1e-6, None, is_settled)
            if "a" in parts:
                launch_decode_attention(
                    self.q, cache, self.starts, self.row, self.at, self.ends, self.mixed, self.space, self.rows, None,
                    None, None, is_settled,
                )  # fmt: skip
            product(self.mixed.view(self.rows, D), w_o, o, "partials")
            norm(o)
            product(self.h, w_up, self.up, "silu_mul")
            product(self.up, w_down, down, "partials")
        norm(down)
        product(self.h, self.head, self.logits, "none")


def run_step(_: int, step: Step, prefetch: int, parts: str) -> None:
    step.run(prefetch, parts)


def time_steps(report: dict[str, Any], bandwidth: float) -> None:
    make = Maker(torch.device("cuda"))
    for rows in (1, 8):
        step = Step(make, rows)
        for label, which, prefetch, parts in KINDS:
            with overlap(which):
                us = time_graph(partial(run_step, step=step, prefetch=prefetch, parts=parts), 1, 1)
            floor = step.bytes / bandwidth * 1e6
            print(f"step {rows} rows, {label:32} {us:8.1f} us  {us / floor:5.2f} x floor {floor:.0f}", flush=True)
            report.setdefault("steps", []).append({"rows": rows, "label": label, "us": us, "floor_us": floor})
        del step
