"""Laws and draws in torch, and the numbers that decide."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkchat.kernels.sampling import ALL_TIES, GREEDY_BELOW, SLACK, DrawSettings, Laws

DRAFT, ACCEPT, NEXT = 0, 1, 2
_LOW = 0xFFFFFFFF


def uniforms_reference(settings: DrawSettings, width: int, kind: int) -> Tensor:
    """[R, width] float64 in [0, 1): the numbers of engine/rng.py for slots 0..width-1 (Philox4x32-10)."""
    seeds, rounds = settings.seeds[:, None], settings.rounds[:, None]
    slots = torch.arange(width, device=seeds.device).expand(len(seeds), width)
    c0, c1 = (rounds & _LOW).expand_as(slots), ((rounds >> 32) & _LOW).expand_as(slots)
    c2, c3 = slots, torch.full_like(slots, kind)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return ((c0 >> 5).double() * 67108864.0 + (c2 >> 6).double()) * 2.0**-53


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of the 64 bit products of 32 bit numbers, in int64 without overflow."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    total = (low >> 16) + high
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def laws_reference(logits: Tensor, owner: Tensor, settings: DrawSettings, laws: Laws, at: Tensor | slice) -> None:
    """Find the laws of logits [M, V], row m with the settings of request owner[m], and store them in rows ``at``."""
    found = [_law(row.float(), settings, int(r)) for row, r in zip(logits, owner, strict=True)]
    peak, temperature, least, scale, last_tie = (list(x) for x in zip(*found, strict=True))
    for buffer, values in zip(
        (laws.peak, laws.temperature, laws.least, laws.scale), (peak, temperature, least, scale), strict=True
    ):
        buffer[at] = torch.tensor(values, dtype=torch.float64, device=buffer.device).float()
    laws.last_tie[at] = torch.tensor(last_tie, dtype=torch.int32, device=logits.device)


def _law(z: Tensor, settings: DrawSettings, r: int) -> tuple[float, float, float, float, int]:
    temperature = float(settings.temperature[r])
    is_greedy = temperature < GREEDY_BELOW
    peak = z.max()
    if bool(z.isnan().any()) or not bool(peak.isfinite()):
        return float("nan"), 1.0, 0.0, float("nan"), ALL_TIES
    if is_greedy:
        return float(peak), 1.0, float(peak), 1.0, int(z.argmax())
    weights = torch.exp((z - peak) / settings.temperature[r])
    least, last_tie = torch.tensor(-torch.inf), ALL_TIES
    top_k, top_p, min_p = int(settings.top_k[r]), float(settings.top_p[r]), float(settings.min_p[r])
    if 0 < top_k < len(z):
        least = z.topk(top_k).values[-1]
    if top_p < 1.0:
        least, last_tie = _nucleus(z, weights, least, top_p)
    if min_p > 0.0:
        floor = peak + settings.temperature[r] * torch.log(settings.min_p[r] * (1.0 - SLACK))
        if bool(floor > least):
            least, last_tie = floor, ALL_TIES
    ids = torch.arange(len(z), device=z.device)
    kept = (z > least) | ((z == least) & (ids <= last_tie))
    total = float(weights[kept].sum(dtype=torch.float64))
    return float(peak), temperature, float(least), 1.0 / total, last_tie


def _nucleus(z: Tensor, weights: Tensor, least: Tensor, top_p: float) -> tuple[Tensor, int]:
    """Threshold and last tied id of the smallest set, among ``z >= least``, whose share reaches ``top_p``."""
    masked = torch.where(z >= least, weights, 0.0)
    need = (top_p - SLACK) * float(masked.sum(dtype=torch.float64))
    order = masked.argsort(descending=True, stable=True)
    reached = masked[order].cumsum(0, dtype=torch.float64) >= need
    size = int(reached.int().argmax()) + 1 if bool(reached.any()) else int((z >= least).sum())
    last = z[order[size - 1]]
    ties = torch.nonzero(z == last)[:, 0]
    room = size - int((z > last).sum())
    return last, int(ties[room - 1]) if room < len(ties) else ALL_TIES


def draw_reference(weights: Tensor, u: Tensor) -> Tensor:
    """One id per row, [M] int64, by inverse CDF from weights [M, V] and u [M] in [0, 1); never one of weight zero."""
    sums = weights.double().cumsum(dim=-1)
    found = torch.searchsorted(sums, (u.to(sums.device) * sums[:, -1])[:, None], right=True)[:, 0]
    ids = torch.arange(weights.shape[1], device=weights.device)
    return torch.minimum(found, torch.where(weights > 0, ids, 0).amax(dim=-1))
