"""What is forced and what is left to the target in each row of generated conversation.

A row is a list of segments. A segment is a span of forced tokens and the voice that then writes freely
until it ends its turn, which opens the row's next segment.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.config import DataPlan
from sparkchat.train.prompts import PromptBook

USER, ASSISTANT = 0, 1
_ASK, _ANSWER = 0, 1
_SHORT_TURN, _SPARE_TURNS = 40, 4


@dataclass(frozen=True)
class Script:
    """Segments of R rows over one pool of forced tokens, padded to S segments a row."""

    pool: Tensor
    """[P] int64 forced tokens of all segments"""
    starts: Tensor
    """[R, S] where in the pool a segment begins"""
    ends: Tensor
    """[R, S] where it ends"""
    voices: Tensor
    """[R, S] USER or ASSISTANT: whom the target speaks for afterwards"""

    def to(self, device: str) -> "Script":
        return Script(*(x.to(device) for x in (self.pool, self.starts, self.ends, self.voices)))


class ScriptWriter:
    """Draws conversations from a prompt book; its questions are encoded once and shared by all rows."""

    def __init__(self, tokens: ChatTokens, book: PromptBook, plan: DataPlan, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        newline, ask, answer = tokens.encode("\n"), tokens.header("user"), tokens.header("assistant")
        self._systems = [tokens.turn("system", text) for text in book.system_prompts]
        self._ask_opening = ask
        # Short runs see only a few of them.
        num_questions = min(plan.num_questions, 64 + plan.tokens // 64)
        questions = tokens.tokenizer.encode_batch(
            [book.user_prompt(rng) for _ in range(num_questions)], add_special_tokens=False
        )
        follow_ups = [tokens.encode(book.follow_up(rng)) for _ in range(num_questions // 16)]
        tail = [tokens.end, *newline, *answer]
        self._openings = [ask + question.ids + tail for question in questions]
        self._shared = [(newline + ask, USER), (newline + answer, ASSISTANT)]
        self._shared += [(newline + opening, ASSISTANT) for opening in self._openings]
        self._shared += [(newline + ask + ids + tail, ASSISTANT) for ids in follow_ups]
        self._follow_up_from = 2 + len(self._openings)

    def write(self, num_rows: int, length: int) -> Script:
        """A script for ``num_rows`` rows of ``length`` tokens."""
        num_turns = _SPARE_TURNS + length // _SHORT_TURN
        openings = [self._opening() for _ in range(num_rows)]
        rows = []
        for index, (_, voice) in enumerate(openings):
            # A user turn that the target writes is followed by the head of its answer.
            row = [len(self._shared) + index] + [_ANSWER] * (voice == USER)
            for _ in range(num_turns):
                row += self._later_turn()
            rows.append(row)
        return _lay_out(self._shared + openings, rows)

    def _opening(self) -> tuple[list[int], int]:
        system = self.rng.choice(self._systems) if self.rng.random() < self.plan.system_share else []
        if self.rng.random() < self.plan.self_written_share:
            return system + self._ask_opening, USER
        return system + self.rng.choice(self._openings), ASSISTANT

    def _later_turn(self) -> list[int]:
        """Indices into the shared segments of one more turn."""
        if self.rng.random() < self.plan.self_written_share:
            return [_ASK, _ANSWER]
        if self.rng.random() < 0.6:
            return [self.rng.randrange(self._follow_up_from, len(self._shared))]
        return [self.rng.randrange(2, self._follow_up_from)]


def _lay_out(segments: list[tuple[list[int], int]], rows: list[list[int]]) -> Script:
    """Puts the forced tokens of all segments into one pool and looks up each row's segments."""
    lengths = torch.tensor([len(forced) for forced, _ in segments])
    ends = lengths.cumsum(0)
    voices = torch.tensor([voice for _, voice in segments])
    width = min(len(row) for row in rows)
    index = torch.tensor([row[:width] for row in rows])
    pool = torch.tensor([token for forced, _ in segments for token in forced])
    return Script(pool, (ends - lengths)[index], ends[index], voices[index])
