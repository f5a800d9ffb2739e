"""Prepares a run's data: lets the target write conversations, or reads those written before."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkchat.train.batches import load_conversations, save_conversations
from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.config import DataPlan
from sparkchat.train.generate import Conversations, LockstepWriter, RowSampling
from sparkchat.train.prompts import PromptBook, prompt_books
from sparkchat.train.scripts import ScriptWriter
from sparkchat.train.target import Target

Report = Callable[[str], None]

TRAINING, FRESH, HELD_OUT = "training", "fresh", "held-out"
"""Subfolders of a data folder; fresh conversations come while the drafter trains"""


@dataclass(frozen=True)
class TrainingData:
    training: list[Conversations]
    held_out: list[Conversations]
    """Written for held-out prompts; never trained on"""
    fresh: Path | None = None
    """Folder that is looked into for more waves while training"""


def prepare_data(target: Target, tokens: ChatTokens, plan: DataPlan, folder: Path, report: Report) -> TrainingData:
    """Conversations in ``folder``; waves are written until there are as many tokens as planned."""
    training_book, held_out_book = prompt_books()
    held_out = WaveFolder(folder / HELD_OUT, target, tokens, plan, held_out_book, report)
    if not held_out.num_waves():
        held_out.add(plan.held_out_rows, plan.held_out_length)
    training = WaveFolder(folder / TRAINING, target, tokens, plan, training_book, report)
    while training.num_tokens() < plan.tokens:
        length = plan.lengths[training.num_waves() % len(plan.lengths)]
        training.add(max(1, plan.wave_tokens // length), length)
    return TrainingData(load_conversations(training.folder), load_conversations(held_out.folder), folder / FRESH)


class WaveFolder:
    """Conversations of one side of the prompt split, one file a wave; each wave has a seed of its own."""

    def __init__(
        self, folder: Path, target: Target, tokens: ChatTokens, plan: DataPlan, book: PromptBook, report: Report
    ) -> None:
        self.folder, self.target, self.tokens, self.report = folder, target, tokens, report
        folder.mkdir(parents=True, exist_ok=True)
        self._tokens_so_far = sum(wave.ids.numel() for wave in load_conversations(folder)) if self.num_waves() else 0
        self._seed = plan.seed + 1000 * len(book.templates) + self.num_waves()
        self._scripts = ScriptWriter(tokens, book, plan, random.Random(self._seed))

    def num_waves(self) -> int:
        return len(list(self.folder.glob("*.npz")))

    def num_tokens(self) -> int:
        return self._tokens_so_far

    def add(self, rows: int, length: int) -> None:
        """Lets the target write one more wave."""
        number, device = self.num_waves(), self.target.device
        torch.manual_seed(self._seed + number)
        settings = torch.Generator().manual_seed(self._seed + number)
        banned = torch.tensor([i for i in self.tokens.special if i != self.tokens.end], device=device)
        began = time.perf_counter()
        writer = LockstepWriter(
            self.target,
            self._scripts.write(rows, length),
            RowSampling.mixed(rows, settings, device),
            self.tokens.end,
            banned,
            length,
        )
        written = writer.write()
        save_conversations(written, self.folder / f"{number:04d}.npz")
        self._tokens_so_far += written.ids.numel()
        seconds, share = time.perf_counter() - began, written.is_answer.float().mean().item()
        self.report(
            f"wave {number}: {rows} x {length} tokens in {seconds:.1f} s "
            f"({rows * length / seconds:.0f} tokens/s), {share:.0%} of them answers"
        )


def held_out_prompts(tokens: ChatTokens, num_prompts: int, system_share: float, seed: int) -> list[list[int]]:
    """Token ids of single-turn chats over held-out prompts, up to the head of the answer."""
    book, rng = prompt_books()[1], random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        ids: list[int] = []
        if rng.random() < system_share:
            ids = tokens.turn("system", book.system_prompt(rng))
        prompts.append(ids + tokens.turn("user", book.user_prompt(rng)) + tokens.header("assistant"))
    return prompts
