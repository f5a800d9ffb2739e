"""One request while it lives in the engine: host-side state only, no tensor but its pending features."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from sparkchat.engine.draft_gate import DraftGate
from sparkchat.engine.lagged_plan import StaleSurvival
from sparkchat.engine.sampling import is_greedy
from sparkchat.engine.statistics import SpeculationStatistics
from sparkchat.params import DraftTemperature, GenerateRequest, Mode, SamplingParams
from sparkchat.sampling_kind import sampling_kind

FIRST_ROUND = 1
"""Of decoding; the prompt pass, which draws the first token, is round 0."""


@dataclass
class RequestState:
    """A request from admission to its last token.

    ``tokens`` is the prompt and everything committed; its last entry is the anchor, which is not yet
    in the target's KV cache, so a decoding request has ``kv_len == len(tokens) - 1``.
    """

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    block_size: int
    """Drafts per block; 0 when there is no drafter."""
    context: int
    """Most tokens, prompt and answer together."""
    seed: int
    output: Any
    """engine.output.OutputStream: text, stops and channels of this request."""
    history: Any
    """engine.sampling.TokenHistory over the prompt and what was delivered."""
    mode_override: Mode | None = None
    accept_cap: int | None = None
    """Most drafts committed a step in cap-accept; None lets the plan choose."""
    draft_temperature: DraftTemperature = "target"
    tokens: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prefilled: int = 0
    """Prompt tokens whose KV is in the cache."""
    slot: Any = None
    """engine.slots.Slot: the cache rows this request holds; None while it waits."""
    aside: Any = None
    """engine.slots.SetAside: what its slot held, while it waits for room to go on."""
    times_aside: int = 0
    """How often it was set aside."""
    foreseen: Any = None
    """engine.captured.decoder.Foreseen: how its next step was planned before the host knew the one in flight."""
    round: int = 0
    """Counts decode steps; with the seed it keys every random draw."""
    finish_reason: str | None = None
    stop_value: str | int | None = None
    error: str | None = None
    statistics: SpeculationStatistics = field(default_factory=SpeculationStatistics)
    gate: DraftGate = field(default_factory=DraftGate)
    stale: StaleSurvival = field(default_factory=StaleSurvival)
    scores: Any = None
    """engine.logprobs.Scores of the rows that decide the next run; None when nobody asked for them."""
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    _kind: tuple[SamplingParams | None, str] = (None, "")

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def kind(self) -> str:
        """Of its sampling; as many requests as decode together are asked for it in every step."""
        if self._kind[0] is not self.sampling:
            self._kind = (self.sampling, sampling_kind(self.sampling))
        return self._kind[1]

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.sampling.temperature)

    @property
    def is_filtered(self) -> bool:
        """Whether its laws are cut by top-k, top-p or min-p."""
        s = self.sampling
        return not self.is_greedy and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)

    @property
    def is_reproducible(self) -> bool:
        """True when the tokens must not depend on batch mates: sampled, with a seed the user chose."""
        return self.sampling.seed is not None and not self.is_greedy

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        return len(self.tokens) > len(self.prompt_ids)

    @property
    def anchor(self) -> int:
        return self.tokens[-1]

    @property
    def kv_len(self) -> int:
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be delivered."""
        room = self.context - len(self.prompt_ids) - len(self.delivered)
        if self.sampling.max_tokens is not None:
            room = min(room, self.sampling.max_tokens - len(self.delivered))
        return room

    @property
    def tokens_in_cache(self) -> list[int]:
        """The tokens whose KV the target's cache holds."""
        if not self.is_prefilled:
            return list(self.prompt_ids[: self.prefilled])
        return self.tokens[: self.kv_len]

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed so far: tokens after the first over the time since the first."""
        first, last = self.first_token_ns, self.last_token_ns
        if first is None or last is None or last <= first or len(self.delivered) < 2:
            return None
        return (len(self.delivered) - 1) * 1e9 / (last - first)

    def deliver(self, run: list[int], origins: list[str], events: list[dict[str, Any]]) -> int:
        """Commit a run of tokens; deliver those before the first stop. Returns how many were delivered.

        Appends the ``delta`` event, with log-probabilities where asked for. Tokens behind a stop are committed to the
        cache but to nothing else.
        """
        self.tokens.extend(run)
        delta = self.output.push(run, len(self.delivered))
        delivered = run[: delta.num_delivered]
        self.delivered.extend(delivered)
        self.history.extend(delivered)
        self.last_token_ns = time.monotonic_ns()
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, stop=delta.stop)
        logprobs = None if self.scores is None else self.scores.of(delivered, self.output)
        for part in delta.parts:
            event = {
                "event": "delta",
                "id": self.id,
                "text": part.text,
                "token_ids": part.token_ids,
                "channel": part.channel,
                "origins": [origins[i] for i in part.indices],
            }
            if logprobs is not None:
                event["logprobs"] = [logprobs[i] for i in part.indices]
            events.append(event)
        return len(delivered)

    def close(self, reason: str, events: list[dict[str, Any]]) -> None:
        """End from outside: what the output still held back is shown."""
        self.finish(reason)
        for part in self.output.flush():
            events.append(
                {
                    "event": "delta",
                    "id": self.id,
                    "text": part.text,
                    "token_ids": [],
                    "channel": part.channel,
                    "origins": [],
                }
            )

    def finish(self, reason: str, *, stop: str | int | None = None, error: str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason, self.stop_value, self.error = reason, stop, error


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1
