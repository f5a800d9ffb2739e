"""Matrix products with weights packed for the device they run on.

All of them give each row the same bits whatever rows are beside it: oneDNN's packed product and the 4 bit one do
(MKL's does not), so that a verified draft gets the logits that plain decoding would give it.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkchat.models.native import LaneLinear, takes
from sparkchat.models.quant import GROUP, GroupedWeight, Weight, dense

FP8_BLOCK = 128
"""Outputs and inputs that share a scale in ``Fp8Linear``."""
_PACKED_ROWS = 8
"""Batch size oneDNN is told to expect when it chooses the layout."""
_INT8_INPUTS = 16
"""torch reads as many of an 8 bit weight at a time, whatever there is: other numbers of inputs end the process."""


class Linear(Protocol):
    """y = x W^T + b."""

    dtype: torch.dtype
    """What x must be and y is."""
    kernel: str

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        """x [n, in] -> [n, out]. ``is_long``: the rows are of a span of many, as in a prompt."""
        ...


class PlainLinear:
    """torch's own product; on a GPU, and on CPUs without oneDNN."""

    kernel = "torch"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.scales: Tensor | None = None
        self.dtype = weight.dtype

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def write_floats(self, x: Tensor, out: Tensor) -> None:
        """out [n, out] float32 = x W^T + b; on a GPU as it was added up, without being rounded to ``dtype`` first."""
        if x.is_cuda and self.scales is None and self.bias is None and self.dtype != torch.float32:
            torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(self(x))


class Fp8Linear(PlainLinear):
    """Float8 codes with one float32 scale for each block of 128 x 128: half the bytes of bf16 on a GPU.

    Kernels multiply the codes as they are (kernels/gemm); called here, the weight is unpacked for this one use.
    """

    kernel = "fp8"

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """codes [n, k] float8_e4m3fn, scales [n/128, k/128] float32."""
        super().__init__(codes, bias)
        self.scales, self.dtype = scales, torch.bfloat16

    @classmethod
    def of(cls, weight: Weight, bias: Tensor | None, device: torch.device) -> Fp8Linear | None:
        """None for a weight whose scales do not lie in whole blocks."""
        is_fp8 = isinstance(weight, GroupedWeight) and weight.codes.dtype == torch.float8_e4m3fn
        if not is_fp8 or weight.group != FP8_BLOCK or weight.shape[0] % FP8_BLOCK:
            return None
        blocks = weight.scale.view(-1, FP8_BLOCK, weight.scale.shape[1])
        if not bool((blocks == blocks[:, :1]).all()):
            return None
        bias = None if bias is None else bias.to(device=device, dtype=torch.bfloat16)
        return cls(weight.codes.to(device).contiguous(), blocks[:, 0].to(device).contiguous(), bias)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        n, k = self.weight.shape
        assert self.scales is not None
        blocks = self.weight.to(self.dtype).view(n // FP8_BLOCK, FP8_BLOCK, k // FP8_BLOCK, FP8_BLOCK)
        plain = (blocks * self.scales[:, None, :, None]).to(self.dtype).view(n, k)
        return F.linear(x, plain, self.bias)


class PackedLinear:
    """oneDNN's product with the weight reordered once; fp32, or bf16 accumulated in fp32.

    On processors for which oneDNN has no bf16 product the weight lies in fp32, and inputs and outputs are bf16 still.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype = weight.dtype
        self._held = weight.dtype if weight.dtype == torch.float32 or has_bf16_product() else torch.float32
        self.kernel = "onednn-fp32" if self._held == torch.float32 else "onednn-bf16"
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._held).contiguous(), _PACKED_ROWS)
        self._bias = None if bias is None else bias.to(self._held)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(self._held), self._weight, self._bias, "none", [], "")
        return y.to(self.dtype)


@functools.cache
def has_bf16_product() -> bool:
    """Whether oneDNN multiplies in bf16 on this processor: with AVX-512 (BW, VL, DQ) or AVX-NE-CONVERT."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16), _PACKED_ROWS)
    except RuntimeError:
        return False
    return True


class Int4Linear:
    """4 bit codes multiplied as they are, in bf16 with fp32 accumulation; long spans take a bf16 copy."""

    kernel = "int4pack"
    dtype = torch.bfloat16

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
        # The kernel computes (code - 8) * scale + zero.
        zero = 8 * weight.scale if weight.shift is None else weight.shift + 8 * weight.scale
        pairs = torch.stack([weight.scale, zero], dim=-1)
        self._scales = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()
        self._bias = bias
        self._long = PackedLinear(weight.dense().to(torch.bfloat16), bias)

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        if is_long:
            return self._long(x)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales)
        return y if self._bias is None else y.add_(self._bias)


class Int8Linear:
    """Weights rounded to 8 bits with one scale an output, multiplied in bf16: for drafters, whose law may be rounded.

    Half the bytes of bf16 at an error of 0.8 %; up to four rows that is what the time goes to.
    """

    kernel = "int8pack"
    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        scale = weight.float().abs().amax(dim=1).clamp_(min=1e-30) / 127
        self._codes = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self._scale, self._bias = scale.to(torch.bfloat16), bias

    def __call__(self, x: Tensor, is_long: bool = False) -> Tensor:
        y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._codes, self._scale)
        return y if self._bias is None else y.add_(self._bias)


def make_lanes(weight: Weight, bias: Tensor | None, *, device: torch.device, dtype: torch.dtype | None) -> Linear:
    """As ``make_linear``; on a CPU whose kernels of our own take the weight, for those."""
    if takes(weight, dtype, device):
        return LaneLinear(weight, bias, is_rounded=dtype is torch.int8)
    return make_linear(weight, bias, device=device, dtype=dtype)


def make_linear(weight: Weight, bias: Tensor | None, *, device: torch.device, dtype: torch.dtype | None) -> Linear:
    """Pack a weight. ``dtype`` None keeps codes as they are where there is a product for them, those of 4 bits on the
    CPU and float8 on a GPU, and makes everything else bf16; int8 rounds to codes.

    Shapes that those products do not take are unpacked to bf16.
    """
    if dtype is None and device.type != "cpu" and (kept := Fp8Linear.of(weight, bias, device)) is not None:
        return kept
    fits_int4 = weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0
    if dtype is None and device.type == "cpu" and isinstance(weight, GroupedWeight) and weight.is_4bit and fits_int4:
        return Int4Linear(weight, None if bias is None else bias.to(torch.bfloat16))
    if dtype is torch.int8 and weight.shape[1] % _INT8_INPUTS == 0:
        return Int8Linear(dense(weight), None if bias is None else bias.to(torch.bfloat16))
    dtype = torch.bfloat16 if dtype in (None, torch.int8) else dtype
    plain = dense(weight).to(device=device, dtype=dtype)
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        return PackedLinear(plain, bias)
    return PlainLinear(plain, bias)
