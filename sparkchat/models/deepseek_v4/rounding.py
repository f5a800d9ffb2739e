"""The roundings that the published model was trained with, done and undone at once; results stay in fp32 or bf16.

Scales are powers of two, the smallest that bring the largest magnitude of a block into the format's range.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.deepseek_v4.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_scales,
    encode_scales,
    pack_fp4,
    unpack_fp4,
)

FP8_ROW_BLOCK = 128
"""Inputs of a projection that share a scale."""
LATENT_BLOCK = 64
"""Dimensions of a cached latent that share a scale; those that are rotated stay as they are."""
INDEX_BLOCK = 32
"""Dimensions of an index query or key that share a scale."""
_LEAST_E4M3 = 1e-4
_LEAST_E2M1 = E2M1_MAX * 2.0**-126


def round_e4m3(x: Tensor, block: int) -> Tensor:
    """Round x [..., n] to 8 bit floats, ``block`` neighbours to a scale."""
    scaled, scales = _scaled(x, block, _LEAST_E4M3, E4M3_MAX)
    rounded = scaled.to(torch.float8_e4m3fn).float() * scales
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def round_e2m1(x: Tensor, block: int) -> Tensor:
    """Round x [..., n], n even, to 4 bit floats, ``block`` neighbours to a scale."""
    scaled, scales = _scaled(x, block, _LEAST_E2M1, E2M1_MAX)
    rounded = unpack_fp4(pack_fp4(scaled)) * scales
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _scaled(x: Tensor, block: int, least: float, most: float) -> tuple[Tensor, Tensor]:
    """x over its scales [..., blocks, block] float32 within ±most, and the scales [..., blocks, 1]."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=least)
    scales = decode_scales(encode_scales(amax, most))
    return (blocks / scales).clamp(-most, most), scales


def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthogonal Hadamard matrix [size, size] float32, its own inverse. ``size`` is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"there is no Hadamard matrix of {size} rows; the size must be a power of two")
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)
    matrix = torch.ones((1, 1), device=device)
    while matrix.shape[0] < size:
        matrix = torch.kron(step, matrix)
    return matrix * size**-0.5
