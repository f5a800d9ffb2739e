"""What a captured step keeps on the device: who sits where, what each request needs, what the last step did.

Seats 0 .. R-1 hold the running requests without gaps; S is the number of seats, g the block size, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

STATIC, COMPACT, CAP = 0, 1, 2
"""How a verify length becomes one: the whole block, the plan, or the whole block with the plan as a cap."""
SHARED = -1
"""A planned length that the batch settles between its requests."""


class Room:
    """One piece of device memory that tensors are cut from, so that all of them travel as one message."""

    _STEP = 16
    """Bytes that every tensor begins at a multiple of."""

    def __init__(self, seats: int, block: int, device: torch.device) -> None:
        """Room for the tensors of ``Seats``, ``StepInputs`` and ``Block`` that are cut from it."""
        each_seat = 8 * len(fields(Seats)) + 8 * (4 * block + 4) + 12 * block
        self._bytes = torch.zeros(seats * each_seat + 64 * self._STEP, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros. Raises ValueError where there is no room left."""
        shape = (shape,) if isinstance(shape, int) else shape
        count = torch.Size(shape).numel() * dtype.itemsize
        start = self._used
        self._used += -(-count // self._STEP) * self._STEP
        if self._used > self._bytes.shape[0]:
            raise ValueError(f"there is no room for {count} bytes behind {start}")
        return self._bytes[start : start + count].view(dtype).view(shape)

    @property
    def used(self) -> Tensor:
        """[bytes] uint8: all that was taken."""
        return self._bytes[: self._used]


@dataclass(frozen=True)
class Seats:
    """One entry per seat, changed by the step itself and by ``Seats.move``."""

    anchor: Tensor
    """[S] int64 newest token, not yet run"""
    kv_len: Tensor
    """[S] int64 positions cached, of the target and of the drafter alike"""
    remaining: Tensor
    """[S] int64 tokens that may still be delivered"""
    cache_row: Tensor
    """[S] int64"""
    draft_row: Tensor
    """[S] int64"""
    temperature: Tensor
    """[S] float32"""
    top_k: Tensor
    """[S] int32, 0 for all"""
    top_p: Tensor
    """[S] float32"""
    min_p: Tensor
    """[S] float32"""
    seeds: Tensor
    """[S] int64 the bits of the seed"""
    rounds: Tensor
    """[S] int64"""

    @classmethod
    def empty(cls, count: int, device: torch.device, room: Room | None = None) -> Seats:
        def make(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device) if room is None else room.take(count, dtype)

        whole, real = torch.int64, torch.float32
        kinds = [whole] * 5 + [real, torch.int32, real, real, whole, whole]
        return cls(*(make(kind) for kind in kinds))

    def put(self, seat: int, **values: float) -> None:
        """Write numbers of one seat; each is a launch with the number in it, so nothing waits."""
        for name, value in values.items():
            getattr(self, name)[seat] = value

    def move(self, source: int, target: int) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            values[target] = values[source]


class StepInputs:
    """Numbers of one step, uploaded together: [words] float64 on the device, views of it below.

    float64 holds every whole number that occurs and every uniform; two conversions serve all of them.
    """

    def __init__(self, seats: int, block: int, device: torch.device, room: Room | None = None) -> None:
        self.seats, self.block = seats, block
        self.num_whole = 3 * seats + 2
        self.num_words = self.num_whole + seats * (4 * block + 1)
        kind = torch.float64
        self.device_words = (
            torch.zeros(self.num_words, dtype=kind, device=device) if room is None else room.take(self.num_words, kind)
        )

    def whole(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """int64: drafted [R], planned [R], kind [R], number of requests [1], shared budget [1]."""
        numbers, s = self.device_words[: self.num_whole].long(), self.seats
        return numbers[:count], numbers[s : s + count], numbers[2 * s : 2 * s + count], numbers[-2:-1], numbers[-1:]

    def uniforms(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """float64: for drafts [R, g], for their tests [R, g], for the token after [R, g+1], for simulated chances."""
        s, g = self.seats, self.block
        found, at = [], self.num_whole
        for width in (g, g, g + 1, g):
            found.append(self.device_words[at : at + s * width].view(s, width)[:count])
            at += s * width
        return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class Block:
    """What the drafter made in this step, for the verification behind it."""

    ids: Tensor
    """[S, g] int64 target ids"""
    index: Tensor
    """[S, g] int64 draft ids"""
    laws: Tensor | None
    """[S, g, Vd] float32 the laws they were drawn from"""
    confidence: Tensor
    """[S, g] float32 raw logits"""
    chance: Tensor
    """[S, g] float64 where acceptance is simulated"""
    is_sound: Tensor
    """[S] bool: the draft logits are numbers"""

    @classmethod
    def empty(cls, seats: int, block: int, draft_vocab: int, device: torch.device, room: Room | None = None) -> Block:
        """What a verification is planned by, ids and confidences, is cut from ``room``."""
        shape = (seats, block)

        def make(dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device) if room is None else room.take(shape, dtype)

        return cls(
            ids=make(torch.int64),
            index=torch.zeros(shape, dtype=torch.int64, device=device),
            laws=torch.zeros((*shape, draft_vocab), dtype=torch.float32, device=device) if block else None,
            confidence=make(torch.float32),
            chance=torch.zeros(shape, dtype=torch.float64, device=device),
            is_sound=torch.ones(seats, dtype=torch.bool, device=device),
        )


class Records:
    """What a step tells the host: [S, columns] float64, read through a pinned copy one step late."""

    NUMBERS = ("taken", "full", "next_id", "verify_len", "is_draft_sound", "damaged_from", "target_rank")
    ROWS = ("ids", "confidence", "p_draft", "p_target")

    def __init__(self, seats: int, block: int, device: torch.device) -> None:
        self.block = block
        self.device_rows = torch.zeros(
            (seats, len(self.NUMBERS) + len(self.ROWS) * block), dtype=torch.float64, device=device
        )

    def write(self, numbers: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
        """numbers [R], rows [R, g] by name."""
        columns = [numbers[name][:, None].double() for name in self.NUMBERS] + [
            rows[name].double() for name in self.ROWS
        ]
        packed = torch.cat(columns, dim=1)
        self.device_rows[: packed.shape[0]] = packed

    def read(self, host: Tensor) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
        """The same by name, from a copy on the host."""
        count = len(self.NUMBERS)
        numbers = {name: host[:, i].long().tolist() for i, name in enumerate(self.NUMBERS)}
        rows = {
            name: host[:, count + i * self.block : count + (i + 1) * self.block] for i, name in enumerate(self.ROWS)
        }
        return numbers, rows
