"""Times answers of every arm over the same prompts, arms in rotating order so that a slow minute hits all alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparkchat.bench.arms import Arm
from sparkchat.bench.chats import Chat
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.errors import SparkchatError
from sparkchat.params import GenerateRequest, SamplingParams

MOST_TOLD = 32
"""Steps of so many requests together are told one by one, for the error of predicted step times; telling those of more
would take time of its own."""
MOST_TRIES = 6
"""Rounds of which at most all but the last are thrown away for having captured steps: capturing one takes as long as
hundreds of replays, and which row counts an arm meets is a matter of chance."""

Event = dict[str, Any]


@dataclass
class Tally:
    """What the rounds of one arm at one concurrency came to."""

    seconds: float = 0.0
    """From the first token of a round to its last, summed."""
    tokens: int = 0
    """Delivered after the first token of each answer."""
    user_speeds: list[float] = field(default_factory=list)
    """Tokens per second of each answer."""
    steps: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    rounds: int = 0
    by_round: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, seconds) of each round; the arms' rounds have the same prompts."""
    predictions: list[tuple[float, float]] = field(default_factory=list)
    """(predicted, measured) milliseconds of a step."""
    thrown_away: int = 0
    """Rounds that captured steps."""
    seconds_thrown_away: float = 0.0
    """That those took."""
    captures: int = 0
    """Steps captured, in these rounds and in those thrown away."""

    def add(self, results: Sequence[dict[str, Any]], seconds: float, predictions: list[tuple[float, float]]) -> None:
        self.rounds += 1
        self.predictions += predictions
        self.seconds += seconds
        self.by_round.append((sum(len(result["token_ids"]) - 1 for result in results), seconds))
        for result in results:
            self.tokens += len(result["token_ids"]) - 1
            if result["timing"]["tokens_per_second"]:
                self.user_speeds.append(result["timing"]["tokens_per_second"])
            counts = result["speculation"]
            self.steps += counts["num_steps"]
            self.proposed += counts["num_proposed_draft_tokens"]
            self.verified += counts["num_verified_draft_tokens"]
            self.accepted += counts["num_accepted_draft_tokens"]

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def step_time_error(self) -> float | None:
        """By what share predicted steps are longer than measured ones, over all of them; None without predictions."""
        return _relative_error(self.predictions)

    def to_json(self, kv_bytes_per_token: int) -> dict[str, Any]:
        trimmed = self.proposed - self.verified
        return {
            "rounds": self.rounds,
            "rounds_thrown_away": self.thrown_away,
            "seconds_thrown_away": self.seconds_thrown_away,
            "captures": self.captures,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_user": _mean(self.user_speeds),
            "num_steps": self.steps,
            "acceptance_length": self.tokens / self.steps if self.steps else None,
            "mean_verify_len": self.verified / self.steps if self.steps else None,
            "utilisation": (self.accepted + self.steps) / (self.verified + self.steps) if self.steps else None,
            "trimmed_rows": trimmed,
            "trimmed_bytes": trimmed * kv_bytes_per_token,
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
    take: Take,
) -> None:
    """Answer ``chats``, ``concurrency`` at a time, with every arm; each round goes to ``take`` as it comes.

    Raises SparkchatError when an answer fails.
    """
    order = list(arms)
    for number, start in enumerate(range(0, len(chats), concurrency)):
        group = chats[start : start + concurrency]
        for arm in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            tally = _round_without_captures(run, arm, group, sampling)
            take(arm, tally, time.perf_counter() - began)


def merged(rounds: Iterable[Tally]) -> Tally:
    """What these rounds came to together."""
    whole = Tally()
    for tally in rounds:
        for field_ in fields(Tally):
            setattr(whole, field_.name, getattr(whole, field_.name) + getattr(tally, field_.name))
    return whole


def _round_without_captures(run: EngineRun, arm: Arm, chats: Sequence[Chat], sampling: SamplingParams) -> Tally:
    tally, made = Tally(), run.num_graphs()
    for attempt in range(MOST_TRIES):
        began = time.perf_counter()
        found = _round(run, arm, chats, sampling)
        before, made = made, run.num_graphs()
        captures = made - before
        tally.captures += captures
        if not captures or attempt == MOST_TRIES - 1:  # the last one counts whatever it did
            tally.add(*found)
            break
        tally.thrown_away += 1
        tally.seconds_thrown_away += time.perf_counter() - began
    return tally


def answer(
    run: EngineRun, arm: Arm, requests: Sequence[GenerateRequest], take: Callable[[Event], None]
) -> list[dict[str, Any]]:
    """Results of these requests decoded as ``arm`` does. Raises SparkchatError when one fails."""
    run.ask({"op": "plan_by_table", "on": arm.by_table}, "info", take)
    results = run.answer(requests, take)
    for result in results:
        if result["finish_reason"] == "error":
            raise SparkchatError(f"arm {arm.name} failed: {result['error']}")
    return results


def requests_of(
    arm: Arm, chats: Sequence[Chat], sampling: SamplingParams, *, steps: bool = False
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=f"{arm.name}-{next(_NUMBERS)}",
            prompt=None if isinstance(prompt, tuple) else prompt,
            prompt_ids=prompt if isinstance(prompt, tuple) else None,
            system=system,
            mode=arm.mode,
            block_size=arm.block_size,
            sampling=sampling,
            steps=steps,
        )
        for prompt, system in chats
    ]


_NUMBERS = itertools.count()


def _round(
    run: EngineRun, arm: Arm, chats: Sequence[Chat], sampling: SamplingParams
) -> tuple[list[dict[str, Any]], float, list[tuple[float, float]]]:
    """Results, seconds from the first token of any to the last token of all, and predicted beside measured steps."""
    first: list[float] = []
    predictions: list[tuple[float, float]] = []

    def take(event: Event) -> None:
        if event["event"] == "delta" and not first:
            first.append(time.perf_counter())
        elif event["event"] == "step" and event["predicted_step_ms"] is not None:
            predictions.append((event["predicted_step_ms"], event["step_ms"]))

    requests = requests_of(arm, chats, replace(sampling, seed=None), steps=len(chats) <= MOST_TOLD)
    results = answer(run, arm, requests, take)
    return results, time.perf_counter() - first[0] if first else 0.0, predictions


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _relative_error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """How far the sum of predicted step times is from that of the measured ones, as a share of the latter."""
    measured = sum(ms for _, ms in pairs)
    return (sum(ms for ms, _ in pairs) - measured) / measured if measured else None
