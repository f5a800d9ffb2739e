"""Compiles what captured steps of the fixtures' pairs launch, for an H200: ``PYTHONPATH=.:tests python FILE FOLDER``.

The stages run on the CPU with compiling in the place of starting, so their sizes are those that a GPU test meets. What
a kernel would have written stays zero. Prints a line a kernel and pair: how often it was compiled.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from fixtures import bigram
from fixtures.mix import write_mix_family
from fixtures.shapes import write_shapes
from fixtures.tiny import write_tiny
from kernels.ahead import Driver
from sparkchat.engine.captured.build import build_decoder
from sparkchat.engine.captured.graphs import EagerStages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.loading import load_pair
from sparkchat.kernels.accept.kernel import launch_accept_block
from sparkchat.kernels.attention.kernel import launch_decode_attention
from sparkchat.kernels.gemm.kernel import launch_small_gemm
from sparkchat.kernels.launch import Overlap, overlap, started_by
from sparkchat.kernels.markov.kernel import launch_markov_block
from sparkchat.kernels.norm.kernel import launch_add_rms_norm
from sparkchat.kernels.planner.kernel import launch_plan_lengths
from sparkchat.kernels.rope.kernel import launch_write_context, launch_write_qkv
from sparkchat.params import LoadSpec

STEP, STACK = "sparkchat.engine.captured.fused_step", "sparkchat.models.fused"
BACKBONE = "sparkchat.models.dspark.backbone"


def small_gemm(x: Any, weight: Any, out: Any, *, scales: Any = None, bias: Any = None, epilogue: str = "none") -> None:
    launch_small_gemm(x, weight, out, scales, bias, epilogue)


def markov_block(*given: Any, draft_to_target: Any = None, hidden: Any = None, confidence: Any = None) -> None:
    launch_markov_block(*given, draft_to_target, hidden, confidence)


def accept_block(
    *given: Any, drafts: Any, draft_laws: Any, draft_index: Any, target_to_draft: Any, caps: Any, chance: Any
) -> None:
    launch_accept_block(*given, drafts, draft_laws, draft_index, target_to_draft, caps, chance)


def decode_attention(*given: Any, max_rows: int, window: int | None, pages: Any, is_settled: bool) -> None:
    launch_decode_attention(*given, max_rows, window, pages, None, is_settled)


def write_qkv(*given: Any, qk_norm: Any, eps: float, pages: Any, is_settled: bool) -> None:
    launch_write_qkv(*given, qk_norm, eps, pages, is_settled)


def write_context(*given: Any, k_norm: Any, eps: float, pages: Any, is_settled: bool) -> None:
    launch_write_context(*given, k_norm, eps, pages, is_settled)


def plan_lengths(*given: Any, budget: Any) -> None:
    launch_plan_lengths(*given, 0, 0.0, budget)


def add_rms_norm(
    x: Any, delta: Any, weight: Any, eps: float, out: Any, tap: Any = None, *, is_settled: bool = False
) -> None:
    launch_add_rms_norm(x, delta, weight, eps, out, tap, is_settled)


REPLACED = {
    f"{STACK}.small_gemm": small_gemm,
    f"{STEP}.small_gemm": small_gemm,
    f"{STEP}.markov_block": markov_block,
    f"{STEP}.accept_block": accept_block,
    f"{STACK}.decode_attention": decode_attention,
    f"{STACK}.write_qkv": write_qkv,
    f"{STACK}.add_rms_norm": add_rms_norm,
    f"{BACKBONE}.add_rms_norm": add_rms_norm,
    f"{BACKBONE}.write_context": write_context,
    f"{STEP}.plan_lengths": plan_lengths,
    # Weights as they lie in memory; what is allocated is zero.
    "torch.backends.mkldnn.is_available": lambda: False,
    "torch.empty": torch.zeros,
    "torch.empty_like": torch.zeros_like,
}


def write_pairs(folder: Path) -> dict[str, dict[str, Any]]:
    """What tests/gpu/test_graphs_on_gpu.py opens."""
    tiny, mix, shapes = write_tiny(folder / "tiny"), write_mix_family(folder / "mix"), write_shapes(folder / "shapes")
    table = bigram.single_row((0.2, 0.5, 0.3))
    target = bigram.write_bigram(folder / "bigram", table)
    drafter = bigram.write_bigram_drafter(folder / "bigram-drafter", table, bigram.BigramDrafter())
    dummy = {"dummy_weights": True, "simulate_acceptance": "code", "dtype": "bfloat16"}
    return {
        "tiny": {"model_path": tiny.target, "drafter_path": tiny.drafter},
        "plain": {"model_path": tiny.target},
        "mix": {"model_path": mix["target"], "drafter_path": mix["oracle"]},
        "window": {"model_path": mix["window"], "drafter_path": mix["half"]},
        "bigram": {"model_path": target, "drafter_path": drafter, "concurrency": 64},
        "shapes": {"model_path": shapes, "drafter_path": shapes / "drafter", **dummy},
    }


def compile_pair(name: str, spec: dict[str, Any]) -> None:
    found: Counter[str] = Counter()
    known: set[Any] = set()

    def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        if compiled.hash not in known:
            known.add(compiled.hash)
            found[kernel.fn.__name__] += 1

    paths = {key: None if spec.get(key) is None else str(spec[key]) for key in ("model_path", "drafter_path")}
    settings = {"device": "cpu", "dtype": "float32", "context": 600, "concurrency": 8, "graphs": True}
    loaded = LoadSpec("fixture", **{**settings, **spec, **paths})
    pair, _ = load_pair(loaded, lambda event: None)
    decoder = build_decoder(pair, loaded.concurrency, pair.block_size, EagerStages(), is_fused=True)
    step = decoder._step
    step._enters = True
    most = loaded.concurrency
    with started_by(start), overlap(Overlap.SMALL):
        for count in (1, 2, most) if pair.drafter is not None else ():
            step.draft(count, Draws.SAMPLED)
            step.draft(count, Draws.FILTERED)
        for rows in {1, 2, min(most, 8), (pair.block_size + 1) * min(most, 8)}:
            step.verify(rows, Draws.SAMPLED, False)
            step.verify(rows, Draws.FILTERED, rows > 1 and pair.drafter is not None)
    print(name, dict(found), flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Driver())
    with ExitStack() as stack:
        for name, stand_in in REPLACED.items():
            stack.enter_context(mock.patch(name, stand_in))
        for name, spec in write_pairs(folder).items():
            compile_pair(name, spec)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
