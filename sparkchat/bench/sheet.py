"""What a bench has measured so far, what it has not, and how long that will take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparkchat.bench.measuring import Tally, merged

MOST_ROUNDS = 40
"""However quick they are."""


class Sheet:
    """Rounds by concurrency and arm, as they come. Every concurrency is measured to its end before the next."""

    def __init__(self, arms: Sequence[str], rounds: Mapping[int, int], least_seconds: float = 0.0) -> None:
        """``rounds``: how many each arm has at least, by concurrency in ascending order; more as far as an arm's steps
        take less than ``least_seconds`` in those."""
        self.arms, self.rounds = list(arms), dict(rounds)
        self._least_seconds = least_seconds
        self._tallies: dict[tuple[int, str], list[Tally]] = {(n, arm): [] for n in rounds for arm in arms}
        self._seconds: dict[tuple[int, str], list[float]] = {pair: [] for pair in self._tallies}

    def add(self, together: int, arm: str, tally: Tally, seconds: float) -> None:
        """One round, and how long it took in all."""
        self._tallies[together, arm].append(tally)
        self._seconds[together, arm].append(seconds)

    def num_wanted(self, together: int) -> int:
        """Rounds that each arm is to have: settled when all have had one, by how long the steps took that counted."""
        if self._common(together) == 1:
            least = min(self._tallies[together, arm][0].sums.seconds for arm in self.arms)
            wanted = math.ceil(self._least_seconds / least) if least else 0
            self.rounds[together] = max(self.rounds[together], min(wanted, MOST_ROUNDS))
        return self.rounds[together]

    def has_all(self, together: int, arm: str) -> bool:
        return self.num_rounds(together, arm) == self.rounds[together]

    def num_rounds(self, together: int, arm: str) -> int:
        return len(self._tallies[together, arm])

    def so_far(self, together: int, arm: str) -> Tally:
        return merged(self._tallies[together, arm])

    @property
    def num_rows(self) -> tuple[int, int]:
        """Pairs of concurrency and arm that have all their rounds, and all pairs."""
        return sum(self.has_all(*pair) for pair in self._tallies), len(self._tallies)

    @property
    def seconds(self) -> float:
        """That all rounds took, those thrown away among them."""
        return sum(map(sum, self._seconds.values()))

    def tallies(self) -> dict[int, dict[str, Tally]]:
        """What may stand side by side: at each concurrency the rounds that every arm has answered.

        Where the first of them was broken off, the arms that got to answer it.
        """
        found: dict[int, dict[str, Tally]] = {}
        for together in self.rounds:
            of = {arm: self._tallies[together, arm] for arm in self.arms}
            kept = self._common(together) or 1
            by_arm = {arm: merged(rounds[:kept]) for arm, rounds in of.items() if rounds}
            if by_arm:
                found[together] = by_arm
        return found

    def comparable(self) -> dict[int, dict[str, Tally]]:
        """Of ``tallies`` the concurrencies at which every arm has answered the same rounds."""
        return {together: found for together, found in self.tallies().items() if self._common(together)}

    def missing(self) -> list[dict[str, Any]]:
        """Concurrency, arm and number of rounds that ``tallies`` lacks; an empty list when the bench is complete."""
        found = []
        for together, wanted in self.rounds.items():
            common = self._common(together)
            for arm in self.arms:
                kept = common or min(1, len(self._tallies[together, arm]))
                if kept < wanted:
                    found.append({"concurrency": together, "arm": arm, "rounds": wanted - kept})
        return found

    def missing_in_words(self) -> str:
        """e.g. ``cap-accept at 8 together, everything at 16 and 32 together``"""
        parts, whole = [], []
        by_count: dict[int, list[dict[str, Any]]] = {}
        for lack in self.missing():
            by_count.setdefault(lack["concurrency"], []).append(lack)
        for together, lacks in by_count.items():
            wanted = self.rounds[together]
            entire = [lack["arm"] for lack in lacks if lack["rounds"] == wanted]
            if len(entire) == len(self.arms):
                whole.append(together)
                continue
            if entire:
                parts.append(f"{_listed(entire)} at {together} together")
            fewer = next((lack["rounds"] for lack in lacks if lack["rounds"] < wanted), None)
            if fewer is not None:
                whose = " of the other arms" if entire else ""
                parts.append(f"{fewer} of {wanted} rounds{whose} at {together} together")
        if whole:
            parts.append(f"everything at {_listed(whole)} together")
        return ", ".join(parts)

    def seconds_left(self) -> tuple[float, bool] | None:
        """(seconds, whether they are the least) for the rounds that are not measured; None before any is.

        Of a concurrency that has begun, the others take as long as its rounds so far (``_round_seconds``). Rounds of
        more requests lie on the line through the last two concurrencies that have begun. Of one alone nothing is known
        but that they take no less.
        """
        lasted = {n: self._round_seconds(n) for n in self.rounds if self._num_done(n)}
        if not lasted:
            return None
        left, begun = 0.0, sorted(lasted)
        last = begun[-1]
        slope = 0.0
        if len(begun) > 1:
            slope = max(0.0, (lasted[last] - lasted[begun[-2]]) / (last - begun[-2]))
        is_least = False
        for together, wanted in self.rounds.items():
            todo = wanted * len(self.arms) - self._num_done(together)
            each = lasted.get(together, lasted[last] + slope * (together - last))
            left += todo * each
            is_least |= together not in lasted and len(begun) == 1
        return left, is_least

    def _round_seconds(self, together: int) -> float:
        """Mean over arms of what a round takes. What was thrown away for captures does not come again; nor do captures,
        so that a round without some tells more than all with."""
        means = []
        for arm in self.arms:
            pairs = list(zip(self._tallies[together, arm], self._seconds[together, arm], strict=True))
            clean = [seconds for tally, seconds in pairs if not tally.captures]
            kept = clean or [seconds - tally.seconds_thrown_away for tally, seconds in pairs]
            if kept:
                means.append((sum(kept) / len(kept), bool(clean)))
        sure = [mean for mean, is_clean in means if is_clean] or [mean for mean, _ in means]
        return sum(sure) / len(sure)

    def _num_done(self, together: int) -> int:
        return sum(len(self._tallies[together, arm]) for arm in self.arms)

    def _common(self, together: int) -> int:
        return min(len(self._tallies[together, arm]) for arm in self.arms)


def _listed(words: Sequence[object]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last
