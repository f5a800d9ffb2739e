"""Weights in lane blocks, as the tiles read them, and their products with any number of rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparkchat.kernels.cpu.emit import LANES
from sparkchat.kernels.cpu.memory import scratch
from sparkchat.kernels.cpu.product import RECORD_WORDS, SCRATCH_BYTES
from sparkchat.kernels.cpu.rows import GROUP, GROUP_ROW_BYTES
from sparkchat.kernels.cpu.team import PRODUCT, team
from sparkchat.kernels.cpu.tiles import BF16, GROUP_BYTES, NARROW, Q4, Q8, tile_addresses


class Part(NamedTuple):
    """A part of a job of the team's."""

    work: int
    job: np.ndarray
    held: Any
    """What must live until it is done."""


class PackedMatrix:
    """A weight [outputs, inputs], inputs a multiple of 32, the outputs filled up to whole lane blocks with zeros."""

    def __init__(self, kind: int, data: Tensor, shape: tuple[int, int], bias: Tensor | None) -> None:
        """data [blocks, bytes] uint8 as ``pack_codes`` or ``pack_bf16`` makes it; bias [outputs]."""
        self.outputs, self.inputs = shape
        self.kind, self._data = kind, data
        blocks, block_bytes = data.shape
        self.width = blocks * LANES
        """Outputs with the filling."""
        self._bias = None if bias is None else _filled(bias.float()[:, None], self.width)[:, 0].contiguous()
        self._record = np.zeros(RECORD_WORDS, np.int64)
        self._record[:] = (
            kind,
            data.data_ptr(),
            blocks,
            self.inputs // GROUP,
            block_bytes,
            0 if self._bias is None else self._bias.data_ptr(),
            *tile_addresses(kind),
        )
        self._address = self._record.ctypes.data

    @property
    def record(self) -> int:
        """Address of what the kernels know a matrix by; it lives as long as the matrix."""
        return self._address

    @property
    def num_bytes(self) -> int:
        return self._data.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, inputs] float32 -> [n, outputs] float32, a view where outputs were filled up."""
        x = x.contiguous()
        if x.shape[0] == 0:
            return torch.empty((0, self.outputs), dtype=torch.float32)
        threads = self._threads()
        part, out = self.plan(x, threads)
        team(threads).run((part.work, part.job))
        return out

    def plan(self, x: Tensor, threads: int) -> tuple[Part, Tensor]:
        """As a call with x [n, inputs], contiguous, n > 0, to be run by so many threads as a part of something larger:
        the result is filled in then."""
        assert x.dtype == torch.float32 and x.shape[1] == self.inputs, "the kernels read memory as they are told"
        count, groups = x.shape[0], self.inputs // GROUP
        out = torch.empty((count, self.width), dtype=torch.float32)
        packed_bytes = count * groups * GROUP_ROW_BYTES if self.kind != BF16 else 0
        room = scratch(threads * SCRATCH_BYTES + packed_bytes)
        own = room.ctypes.data
        job = np.array(
            (
                self.record,
                x.data_ptr(),
                4 * self.inputs,
                count,
                groups,
                out.data_ptr(),
                4 * self.width,
                own + threads * SCRATCH_BYTES if packed_bytes else 0,
                own,
                SCRATCH_BYTES,
            ),
            np.int64,
        )
        return Part(PRODUCT, job, (self, x, room)), out[:, : self.outputs]

    def _threads(self) -> int:
        return max(1, min(torch.get_num_threads(), self._data.shape[0] // 4))


def pack_codes(codes: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[int, Tensor]:
    """Codes [outputs, inputs] of 4 bits (uint8 0..15) or 8 (int8), scale and shift by output and group of 32.

    Returns the format and [blocks, bytes]. Scales are stored as float16, in which GGUF has them.
    """
    kind = Q4 if codes.dtype == torch.uint8 else Q8
    groups = codes.shape[1] // GROUP
    lanes = _filled(codes, -(-codes.shape[0] // LANES) * LANES).view(-1, LANES, groups, GROUP).permute(0, 2, 3, 1)
    # Two inputs side by side for each lane; of 4 bits, four such pairs share the words of 16 bits.
    if kind == Q4:
        pairs = lanes.reshape(-1, groups, GROUP // 8, 4, 2, LANES).transpose(4, 5).to(torch.int32)
        words = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4 | pairs[:, :, :, 2] << 8 | pairs[:, :, :, 3] << 12
        lanes = torch.where(words > 32767, words - 65536, words).to(torch.int16)
    else:
        lanes = lanes.reshape(-1, groups, GROUP // 2, 2, LANES).transpose(3, 4)
    parts = [lanes.reshape(lanes.shape[0], groups, -1).contiguous().view(torch.uint8), _halves(scale)]
    if kind == Q4:
        parts.append(_halves(torch.zeros_like(scale) if shift is None else shift))
    data = torch.cat(parts, dim=2)
    assert data.shape[2] == GROUP_BYTES[kind]
    return kind, data.flatten(1).contiguous()


def pack_narrow(codes: Tensor, scale: Tensor, shift: Tensor) -> tuple[int, Tensor]:
    """As ``pack_codes`` with codes of 4 bits, for products with rows of 8 bits: an estimate.

    The rows' rounding is multiplied by codes of -8 to 7 and not of 0 to 15, which is a third of it; the shift moves.
    """
    groups = codes.shape[1] // GROUP
    lanes = _filled(codes, -(-codes.shape[0] // LANES) * LANES).view(-1, LANES, groups, GROUP // 8, 2, 4)
    quads = lanes.permute(4, 0, 2, 3, 1, 5)
    both = (quads[0] | quads[1] << 4).reshape(-1, groups, GROUP // 2 * LANES)
    data = torch.cat([both, _halves(scale), _halves(shift + 8 * scale.half().float())], dim=2)
    assert data.shape[2] == GROUP_BYTES[NARROW]
    return NARROW, data.flatten(1).contiguous()


def pack_bf16(weight: Tensor) -> tuple[int, Tensor]:
    """weight [outputs, inputs] -> the format and [blocks, bytes]."""
    lanes = _filled(weight.to(torch.bfloat16), -(-weight.shape[0] // LANES) * LANES)
    lanes = lanes.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()
    return BF16, lanes.flatten(1).view(torch.uint8)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [outputs, inputs] -> int8 codes and their scales [outputs, inputs / 32], representable in float16."""
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(dim=2).clamp_(min=2e-5) / 127).half().float()
    codes = (groups / scale.unsqueeze(2)).round_().clamp_(-127, 127).to(torch.int8)
    return codes.view(weight.shape), scale


def _halves(values: Tensor) -> Tensor:
    """[outputs, groups] -> [blocks, groups, bytes] as float16, side by side by lane."""
    filled = _filled(values.half(), -(-values.shape[0] // LANES) * LANES)
    return filled.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _filled(x: Tensor, count: int) -> Tensor:
    if x.shape[0] == count:
        return x
    return torch.cat([x, x.new_zeros((count - x.shape[0], x.shape[1]))])
