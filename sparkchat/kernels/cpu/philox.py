"""The random numbers of ``engine/rng.py``, a few at a time: NumPy is started forty times for one of them."""

from __future__ import annotations

import numpy as np
from numba import njit

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit("void(uint64[::1], uint64[::1], int64, uint64, float64[:, ::1])", nogil=True, cache=True)
def fill_uniforms(seeds, rounds, slot, kind, out):
    """out [R, n] float64 in [0, 1): slots ``slot``, ``slot + 1``, ... of each request (Philox4x32-10)."""
    for r in range(out.shape[0]):
        for i in range(out.shape[1]):
            a, b = rounds[r] & _MASK, rounds[r] >> _HALF
            c, d = np.uint64(slot + i), kind
            key_0, key_1 = seeds[r] & _MASK, seeds[r] >> _HALF
            for _ in range(10):
                product_0, product_1 = a * _MULTIPLIER_0, c * _MULTIPLIER_1
                a, b, c, d = (
                    (product_1 >> _HALF) ^ b ^ key_0,
                    product_1 & _MASK,
                    (product_0 >> _HALF) ^ d ^ key_1,
                    product_0 & _MASK,
                )
                key_0, key_1 = (key_0 + _WEYL_0) & _MASK, (key_1 + _WEYL_1) & _MASK
            high, low = np.float64(a >> np.uint64(5)), np.float64(c >> np.uint64(6))
            out[r, i] = (high * 67108864.0 + low) * (1.0 / 9007199254740992.0)
