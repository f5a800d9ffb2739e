"""Many requests decoding together on paper: step times from a table, chances of drafts drawn, and the engine's own
planning. Knowledge is as old as with captured steps: a step is launched before the one ahead of it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.drafters import intend_all, learn_blocks
from sparkchat.engine.lagged_lengths import choose_budgets, lengths_of
from sparkchat.engine.lagged_plan import admit
from sparkchat.engine.loop import observe
from sparkchat.engine.outlook import Outlook
from sparkchat.engine.request import RequestState
from sparkchat.params import CostTable, GenerateRequest, SamplingParams
from sparkchat.simulation import BUILT_IN, SimulatedAcceptance

BLOCK, PROMPT = 7, 40
H200 = Path(__file__).parents[1] / "fixtures" / "h200_costs.json"


def profile(name_or_chance: str | float) -> SimulatedAcceptance:
    if isinstance(name_or_chance, str):
        return SimulatedAcceptance(name_or_chance, BUILT_IN[name_or_chance])
    return SimulatedAcceptance("even", (name_or_chance,) * BLOCK)


def h200_costs() -> CostLookup:
    return CostLookup(CostTable.from_json({k: v for k, v in json.loads(H200.read_text()).items() if k != "about"}))


def pair_of(cost: CostLookup | None, *, is_lagged: bool = True) -> Any:
    drafter = SimpleNamespace(has_confidence=True)
    return SimpleNamespace(
        cost=cost, refinement=None, drafter=drafter, reason_off=None, outlook=Outlook(), is_lagged=is_lagged
    )


def state_of(answer: int, done: int = 0, seed: int | None = None, temperature: float = 0.0) -> RequestState:
    """A request that has delivered its first token and ``done`` more."""
    prompt = (1,) * PROMPT
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=answer)
    request = GenerateRequest(id="r", prompt_ids=prompt, sampling=sampling)
    state = RequestState(request, prompt, BLOCK, 1 << 20, seed or 0, output=None, history=None)
    state.tokens, state.delivered = [1] * (PROMPT + 1 + done), [1] * (1 + done)
    return state


@dataclass
class Served:
    """Requests that are replaced as they end; ``fixed`` verifies so many drafts of each, None plans."""

    pair: Any
    acceptance: SimulatedAcceptance
    requests: int
    answer: int
    fixed: int | None = None
    seed: int = 0
    tokens: float = 0.0
    """Expected of the chances that were verified."""
    milliseconds: float = 0.0
    drafting: list[int] = field(default_factory=list)
    """Of each step: how many drafted."""

    def __post_init__(self) -> None:
        self._source = np.random.default_rng(self.seed)
        self._unread: list[tuple[Any, ...]] = []
        self.states = [state_of(self.answer, int(self._source.integers(self.answer - 2))) for _ in range(self.requests)]

    @property
    def speed(self) -> float:
        return self.tokens / self.milliseconds

    def steps(self, count: int) -> Served:
        for _ in range(count):
            self._step()
            self.states = [s for s in self.states if s.remaining > 0][: self.requests]
            self.states += [state_of(self.answer) for _ in range(self.requests - len(self.states))]
        return self

    def _step(self) -> None:
        states = self.states
        drawn = self._source.random((len(states), BLOCK))
        chance = (drawn * (2.0 - drawn)) ** np.array(self.acceptance.exponents)
        alive = np.cumprod(chance, axis=1)
        passed = np.cumprod(self._source.random(chance.shape) < chance, axis=1).sum(axis=1)
        room = [max(0, state.remaining - 1) for state in states]
        lens = self._plan(alive, room) if self.fixed is None else self._all_verify(self.fixed, room)
        self.tokens += sum(1.0 + float(alive[i, :n].sum()) for i, n in enumerate(lens))
        for i, state in enumerate(states):
            run = [1] * (1 + min(int(passed[i]), lens[i]))
            state.tokens += run
            state.delivered += run
            state.round += 1

    def _take(self, rows: int, drafting: int) -> None:
        """The time of a step of so many drafts' rows, whose drafts run over so many seats."""
        count, cached = len(self.states), sum(state.kv_len for state in self.states)
        costs = self.pair.cost.at(count, cached, drafting)
        self.milliseconds += costs.step_ms(count + rows) if drafting else costs.plain_ms

    def _all_verify(self, length: int, room: list[int]) -> list[int]:
        self._take(length * len(room), len(room) if length else 0)
        return [min(length, most) for most in room]

    def _plan(self, alive: np.ndarray, room: list[int]) -> list[int]:
        states = self.states
        intents = intend_all(states, "compact", self.pair)
        budgets = choose_budgets(states, intents, [s.round for s in states], self.pair)
        lens = [0] * len(states)
        for i, budget in budgets.own.items():
            lens[i] = min(budget.drafts, room[i])
        if budgets.shared is not None:
            rows = [alive[i].tolist() for i in budgets.sharing]
            given = admit(rows, [min(intents[i].limit, room[i]) for i in budgets.sharing], budgets.shared.drafts)
            for i, length in zip(budgets.sharing, given, strict=True):
                lens[i] = length
        last = max((i + 1 for i, intent in enumerate(intents) if intent.draft_len), default=0)
        self.drafting.append(sum(intent.draft_len > 0 for intent in intents))
        self._take(sum(lens), last)
        self._read()
        for i, (state, intent) in enumerate(zip(states, intents, strict=True)):
            budget = budgets.of(i)
            chosen = lengths_of(intent, None if budget is None else lens[i], budget, budgets.paused_ms)
            self._unread.append((state, intent, chosen, alive[i, : intent.draft_len].tolist(), state.round))
        return lens

    def _read(self) -> None:
        told = [one for one in self._unread if one[0].remaining > 0]
        for state, intent, chosen, alive, round_ in told:
            observe(state, intent, chosen)
            state.stale.keep(round_, alive)
        learn_blocks(self.pair, [one[0] for one in told], [one[3] for one in told])
        self._unread = []
