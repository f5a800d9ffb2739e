"""Greedy answers of every arm against plain decoding: no speed-up is told of an arm that says something else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkchat.bench.arms import Arm
from sparkchat.bench.chats import Chat
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.bench.measuring import answer, requests_of
from sparkchat.params import GenerateRequest, SamplingParams

NUM_CHATS = 4
NUM_TOKENS = 48
NEAR_TIE = 0.25
"""Two steps of bfloat16 at logits of 16 to 32: closer than that, which of two tokens is greedy is up to rounding."""
NUM_TOP = 20


@dataclass(frozen=True)
class Equality:
    """What comparing came to."""

    compared: int
    near_ties: int = 0
    """Answers that part from plain decoding where two tokens are as good as equally likely."""
    difference: str | None = None
    """The first difference that is none of those, in words."""

    @property
    def is_equal(self) -> bool:
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        return {"compared": self.compared, "near_ties": self.near_ties, "difference": self.difference}


def compare(
    run: EngineRun,
    arms: Sequence[Arm],
    chats: Sequence[Chat],
    together: int,
    tokens: int = NUM_TOKENS,
    begin: Callable[[Arm], None] = lambda arm: None,
) -> dict[str, Equality]:
    """Decode the first ``chats`` greedily with every arm, ``together`` at a time; the first arm is plain decoding.

    ``begin`` is called with each arm before it answers.
    """
    chats = chats[:NUM_CHATS]
    sampling = SamplingParams(temperature=0.0, max_tokens=min(tokens, NUM_TOKENS), ignore_eos=True)
    plain: list[dict[str, Any]] = []
    found: dict[str, Equality] = {}
    for arm in arms:
        begin(arm)
        results: list[dict[str, Any]] = []
        for start in range(0, len(chats), together):
            results += answer(run, arm, requests_of(arm, chats[start : start + together], sampling), _ignore)
        if not plain:
            plain = results
            continue
        found[arm.name] = _equality(run, arms[0], plain, results)
    return found


def _equality(run: EngineRun, off: Arm, plain: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> Equality:
    near_ties = 0
    for number, (wanted, got) in enumerate(zip(plain, results, strict=True), start=1):
        ids, others = wanted["token_ids"], got["token_ids"]
        if ids == others:
            continue
        place = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
        if place == min(len(ids), len(others)):
            return Equality(len(results), near_ties, f"answer {number} has {len(others)} tokens for {len(ids)}")
        margin = _margin(run, off, wanted, place, others[place])
        if margin is None or margin > NEAR_TIE:
            by = "" if margin is None else f", which is less likely by {margin:.2f} in logits"
            what = f"answer {number} parts at token {place}: {others[place]} for {ids[place]}{by}"
            return Equality(len(results), near_ties, what)
        near_ties += 1
    return Equality(len(results), near_ties)


def _margin(run: EngineRun, off: Arm, plain: dict[str, Any], place: int, other: int) -> float | None:
    """By how much plain decoding prefers its own token to ``other``; None where that is not among the likeliest, and
    where rounding is no excuse or cannot be looked into."""
    if run.info["dtype"] == "float32" or run.info["chat_template"] == "none":
        return None
    exact = (*plain["prompt_token_ids"], *plain["token_ids"][:place])
    request = GenerateRequest(
        id=f"tie-{plain['token_ids'][place]}-{place}",
        prompt_ids=exact,
        mode=off.mode,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        logprobs=NUM_TOP,
    )
    told: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        told.extend(event.get("logprobs") or ())

    answer(run, off, [request], take)
    if not told:
        return None
    scores = {record["id"]: record["logprob"] for record in told[0]["top"]}
    best = max(scores.values())
    return best - scores[other] if other in scores else None


def _ignore(_event: dict[str, Any]) -> None:
    pass
