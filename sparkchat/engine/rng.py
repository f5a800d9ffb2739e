"""Random numbers as a pure function of (seed, round, slot, kind).

There is no generator state: what a request draws cannot depend on its batch mates, on the verify mode, or on how
often an earlier position was drawn. The hash is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC11): key = seed, counter = (round low, round high, slot, kind).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels import cpu

_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# Rows of every ``[2, n]`` array below are the two Philox lanes.
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


class DrawKind(IntEnum):
    """What a number is used for. Kinds are independent streams."""

    DRAFT = 0
    """Draws draft token ``slot`` from the drafter's law."""
    ACCEPT = 1
    """Tests draft token ``slot``."""
    NEXT = 2
    """Draws the token after the accepted run: bonus, residual, or a plain step."""
    SIMULATE = 3
    """Makes up how likely draft token ``slot`` is to pass, where acceptance is simulated."""


DRAFT, ACCEPT, NEXT, SIMULATE = DrawKind


def uniforms(seeds: Sequence[int], rounds: Sequence[int], slot0: int, n: int, kind: DrawKind) -> Tensor:
    """``[R, n]`` float64 in [0, 1) with 53 random bits; row r holds slots ``slot0 .. slot0+n-1`` of request r.

    ``seeds`` and ``rounds`` are R whole numbers in [0, 2^64); a round is one decode step of that request.
    """
    if cpu.is_loaded():
        from sparkchat.kernels.cpu.philox import fill_uniforms

        out = np.empty((len(seeds), n))
        fill_uniforms(np.array(seeds, np.uint64), np.array(rounds, np.uint64), slot0, np.uint64(int(kind)), out)
        return torch.from_numpy(out)
    num_requests = len(seeds)
    seed = np.repeat(np.array(seeds, dtype=np.uint64), n)
    step = np.repeat(np.array(rounds, dtype=np.uint64), n)
    multiplied, xored = np.empty((2, 2, num_requests * n), dtype=np.uint64)
    multiplied[0] = step & _MASK
    multiplied[1] = np.tile(np.arange(slot0, slot0 + n, dtype=np.uint64), num_requests)
    xored[0] = step >> _HALF
    xored[1] = int(kind)
    words = _philox(multiplied, xored, np.stack((seed & _MASK, seed >> _HALF)))
    # 27 + 26 bits make every value an exact multiple of 2^-53, so 1.0 cannot appear.
    values = ((words[0] >> np.uint64(5)) * 67108864.0 + (words[1] >> np.uint64(6))) * (1.0 / 9007199254740992.0)
    return torch.from_numpy(values.reshape(num_requests, n))


def acceptance_uniforms(seeds: Sequence[int], rounds: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """``[R, width]`` of ACCEPT and ``[R, width + 1]`` of NEXT, from slot 0 on."""
    if not cpu.is_loaded():
        return uniforms(seeds, rounds, 0, width, ACCEPT), uniforms(seeds, rounds, 0, width + 1, NEXT)
    from sparkchat.kernels.cpu.philox import fill_uniforms

    keys = np.array((seeds, rounds), np.uint64)
    tested, following = np.empty((len(seeds), width)), np.empty((len(seeds), width + 1))
    for kind, values in ((ACCEPT, tested), (NEXT, following)):
        fill_uniforms(keys[0], keys[1], 0, np.uint64(int(kind)), values)
    return torch.from_numpy(tested), torch.from_numpy(following)


def _philox(multiplied: np.ndarray, xored: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Words 0 and 2 of every output block ``[2, n]``, from words 0 and 2, words 1 and 3, and the key."""
    for round_key in (key + _WEYL) & _MASK:
        product = multiplied[::-1] * _MULTIPLIERS
        multiplied = product >> _HALF
        multiplied ^= xored
        multiplied ^= round_key
        product &= _MASK
        xored = product
    return multiplied
