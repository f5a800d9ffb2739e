"""Times answers of every arm over the same prompts, arms in rotating order so that a slow minute hits all alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkchat.bench.arms import Arm
from sparkchat.bench.chats import Chat
from sparkchat.bench.counted import Counted, counted, most_together, total
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.errors import SparkchatError
from sparkchat.params import GenerateRequest, SamplingParams

MOST_TRIES = 4
"""Rounds of which at most all but the last are thrown away for having captured steps: capturing one takes as long as
hundreds of replays, and which row counts an arm meets is a matter of chance."""

Event = dict[str, Any]


@dataclass
class Tally:
    """What the rounds of one arm at one concurrency came to."""

    by_round: list[Counted] = field(default_factory=list)
    """The arms' rounds have the same prompts."""
    together: int = 0
    """Requests that decoded at once."""
    thrown_away: int = 0
    """Rounds that captured steps."""
    seconds_thrown_away: float = 0.0
    """That those took."""
    captures: int = 0
    """Steps captured, in these rounds and in those thrown away."""

    @property
    def rounds(self) -> int:
        return len(self.by_round)

    @property
    def sums(self) -> Counted:
        return total(self.by_round)

    @property
    def tokens_per_second(self) -> float | None:
        return self.sums.tokens_per_second

    @property
    def step_time_error(self) -> float | None:
        """By what share predicted steps are longer than measured ones, over all of them; None without predictions."""
        sums = self.sums
        return (sums.predicted_ms - sums.measured_ms) / sums.measured_ms if sums.measured_ms else None

    def to_json(self, kv_bytes_per_token: int) -> dict[str, Any]:
        sums, speed = self.sums, self.tokens_per_second
        steps, trimmed = sums.answer_steps, sums.proposed - sums.verified

        def each(value: float) -> float | None:
            return value / steps if steps else None

        return {
            "rounds": self.rounds,
            "rounds_thrown_away": self.thrown_away,
            "seconds_thrown_away": self.seconds_thrown_away,
            "captures": self.captures,
            "steps_left_out": sums.left_out,
            "together": self.together,
            "seconds": sums.seconds,
            "tokens": sums.tokens,
            "expected_tokens": sums.expected_tokens,
            "tokens_per_second": speed,
            "tokens_per_second_per_user": speed / self.together if speed and self.together else None,
            "drawn_tokens_per_second": sums.tokens / sums.seconds if sums.seconds else None,
            "num_steps": steps,
            "acceptance_length": each(sums.yielded),
            "drawn_acceptance_length": each(sums.tokens),
            "mean_verify_len": each(sums.verified),
            "utilisation": sums.yielded / (sums.verified + steps) if steps else None,
            "trimmed_rows": trimmed,
            "trimmed_bytes": trimmed * kv_bytes_per_token,
            "mean_step_ms": 1e3 * sums.seconds / sums.steps if sums.steps else None,
            "step_time_error": self.step_time_error,
        }


Take = Callable[[Arm, Tally, float], None]
"""(arm, its round, seconds that the round took with those that were thrown away)"""


def measure(
    run: EngineRun,
    arms: Sequence[Arm],
    chats: Sequence[Chat],
    concurrency: int,
    sampling: SamplingParams,
    num_rounds: Callable[[], int],
    take: Take,
) -> None:
    """Answer ``chats``, ``concurrency`` at a time and over again, with every arm; each round goes to ``take`` as it
    comes. ``num_rounds`` is asked after every one that all arms have answered.

    Raises SparkchatError when an answer fails.
    """
    order, place, number = list(arms), itertools.cycle(chats), 0
    while number < num_rounds():
        group = list(itertools.islice(place, concurrency))
        for arm in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            tally = _round_without_captures(run, arm, group, sampling, is_first=number == 0)
            take(arm, tally, time.perf_counter() - began)
        number += 1


def merged(rounds: Iterable[Tally]) -> Tally:
    """What these rounds came to together."""
    whole = Tally()
    for tally in rounds:
        whole.by_round += tally.by_round
        whole.together = min(whole.together, tally.together) if whole.together else tally.together
        whole.thrown_away += tally.thrown_away
        whole.seconds_thrown_away += tally.seconds_thrown_away
        whole.captures += tally.captures
    return whole


def _round_without_captures(
    run: EngineRun, arm: Arm, chats: Sequence[Chat], sampling: SamplingParams, *, is_first: bool
) -> Tally:
    """A first round that captured steps is thrown away, as all is that leaves no step to count; of others the steps
    beside which something was captured are left out."""
    tally, made = Tally(), run.num_graphs()
    for attempt in range(MOST_TRIES):
        began = time.perf_counter()
        steps = _round(run, arm, chats, sampling)
        before, made = made, run.num_graphs()
        tally.captures += made - before
        together = most_together(steps)
        found = counted(steps, together)
        is_warming = is_first and attempt == 0 and _grew(steps, together, before)
        if attempt == MOST_TRIES - 1 or not (is_warming or (found.left_out and not found.steps)):
            tally.by_round.append(found)
            tally.together = together
            break
        tally.thrown_away += 1
        tally.seconds_thrown_away += time.perf_counter() - began
    return tally


def _grew(steps: Sequence[Event], together: int, before: int) -> bool:
    """Whether something was captured before the last step of all requests was told."""
    return any(step["requests"] == together and step["num_graphs"] != before for step in steps)


def answer(
    run: EngineRun,
    arm: Arm,
    requests: Sequence[GenerateRequest],
    take: Callable[[Event], None],
    *,
    until_first: bool = False,
) -> list[dict[str, Any]]:
    """Results of these requests decoded as ``arm`` does; ``until_first``: to the end of the first of them, the others
    being cancelled. Raises SparkchatError when one fails."""
    run.ask({"op": "plan_by_table", "on": arm.by_table}, "info", take)
    results = run.answer(requests, take, until_first=until_first)
    for result in results:
        if result["finish_reason"] == "error":
            raise SparkchatError(f"arm {arm.name} failed: {result['error']}")
    return results


def requests_of(arm: Arm, chats: Sequence[Chat], sampling: SamplingParams) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=f"{arm.name}-{next(_NUMBERS)}",
            prompt=None if isinstance(prompt, tuple) else prompt,
            prompt_ids=prompt if isinstance(prompt, tuple) else None,
            system=system,
            mode=arm.mode,
            block_size=arm.block_size,
            sampling=sampling,
            steps=False,
        )
        for prompt, system in chats
    ]


_NUMBERS = itertools.count()


def _round(run: EngineRun, arm: Arm, chats: Sequence[Chat], sampling: SamplingParams) -> list[Event]:
    """Its steps, as the engine tells them."""
    steps: list[Event] = []

    def take(event: Event) -> None:
        if event["event"] == "batch_step":
            steps.append(event)

    answer(run, arm, requests_of(arm, chats, replace(sampling, seed=None)), take, until_first=True)
    return steps
