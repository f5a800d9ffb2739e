"""Conversations on disk and in memory, and the batches of anchored blocks drawn from them.

B sequences, L positions, A anchors a sequence, g block length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.train.config import Recipe
from sparkchat.train.generate import Conversations


@dataclass(frozen=True)
class Batch:
    """Sequences and the blocks to train on."""

    ids: Tensor
    """[B, L] int64"""
    is_answer: Tensor
    """[B, L] bool"""
    anchors: Tensor
    """[B, A] positions; where a sequence has too few, others stand in and are not valid"""
    is_valid: Tensor
    """[B, A] bool"""
    block_len: int

    def labels(self) -> tuple[Tensor, Tensor]:
        """Ids that follow each anchor [B, A, g], and which of them are supervised: the leading answer tokens."""
        length = self.ids.shape[1]
        index = self.anchors[..., None] + torch.arange(1, self.block_len + 1, device=self.ids.device)
        flat = index.clamp(max=length - 1).flatten(1)
        ids = self.ids.gather(1, flat).view_as(index)
        is_label = self.is_answer.gather(1, flat).view_as(index) & (index < length) & self.is_valid[..., None]
        return ids, is_label.long().cumprod(dim=-1).bool()


def save_conversations(written: Conversations, path: Path) -> None:
    """One wave as an npz file; ids below 65536 take two bytes each."""
    ids = written.ids.numpy()
    small = ids.max() < 2**16
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez(file, ids=ids.astype(np.uint16 if small else np.int32), is_answer=written.is_answer.numpy())
    partial.replace(path)


def load_conversations(folder: Path) -> list[Conversations]:
    """All waves saved in ``folder``. Raises UsageError when there are none, DamagedFile for an unreadable one."""
    waves = [load_wave(path) for path in sorted(folder.glob("*.npz"))]
    if not waves:
        raise UsageError(f"no conversations in {folder}; generate some first")
    return waves


def load_wave(path: Path) -> Conversations:
    """One saved wave. Raises DamagedFile."""
    try:
        with np.load(path) as file:
            ids, is_answer = file["ids"].astype(np.int32), file["is_answer"]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise DamagedFile(f"{path}: not a file of conversations ({error})") from error
    return Conversations(torch.from_numpy(ids), torch.from_numpy(is_answer))


class BatchStream:
    """Endless shuffled batches; every visit of a sequence draws new anchors.

    Sequences seen least often come first, so that waves added on the way are read before the others are repeated.
    """

    def __init__(self, waves: list[Conversations], recipe: Recipe, block_size: int, device: str, seed: int) -> None:
        self.recipe, self.block_size, self.device = recipe, block_size, device
        self.random = torch.Generator().manual_seed(seed)
        self.device_random = torch.Generator(device=device).manual_seed(seed)
        self.waves: list[Conversations] = []
        self._unseen: list[tuple[int, Tensor]] = []
        for wave in waves:
            self.add(wave)

    def add(self, wave: Conversations) -> None:
        """Puts one more wave among the sequences that have not been seen."""
        self.waves.append(Conversations(wave.ids.to(self.device), wave.is_answer.to(self.device)))
        self._unseen += self._pieces(len(self.waves) - 1)

    def _pieces(self, number: int) -> list[tuple[int, Tensor]]:
        """A wave cut into batches of equal token counts, its rows in random order."""
        rows, length = self.waves[number].ids.shape
        size = min(rows, max(1, self.recipe.tokens_per_batch // length))
        # Moved once a pass: a copy to the device in each step would wait for the step before.
        order = torch.randperm(rows, generator=self.random).to(self.device)
        return [(number, order[i : i + size]) for i in range(0, rows - size + 1, size)]

    def __iter__(self) -> Iterator[Batch]:
        while True:
            number, rows = self._next_piece()
            yield self.batch(self.waves[number].ids[rows].long(), self.waves[number].is_answer[rows])

    def _next_piece(self) -> tuple[int, Tensor]:
        """A random piece of those that this pass has not seen; a new pass over all waves when there are none."""
        if not self._unseen:
            self._unseen = [piece for number in range(len(self.waves)) for piece in self._pieces(number)]
        return self._unseen.pop(int(torch.randint(len(self._unseen), (), generator=self.random)))

    def batch(self, ids: Tensor, is_answer: Tensor) -> Batch:
        """Sequences with freshly drawn anchors and block length."""
        block_len = self._block_len()
        num_anchors = max(1, self.recipe.slots_per_sequence * ids.shape[1] // 512 // block_len)
        # Multiples of 8 keep the attention mask aligned.
        num_anchors = min(max(1, ids.shape[1] - 1), max(num_anchors // 8 * 8, min(num_anchors, 8)))
        anchors, is_valid = draw_anchors(is_answer, num_anchors, self.device_random)
        return Batch(ids, is_answer, anchors, is_valid, block_len)

    def _block_len(self) -> int:
        """Usually the full block, sometimes a shorter one, so that short blocks at run time lose nothing."""
        shortest = min(self.recipe.shortest_block, self.block_size)
        if shortest == self.block_size or torch.rand((), generator=self.random) >= self.recipe.short_block_share:
            return self.block_size
        return int(torch.randint(shortest, self.block_size, (), generator=self.random))


def draw_anchors(is_answer: Tensor, num_anchors: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct positions p with p and p + 1 both in an answer: is_answer [B, L] -> anchors, is_valid [B, A]."""
    allowed = torch.zeros_like(is_answer)
    allowed[:, :-1] = is_answer[:, :-1] & is_answer[:, 1:]
    scores = torch.rand(is_answer.shape, generator=random, device=is_answer.device)
    scores = torch.where(allowed, scores, scores - 1)
    chosen, anchors = scores.topk(num_anchors, dim=1)
    return anchors, chosen >= 0


def count_answer_ids(waves: list[Conversations], vocab_size: int) -> Tensor:
    """How often each id occurs in answers, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for wave in waves:
        counts += torch.bincount(wave.ids[wave.is_answer].long(), minlength=vocab_size)
    return counts


def choose_draft_vocabulary(counts: Tensor, size: int, required: tuple[int, ...]) -> Tensor:
    """Target ids of the draft vocabulary, ascending [Vd]: the required ones and the most frequent others.

    Raises UsageError when the target has fewer ids than asked for.
    """
    if size > counts.shape[0] or size < len(required):
        raise UsageError(
            f"draft vocabulary of {size}: the target has {counts.shape[0]} ids, {len(required)} of them needed"
        )
    ranked = counts.clone()
    ranked[list(required)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values
