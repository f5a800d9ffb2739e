"""Whether drafting pays for the requests that are planned together, by what their kind of requests showed lately.

Decided before every step, for the requests of that step: as many as there are now, with the context that they have now,
and the survivals that earlier steps showed (``recent_blocks``). A request that begins is therefore nothing new: where
plain steps win it begins paused. While drafting pauses nothing is learned, so that from time to time a few requests
draft, which teaches as much as if all did, and costs little. Everything here was settled by steps that are over, so the
output law stays the target's (docs/decisions/0014-drafting-pauses-for-all.md). Requests whose seed the user chose have
a gate of their own (``draft_gate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from sparkchat.engine.drafting_forecast import forecast_theta
from sparkchat.engine.recent_blocks import RecentBlocks, sample_of

if TYPE_CHECKING:
    from sparkchat.engine.cost_table import StepCosts

LOSS = 0.02
"""By how much drafting must lose to pause: what is as good as plain decoding would begin and pause for ever."""
FEW = 8
"""Blocks of a trial, and requests that draft in it: captured drafts and verifications come in tiers, so that eight
requests cost hardly more than one, and need one step."""
ENOUGH = 24
"""Blocks of a trial that won so far: so many may end the pause."""
PAUSE, LONGEST_PAUSE = 48, 768
"""Plain steps before the first trial; twice as many before each further one that loses."""
TRIAL_SHARE = 0.001
"""Of the time: pauses grow no further once trials take less. Where eight requests of 256 draft for one step, every 130
steps are enough; of one request alone whole rounds are tried, which must be rarer."""
_PATIENCE = 4
"""Plain steps that a trial waits for its blocks: of a request that ended there may be none."""
_NEWS_AGE = 4
"""Steps between two questions of those that draft, each of a fraction of a millisecond."""
_REFRESH = 16
"""Steps after which the context may have grown enough to matter."""


@dataclass
class _Trial:
    rows: dict[str, list[Sequence[float]]] = field(default_factory=dict)
    asked: int = 0
    waited: int = 0

    @property
    def seen(self) -> int:
        return sum(map(len, self.rows.values()))

    def asks(self, few: int) -> bool:
        """Whether ``few`` requests draft in the coming step: not beyond what is needed for the next verdict."""
        if self.asked < (FEW if self.seen < FEW else ENOUGH):
            self.asked, self.waited = self.asked + few, 0
            return True
        self.waited += 1
        if self.waited >= _PATIENCE:
            self.asked = self.seen
        return False


@dataclass(frozen=True)
class Company:
    """The requests of a step of which it is asked whether drafting pays."""

    kinds: Mapping[str, int]
    """How many there are of each kind of sampling."""
    block: int
    cost: StepCosts
    """Of the step when they draft."""
    plain_theta: float
    """Tokens per second of the step when they do not."""
    is_lagged: bool
    trial_loss: float = 0.0
    """By how much a step is longer in which ``FEW`` of them draft, in plain steps."""
    others: int = 0
    """Rows of other requests in the same step."""
    others_tokens: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    @property
    def longest_pause(self) -> int:
        steps = -(-FEW // min(FEW, self.count))
        return max(PAUSE, min(LONGEST_PAUSE, round(steps * self.trial_loss / TRIAL_SHARE)))

    def ratio(self, blocks: np.ndarray) -> float:
        """Tokens per second when they draft blocks like these, over those when they do not."""
        found = forecast_theta(blocks, self.count, self.cost, self.others, self.others_tokens, is_lagged=self.is_lagged)
        return found / self.plain_theta


class Outlook:
    """One for an engine. Told of finished blocks by ``learn``; asked before each step by ``admit``."""

    def __init__(self, recent: RecentBlocks | None = None) -> None:
        self.recent = RecentBlocks() if recent is None else recent
        self._apart: dict[str, Outlook] = {}
        self.is_open = True
        """Whether all drafted in the last step that was asked about."""
        self._idle, self._pause = PAUSE, PAUSE
        self._trial: _Trial | None = None
        self._tried: set[str] = set()
        """Kinds whose first trial has been due."""
        self._ratio = 1.0
        self._known: tuple[object, ...] | None = None
        self._age = self._unseen = 0

    @property
    def ratio(self) -> float:
        """As it was found last."""
        return self._ratio

    def of(self, apart: str | None) -> Outlook:
        """This one; or that of requests which decode apart for some reason, in steps between those of the others: what
        was seen is the same, pauses and trials are their own. One for both would open for these and close for those,
        and begin the pause anew with every step."""
        return self if apart is None else self._apart.setdefault(apart, Outlook(self.recent))

    def begin(self) -> None:
        """All that are asked about next have just begun. Their text may be easier than that which made the pauses long,
        so that they wait no longer than for a first trial."""
        if self._trial is None and self._pause - self._idle > PAUSE:
            self._idle, self._pause = 0, PAUSE
        # They may be of another kind.
        self._known = None

    def learn(self, blocks: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Survivals of the blocks of one finished step, by kind of sampling."""
        for kind, rows in blocks.items():
            self._unseen += len(rows)
            if self._trial is None:
                self.recent.add(kind, rows)
            else:
                self._trial.rows.setdefault(kind, []).extend(rows)

    def admit(self, key: tuple[object, ...], count: int, company: Callable[[], Company | None]) -> int:
        """How many of ``count`` requests draft in the coming step, the first of them.

        ``company`` is asked where ``key`` has changed, or some blocks were seen, and now and then; None of it: nothing
        was measured that plain steps could win by, so that all draft.
        """
        found: Company | None = None
        self._age += 1
        is_judged = self._trial is not None and self._trial.seen >= FEW
        is_news = self._unseen >= FEW and self._age >= _NEWS_AGE
        if is_judged or key != self._known or is_news or self._age >= _REFRESH:
            found = company()
            if found is not None and is_judged:
                self._judge(found)
            self._ratio = 1.0 if found is None else found.ratio(self.recent.sample(found.kinds, found.block, count))
            self._known, self._age, self._unseen = key, 0, 0
        if self._ratio >= (1.0 - LOSS if self.is_open else 1.0):
            if not self.is_open:
                self._end_trial()
                self.is_open, self._pause = True, PAUSE
            return count
        if self.is_open:
            self.is_open, self._idle = False, 0
        if found is not None and self._trial is None:
            self._welcome(found.kinds)
        return self._few_of(count)

    def _welcome(self, kinds: Iterable[str]) -> None:
        """Of a kind of which nothing is known the first trial is due at once: the pause is that of others."""
        fresh = {kind for kind in kinds if not self.recent.knows(kind)} - self._tried
        if fresh:
            self._tried |= fresh
            self._idle = self._pause

    def _few_of(self, count: int) -> int:
        if self._trial is None:
            self._idle += 1
            if self._idle <= self._pause:
                return 0
            self._trial = _Trial()
        few = min(count, FEW)
        return few if self._trial.asks(few) else 0

    def _judge(self, company: Company) -> None:
        trial = self._trial
        assert trial is not None
        if company.ratio(sample_of(list(chain.from_iterable(trial.rows.values())), company.block)) < 1.0:
            # Of a kind that is new, what is expected of any drafter would outvote what was seen.
            for kind in [k for k, rows in trial.rows.items() if len(rows) >= FEW and not self.recent.knows(k)]:
                self.recent.replace(kind, trial.rows.pop(kind))
            self._end_trial()
            self._idle, self._pause = 0, min(2 * self._pause, company.longest_pause)
        elif trial.seen >= ENOUGH:
            for kind, rows in trial.rows.items():
                self.recent.replace(kind, rows)
            self._trial, self._idle, self._pause = None, 0, PAUSE

    def _end_trial(self) -> None:
        """What a trial showed is what was shown lately."""
        trial, self._trial = self._trial, None
        for kind, rows in () if trial is None else trial.rows.items():
            self.recent.add(kind, rows)
