"""How DeepSeek V4 stores numbers: 4 and 8 bit codes with a power-of-two scale for every block, bf16, fp32, int64.

Experts: e2m1 codes, two to a byte, the even input in the low four bits, a scale for 32 inputs of one output. Other
projections: e4m3 codes, a scale for 128 outputs by 128 inputs. Scales are e8m0: a byte b stands for 2^(b - 127).
Unpacking is exact in fp32: no code has more than three significant bits, and scales only move the exponent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FP4_BLOCK = (1, 32)
"""Outputs and inputs that share a scale."""
FP8_BLOCK = (128, 128)
E4M3_MAX, E2M1_MAX = 448.0, 6.0
SCALE_NAN = 255
"""The one e8m0 byte that is no number."""

BYTES = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I64": 8}
"""Size of an element by safetensors' name of its type; an I8 holds two e2m1 codes."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbouring values; one that is met exactly goes to the neighbour with an even code.
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a stored tensor."""
    return BYTES[dtype] * math.prod(shape)


def decode_scales(scales: Tensor) -> Tensor:
    """e8m0 bytes -> float32 powers of two; byte 255 gives NaN."""
    raw = scales.view(torch.uint8).to(torch.int32)
    # Byte 0 is 2^-127, below fp32's normal numbers: the highest bit of the fraction.
    bits = torch.where(raw == 0, 1 << 22, raw << 23)
    return torch.where(raw == SCALE_NAN, 0x7FC00000, bits).view(torch.float32)


def encode_scales(amax: Tensor, largest: float) -> Tensor:
    """The smallest powers of two that bring ``amax`` to at most ``largest``, as uint8 e8m0; 1 where amax is 0."""
    mantissa, exponent = torch.frexp(amax.float() / largest)
    # frexp gives 0.5 <= mantissa < 1: an exact power of two has mantissa 0.5 and needs one step less.
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(amax > 0, exponent, 0)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes [..., n/2] -> the values of their e2m1 codes [..., n] float32."""
    return _pairs(packed.device)[packed.view(torch.uint8).int()].flatten(-2)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: the values of the two codes in every byte."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
    byte = torch.arange(256)
    # What is made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(device)


def pack_fp4(values: Tensor) -> Tensor:
    """Values [..., n] -> nearest e2m1 codes, two to a byte [..., n/2] int8; beyond 6 is 6."""
    size = values.abs().float()
    halfway = torch.tensor(_HALFWAY, device=values.device)
    low, high = torch.bucketize(size, halfway), torch.bucketize(size, halfway, right=True)
    codes = torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(values)
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)


@dataclass(frozen=True)
class ScaledWeight:
    """A weight [out, in] as it is stored: codes, and a scale for each block of them."""

    codes: Tensor
    """[out, in] float8_e4m3fn, or [out, in/2] int8 with two e2m1 codes in a byte."""
    scales: Tensor
    """[ceil(out / block rows), ceil(in / block columns)] uint8 e8m0"""
    block: tuple[int, int]
    """Outputs and inputs that share a scale."""

    def __post_init__(self) -> None:
        want = tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))
        if tuple(self.scales.shape) != want:
            raise ValueError(
                f"{list(self.shape)} in blocks of {self.block} needs scales {want}, not {self.scales.shape}"
            )

    @property
    def is_fp4(self) -> bool:
        return self.codes.dtype == torch.int8

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, 2 * columns if self.is_fp4 else columns

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in]; exact in float32, and in bfloat16 while a value's exponent fits."""
        values = unpack_fp4(self.codes) if self.is_fp4 else self.codes.float()
        scales, (rows, columns) = decode_scales(self.scales), self.block
        if rows > 1:
            scales = scales.repeat_interleave(rows, dim=0)[: self.shape[0]]
        if self.shape[1] % columns:
            return values.mul_(scales.repeat_interleave(columns, dim=1)[:, : self.shape[1]]).to(dtype)
        return values.unflatten(1, (-1, columns)).mul_(scales.unsqueeze(-1)).flatten(1).to(dtype)

    def part(self, axis: int, start: int, stop: int) -> ScaledWeight:
        """Outputs (axis 0) or inputs (axis 1) start:stop; a scale whose block is cut is repeated over smaller ones."""
        first, last = (start // 2, stop // 2) if self.is_fp4 and axis else (start, stop)
        codes = self.codes.narrow(axis, first, last - first)
        return ScaledWeight(codes, *cut_scales(self.scales, self.block, axis, start, stop))

    def to(self, device: torch.device) -> ScaledWeight:
        return ScaledWeight(self.codes.to(device), self.scales.to(device), self.block)


Stored = Tensor | ScaledWeight


def dense(weight: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """[out, in] as a plain tensor."""
    return weight.dense(dtype) if isinstance(weight, ScaledWeight) else weight.to(dtype)


def scale_blocks(block: tuple[int, int], axis: int, start: int, stop: int) -> tuple[int, int]:
    """Blocks of the part start:stop of an axis: smaller ones where it cuts through the stored blocks."""
    step = block[axis]
    if start % step or stop % step:
        step = math.gcd(step, start, stop)
    return (step, block[1]) if axis == 0 else (block[0], step)


def cut_scales(
    scales: Tensor, block: tuple[int, int], axis: int, start: int, stop: int
) -> tuple[Tensor, tuple[int, int]]:
    """The scales of the part start:stop of an axis, and the blocks they are for."""
    cut = scale_blocks(block, axis, start, stop)
    first = torch.arange(start, stop, cut[axis], device=scales.device)
    return scales.index_select(axis, first // block[axis]), cut


def spread_scales(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A scale for every element [out, in]; the last blocks may be cut."""
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def quantize(weight: Tensor, *, fp4: bool) -> ScaledWeight:
    """Round a weight [out, in] to the nearest stored form, as checkpoints for tests are written."""
    block, largest = (FP4_BLOCK, E2M1_MAX) if fp4 else (FP8_BLOCK, E4M3_MAX)
    weight = weight.float()
    scales = encode_scales(_block_amax(weight, block), largest)
    scaled = weight / spread_scales(decode_scales(scales), block, (weight.shape[0], weight.shape[1]))
    return ScaledWeight(pack_fp4(scaled) if fp4 else scaled.to(torch.float8_e4m3fn), scales, block)


def _block_amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax(dim=(1, 3))


def has_bad_numbers(tensor: Tensor) -> bool:
    """Whether a stored tensor holds NaN or infinity; codes of 4 bits and whole numbers have none."""
    if tensor.dtype == torch.float8_e4m3fn:
        return bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    if tensor.dtype == torch.uint8:
        return bool((tensor == SCALE_NAN).any())
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
