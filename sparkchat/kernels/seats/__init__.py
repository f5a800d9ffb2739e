"""The bookkeeping of a captured step: its packed rows before the layers, its record and the seats behind them.

Reference: ``engine/captured/step.py``, which computes the same with torch on any device and is what CPUs run; the
tensors are those of ``engine/captured/state.py``. Called for CUDA tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparkchat.kernels.accept import AcceptBuffers
    from sparkchat.kernels.sampling import Laws


class StepWords(Protocol):
    """Numbers of one step; see ``StepInputs``."""

    seats: int
    block: int
    num_whole: int
    device_words: Tensor


class SeatTensors(Protocol):
    """One number a seat; see ``Seats``."""

    anchor: Tensor
    kv_len: Tensor
    remaining: Tensor
    cache_row: Tensor
    draft_row: Tensor
    rounds: Tensor


class BlockTensors(Protocol):
    """What the drafter made; see ``Block``."""

    ids: Tensor
    index: Tensor
    confidence: Tensor
    chance: Tensor


@dataclass(frozen=True)
class PackedRows:
    """N rows of R requests, on the device; rows behind starts[R] are nobody's."""

    x: Tensor
    """[N, d] float32 embeddings, or int64 where a row of the table is whole numbers"""
    positions: Tensor
    """[N] int64"""
    cache_rows: Tensor
    """[N] int32 or int64, of the cache that the rows run over"""
    draft_rows: Tensor
    """[N] likewise, of the drafter's cache; not filled for blocks"""
    ends: Tensor
    """[N] int64"""
    starts: Tensor
    """[R+1] int32"""
    verify_lens: Tensor
    """[R] int32 drafts that are verified; not filled for blocks"""
    caps: Tensor
    """[R] int32 most drafts that are committed; likewise"""

    @classmethod
    def empty(
        cls, requests: int, num_rows: int, size: int, device: torch.device, *, has_ids: bool = False
    ) -> PackedRows:
        """Room for ``num_rows`` rows of size d. ``has_ids``: rows are the ids of tokens; these and cache rows are then
        int64, as torch's own lookups take them."""
        kinds = (torch.int64, torch.int64) if has_ids else (torch.float32, torch.int32)

        def ints(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        return cls(
            x=torch.empty((num_rows, size), dtype=kinds[0], device=device),
            positions=ints(num_rows, torch.int64),
            cache_rows=ints(num_rows, kinds[1]),
            draft_rows=ints(num_rows, kinds[1]),
            ends=ints(num_rows, torch.int64),
            starts=ints(requests + 1),
            verify_lens=ints(requests),
            caps=ints(requests),
        )


def enter_block(
    words: StepWords,
    seats: SeatTensors,
    table: Tensor,
    mask_token: int,
    rows: PackedRows,
    block: BlockTensors,
    spare_row: int,
    exponents: Tensor | None = None,
) -> None:
    """Fill ``rows`` with [anchor, mask, ...] of the first R seats, embedded by ``table`` [V, d].

    Without any request they lie in ``spare_row`` of the drafter's cache.
    With ``exponents`` [g] float64, of a simulated profile, also the chance and the confidence of every draft.
    """
    from sparkchat.kernels.seats.kernel import launch_enter_block

    launch_enter_block(words, seats, table, mask_token, rows, block, spare_row, exponents)


def limit(words: StepWords, remaining: Tensor, limits: Tensor, budget: Tensor) -> None:
    """limits [R] int32: most drafts of requests that share a budget, -1 for the others; budget [1] int32: theirs."""
    from sparkchat.kernels.seats.kernel import launch_limit

    launch_limit(words, remaining, limits, budget)


def enter_rows(
    words: StepWords,
    seats: SeatTensors,
    table: Tensor,
    rows: PackedRows,
    block: BlockTensors,
    spare_row: int,
    spare_draft_row: int,
    planned: Tensor | None = None,
) -> None:
    """Plan the verify lengths of R seats and fill ``rows`` with anchors and drafts, embedded by ``table`` [V, d].

    ``planned`` [R] int32: the lengths of requests that share a budget. Rows of nobody get the spare cache rows.
    """
    from sparkchat.kernels.seats.kernel import launch_enter_rows

    launch_enter_rows(words, seats, table, rows, block, spare_row, spare_draft_row, planned)


def settle(
    words: StepWords,
    seats: SeatTensors,
    rows: PackedRows,
    accepted: AcceptBuffers,
    block: BlockTensors,
    draft_laws: Laws | None,
    records: Tensor,
) -> None:
    """Write the records [S, columns] float64 of R requests, and move their seats to the next round."""
    from sparkchat.kernels.seats.kernel import launch_settle

    launch_settle(words, seats, rows, accepted, block, draft_laws, records)
