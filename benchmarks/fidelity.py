"""How near the next token's law is to that of the same weights in float32, by how rows of products are rounded.

    python benchmarks/fidelity.py MODEL.gguf TEXT [--tokens N]

TEXT is a file of prose. Mean and 99th percentile of the Kullback-Leibler divergence from float32 over its first tokens,
and how often the likeliest token is the same: for rows rounded to 16, 8, ... bits with a scale for each 32 inputs, and
for bfloat16 (emulated: every product's input is rounded, the rest is float32), for the compiled kernels as they run,
and for torch's 4 bit product.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparkchat.chat import load_tokenizer
from sparkchat.kernels import cpu
from sparkchat.models import ForwardBatch, load_target
from sparkchat.models.dense import DenseModel
from sparkchat.models.linear import PackedLinear
from sparkchat.paths import user_paths

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    tokenizer = load_tokenizer(str(options.model), cache_dir=user_paths().cache).tokenizer
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"])[: options.tokens]
    exact = load_target(options.model, device=CPU, dtype=torch.float32)
    wanted = law(exact, ids)
    product = PackedLinear.__call__
    for name, rounded in {**{f"{bits} bits": to_bits(bits) for bits in (16, 12, 10, 8)}, "bfloat16": to_bf16}.items():
        PackedLinear.__call__ = lambda self, x, is_long=False, r=rounded: product(self, r(x), is_long)  # type: ignore[method-assign]
        report(f"rows of {name}, emulated", wanted, law(exact, ids))
    PackedLinear.__call__ = product  # type: ignore[method-assign]
    for value in ("1", "0"):
        os.environ[cpu.OFF] = value
        cpu.why_not.cache_clear()
        model = load_target(options.model, device=CPU)
        report(f"as it runs, {model.config.linear_kernel}", wanted, law(model, ids))


def law(model: DenseModel, ids: Tensor) -> Tensor:
    """ids [N] -> log-probabilities [N, V] float64 of the token behind each."""
    cache = model.new_cache(1, len(ids) + 8, len(ids))
    batch = ForwardBatch(ids, torch.arange(len(ids)), (cache.allocate(),), (0, len(ids)))
    hidden, _ = model.forward(batch, cache)
    return model.logits(hidden).double().log_softmax(-1)


def to_bits(bits: int) -> Callable[[Tensor], Tensor]:
    def rounded(x: Tensor) -> Tensor:
        groups = x.view(*x.shape[:-1], -1, 32)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
        return ((groups / scale).round() * scale).view(x.shape)

    return rounded


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def report(name: str, wanted: Tensor, found: Tensor) -> None:
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    same = (wanted.argmax(-1) == found.argmax(-1)).double().mean()
    print(f"{name:34} mean {divergence.mean():.2e}  p99 {divergence.quantile(0.99):.2e}  likeliest the same {same:.4f}")


if __name__ == "__main__":
    main()
