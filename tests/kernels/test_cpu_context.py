"""A drafter's context in one call, against the same steps in torch; and jobs of several parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sparkchat.kernels import cpu
from sparkchat.models.layers import RMSNorm, rotate_

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

from sparkchat.kernels.cpu.decoder import ContextWeights, Rows
from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes, quantize
from sparkchat.kernels.cpu.team import team

TAPS, HIDDEN, LAYERS, KEY_HEADS, HEAD, SLOTS = 160, 96, 2, 3, 32, 24
CPU = torch.device("cpu")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(outputs: int, inputs: int, seed: int, is_rounded: bool) -> PackedMatrix:
    weight = random(outputs, inputs, seed=seed)
    return PackedMatrix(
        *(pack_codes(*quantize(weight), None) if is_rounded else pack_bf16(weight)), (outputs, inputs), None
    )


class Context:
    def __init__(self, is_rounded: bool) -> None:
        self.fc = matrix(HIDDEN, TAPS, 1, is_rounded)
        self.kv = matrix(LAYERS * 2 * KEY_HEADS * HEAD, HIDDEN, 2, is_rounded)
        self.norm, self.k_norm = random(HIDDEN, seed=3), random(LAYERS, KEY_HEADS, HEAD, seed=4)
        self.weights = ContextWeights(self.fc, self.kv, self.norm, self.k_norm, 1e-5)
        angles = random(SLOTS, HEAD // 2, seed=5)
        self.rotations = torch.complex(angles.cos(), angles.sin())
        self.rope = torch.view_as_real(self.rotations).flatten(1)

    def store(self, features: Tensor, places: list[tuple[int, int]], dtype: torch.dtype, threads: int = 1) -> Tensor:
        """Into an empty cache of three rows; ``places``: cache row and position of each."""
        numbers = np.array([[p for _, p in places], [p + 1 for _, p in places], [r for r, _ in places]], np.int64)
        cache = torch.zeros(LAYERS, 3, 2 * KEY_HEADS, SLOTS, HEAD, dtype=dtype)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        part = self.weights.plan(features, Rows(numbers, SLOTS), cache, self.rope)
        team(threads).run((part.work, part.job))
        torch.set_num_threads(before)
        return cache

    def wanted(self, features: Tensor, places: list[tuple[int, int]]) -> Tensor:
        context = RMSNorm(self.norm, 1e-5, CPU)(self.fc(features), torch.float32)
        kv = self.kv(context).view(-1, LAYERS, 2 * KEY_HEADS, HEAD)
        keys = kv[:, :, :KEY_HEADS]
        RMSNorm(self.k_norm, 1e-5, CPU).apply_(keys)
        rotate_(keys, self.rotations[[p for _, p in places]][:, None, None])
        cache = torch.zeros(LAYERS, 3, 2 * KEY_HEADS, SLOTS, HEAD)
        for n, (row, position) in enumerate(places):
            cache[:, row, :, position] = kv[n]
        return cache


PLACES = [(0, 4), (0, 5), (2, 0), (1, 17), (1, 18), (1, 19), (1, 20)]


@pytest.mark.parametrize("is_rounded", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_against_torch(is_rounded: bool, dtype: torch.dtype, error: float) -> None:
    context, features = Context(is_rounded), random(len(PLACES), TAPS, seed=7)
    found = context.store(features, PLACES, dtype).float()
    # Norms differ in their last bits, and rows of 16 bits then in theirs.
    error = max(error, 5e-4) if is_rounded else error
    torch.testing.assert_close(found, context.wanted(features, PLACES), rtol=error, atol=error)


def test_a_row_has_its_own_bits() -> None:
    context, features = Context(True), random(len(PLACES), TAPS, seed=8)
    together = context.store(features, PLACES, torch.float32)
    for threads in (2, 3):
        assert torch.equal(context.store(features, PLACES, torch.float32, threads), together)
    apart = sum(context.store(features[n : n + 1], PLACES[n : n + 1], torch.float32) for n in range(len(PLACES)))
    assert torch.equal(apart, together)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_parts_run_one_behind_the_other(threads: int) -> None:
    """Each product takes what the one before it left."""
    matrices = [matrix(64, 64, seed, seed % 2 == 0) for seed in range(5)]
    x = random(3, 64, seed=9)
    wanted, parts = x, []
    for one in matrices:
        wanted = one(wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for _ in range(30):
        out, parts = x, []
        for one in matrices:
            part, out = one.plan(out, threads)
            parts.append(part)
        team(threads).run(*((part.work, part.job) for part in parts))
        assert torch.equal(out, wanted)
    torch.set_num_threads(before)
