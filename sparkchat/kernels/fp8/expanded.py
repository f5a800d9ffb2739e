"""Products of many rows: a weight of 8 bits is expanded to plain numbers, and the library multiplies by those.

All weights of a device are expanded in one room, one after the other, which is made once and stays: captured graphs
keep its address, and what is written over before it has left the L2 cache need not go to memory. So all who use it on a
device must do so one after the other, on one stream or on streams that wait for each other, as captured steps and
prompts do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.fp8.expand_kernel import launch_expand
from sparkchat.kernels.fp8.plan import EXPANSION, MOST_EXPANDED, expanded_pieces
from sparkchat.kernels.fp8.weights import TiledFp8

_rooms: dict[torch.device, Tensor] = {}


def expansion_room(device: torch.device) -> Tensor:
    """[MOST_EXPANDED] uint8, always the same of a device; called before anything is captured."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    room = _rooms.get(device)
    if room is None:
        # Whoever comes first may be in inference mode; what is made there must not be written outside.
        with torch.inference_mode(False):
            room = _rooms[device] = torch.empty(MOST_EXPANDED, dtype=torch.uint8, device=device)
    return room


def linear_expanded(
    x: Tensor,
    weight: TiledFp8,
    out: Tensor,
    groups: int = 1,
    *,
    expansion: tuple[int, int] = EXPANSION,
    most: int = MOST_EXPANDED,
) -> None:
    """See ``fp8_linear``; out [N, out] or [1, N, out]. ``expansion``, and ``most`` bytes that are expanded at once,
    stand in for the usual ones, for measuring."""
    (outs, size), to = weight.shape, out[0] if out.dim() == 3 else out
    room, width = expansion_room(x.device).view(x.dtype), outs // groups
    for first, last in expanded_pieces(outs, size, groups, x.dtype.itemsize, most):
        plain = room[: (last - first) * size].view(last - first, size)
        launch_expand(weight.outs(first, last), plain, expansion)
        if groups == 1:
            multiply_plain(x, plain, to[:, first:last])
            continue
        rows = x[:, first // width * size : last // width * size].unflatten(1, (-1, size))
        some = to[:, first:last].unflatten(1, (-1, width))
        multiply_plain(rows.transpose(0, 1), plain.unflatten(0, (-1, width)), some.transpose(0, 1))


def multiply_plain(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x weight^T by the library, of x [N, k] and weight [n, k], or of several [G, N, k] and [G, n, k].

    Where out is float32 it is as it was added up, without being rounded to x's type first.
    """
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    if out.dtype == x.dtype:
        multiply(x, weight.mT, out=out)
    elif x.is_cuda and out.dtype == torch.float32:
        multiply(x, weight.mT, out_dtype=torch.float32, out=out)
    else:
        out.copy_(multiply(x.float(), weight.float().mT))
