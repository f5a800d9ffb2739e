"""The target writes the training conversations: all rows advance together, one position a step.

R rows, L positions, V vocabulary, S segments a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.train.scripts import USER, Script
from sparkchat.train.target import RowCache, Target

_LONGEST_USER_TURN = 160
_CANDIDATES = 3


@dataclass(frozen=True)
class RowSampling:
    """How each of R rows samples its answers; user turns are sampled at temperature 1, top-p 0.95."""

    temperature: Tensor
    top_p: Tensor
    repetition_penalty: Tensor

    @classmethod
    def mixed(cls, num_rows: int, generator: torch.Generator, device: str) -> "RowSampling":
        """The spread of settings that users choose; cold rows get a penalty, since they loop without one."""
        u = torch.rand(4, num_rows, generator=generator)
        temperature = 0.3 + 0.7 * u[0]
        top_p = torch.where(u[1] < 0.5, 1.0, 0.9 + 0.1 * u[1])
        penalty = torch.where(u[2] < 0.4, 1.0, torch.where(u[2] < 0.75, 1.1, 1.0 + 0.15 * u[3]))
        temperature = torch.where(penalty < 1.03, temperature.clamp(min=0.6), temperature)
        return cls(*(x.to(device) for x in (temperature, top_p, penalty)))

    @classmethod
    def fixed(cls, num_rows: int, temperature: float, top_p: float, penalty: float, device: str) -> "RowSampling":
        return cls(*(torch.full((num_rows,), x, device=device) for x in (temperature, top_p, penalty)))


@dataclass(frozen=True)
class Conversations:
    """Token rows that the target wrote, and where it spoke as the assistant."""

    ids: Tensor
    """[R, L] int32"""
    is_answer: Tensor
    """[R, L] bool: written freely as the assistant, its end token included"""


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """One id per row of logits [R, V], settings [R].

    The nucleus is met by rejection, without a sort: of a few draws from the whole distribution the first
    one with less than top_p of the mass above it is taken, else the most likely id.
    """
    probs = (logits / temperature[:, None]).softmax(dim=-1)
    u = torch.rand(logits.shape[0], _CANDIDATES, device=logits.device)
    cumulative = probs.cumsum(dim=-1)
    draws = torch.searchsorted(cumulative, u * cumulative[:, -1:]).clamp(max=logits.shape[1] - 1)
    chosen = probs.argmax(dim=-1)
    for candidate in reversed(range(_CANDIDATES)):
        ids = draws[:, candidate]
        own = probs.gather(1, ids[:, None])
        above = (probs * (probs > own)).sum(dim=-1)
        chosen = torch.where((above < top_p) & (own[:, 0] > 0), ids, chosen)
    return chosen


class LockstepWriter:
    """Writes conversations for one script; every tensor lives on the target's device."""

    def __init__(
        self, target: Target, script: Script, sampling: RowSampling, end_id: int, banned: Tensor, length: int
    ) -> None:
        self.target, self.sampling, self.end_id, self.banned = target, sampling, end_id, banned
        self.script = script = script.to(target.device)
        num_rows, device = script.starts.shape[0], target.device
        self.cache = RowCache(target, num_rows, length)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.segment = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.cursor, self.cursor_end = script.starts[:, 0] + 1, script.ends[:, 0].clone()
        self.voice = script.voices[:, 0].clone()
        self.turn_len = torch.zeros_like(self.segment)
        self.token = script.pool[script.starts[:, 0]]
        self.seen = torch.zeros(num_rows, target.shape.vocab_size, dtype=torch.bool, device=device)
        self.ids = torch.zeros(num_rows, length, dtype=torch.int64, device=device)
        self.is_answer = torch.zeros(num_rows, length, dtype=torch.bool, device=device)
        self.ids[:, 0] = self.token
        self.start_state = [x.clone() for x in self._state()]

    def _state(self) -> list[Tensor]:
        place = [self.position, self.segment, self.cursor, self.cursor_end]
        return [*place, self.voice, self.turn_len, self.token, self.seen]

    def reset(self) -> None:
        for value, start in zip(self._state(), self.start_state, strict=True):
            value.copy_(start)

    @torch.inference_mode()
    def step(self) -> None:
        """Writes position + 1 of every row; all state changes in place, so the step can be captured."""
        self.seen.scatter_(1, self.token[:, None], True)
        hidden = self.target.decode(self.token, self.position, self.cache)
        sampled = self._sampled((hidden @ self.target.head.T).float())
        is_forced = self.cursor < self.cursor_end
        forced = self.script.pool[self.cursor.clamp(max=self.script.pool.shape[0] - 1)]
        token = torch.where(is_forced, forced, sampled)
        self.position += 1
        self.ids.index_copy_(1, self.position, token[:, None])
        self.is_answer.index_copy_(1, self.position, (~is_forced & (self.voice != USER))[:, None])
        self.token.copy_(token)
        self.cursor += is_forced
        self.turn_len.add_(1).masked_fill_(is_forced, 0)
        self._open_segments(~is_forced & (token == self.end_id))

    def _sampled(self, logits: Tensor) -> Tensor:
        is_user = self.voice == USER
        settings = self.sampling
        penalty = settings.repetition_penalty.masked_fill(is_user, 1.0)[:, None]
        logits = torch.where(self.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits = logits.index_fill(1, self.banned, float("-inf"))
        temperature = settings.temperature.masked_fill(is_user, 1.0)
        ids = sample(logits, temperature, settings.top_p.masked_fill(is_user, 0.95))
        return ids.masked_fill(is_user & (self.turn_len >= _LONGEST_USER_TURN), self.end_id)

    def _open_segments(self, ended: Tensor) -> None:
        """Moves rows whose turn ended on to their next segment."""
        script = self.script
        self.segment.copy_((self.segment + ended).clamp(max=script.starts.shape[1] - 1))
        index = self.segment[:, None]
        for state, table in ((self.cursor, script.starts), (self.cursor_end, script.ends), (self.voice, script.voices)):
            state.copy_(torch.where(ended, table.gather(1, index)[:, 0], state))

    def write(self) -> Conversations:
        """Runs to the end of the rows and returns them on the CPU."""
        step = self._captured() if self.token.is_cuda else self.step
        self.reset()
        for _ in range(self.ids.shape[1] - 1):
            step()
        return Conversations(self.ids.to("cpu", torch.int32), self.is_answer.cpu())

    def _captured(self) -> Callable[[], None]:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay
