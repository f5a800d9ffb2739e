"""Simulated acceptance: drafts pass with given chances, whatever the models say. For timing: the text means nothing.

Standard library only, so that the command line can check a profile before anything is loaded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from sparkchat.errors import UsageError
from sparkchat.paths import typed_path

BUILT_IN = {
    "chat": (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761),
    "code": (0.886, 0.872, 0.860, 0.861, 0.858, 0.859, 0.851),
    "math": (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882),
}
"""Conditional acceptance by position of the paper's DSpark on Qwen3-4B (arXiv 2607.05147, figure 2, digitised)."""
WHAT = "--simulate-acceptance"


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Chances by draft position."""

    label: str
    """As it was asked for; shown wherever numbers of such a run are."""
    conditional: tuple[float, ...]
    """P(draft k passes | those before it passed)."""

    @property
    def exponents(self) -> tuple[float, ...]:
        """By position: a draft's own chance is (u (2 - u)) ** exponent, u even in [0, 1); see ``exponent_of``."""
        return tuple(exponent_of(mean) for mean in self.conditional)

    @property
    def survivals(self) -> tuple[float, ...]:
        """P(drafts 1..k all pass)."""
        return tuple(math.prod(self.conditional[: k + 1]) for k in range(len(self.conditional)))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round that verifies everything, the bonus token among them."""
        return 1.0 + self.accepted_drafts(len(self.conditional))

    def accepted_drafts(self, block: int) -> float:
        """Mean drafts accepted of blocks of ``block``, all of them verified."""
        return sum(accumulate(self.conditional[:block], mul))

    def check_block(self, block: int) -> None:
        """Raises UsageError when the profile is shorter than a block."""
        if block > len(self.conditional):
            raise UsageError(
                f"{WHAT} {self.label} has {len(self.conditional)} survivals for blocks of {block}; "
                f"give {block}, or --block-size {len(self.conditional)}"
            )


def exponent_of(mean: float) -> float:
    """The a for which (u (2 - u)) ** a, u even in [0, 1), has this mean, which is B(1 + a, 1/2) / 2.

    Drafts of one position have chances of their own, so that confidences have something to tell. This law of them is
    the one of its kind, 1 - (1 - u) ** 2 for the inner term, that comes nearest to what was published of DSpark on
    Qwen3-4B: its confidences tell surviving prefixes of chats from others with an area under the curve of 0.82, 0.81,
    0.86, 0.91 at positions 1, 3, 5, 7 (arXiv 2607.05147, figure 6), this law's with 0.86, 0.81, 0.80, 0.81; cut by a
    threshold where 5.1 tokens of 8 are left to verify, 91 % of the accepted ones remain in both (figure 5).
    """
    low, high = 0.0, 1e12
    for _ in range(100):
        middle = (low + high) / 2
        found = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(1.0 + middle) - math.lgamma(1.5 + middle))
        low, high = (middle, high) if found > mean else (low, middle)
    return low


def parse_simulation(text: str) -> SimulatedAcceptance:
    """A built-in name, a comma list of survivals, or a file that holds such a list. Raises UsageError."""
    name = text.strip()
    if name in BUILT_IN:
        return SimulatedAcceptance(name, BUILT_IN[name])
    survivals = _listed(name)
    if survivals is None:
        survivals = _listed(_content(name))
    if not survivals:
        raise UsageError(
            f"{WHAT} {name} is no list of survivals; give {', '.join(BUILT_IN)}, a list like 0.8,0.6,0.5, "
            "or a file with one"
        )
    if not all(0.0 <= value <= 1.0 for value in survivals) or any(a < b for a, b in pairwise(survivals)):
        raise UsageError(f"{WHAT} {name}: survivals are chances that never grow with the position; check the list")
    before = (1.0, *survivals)
    return SimulatedAcceptance(name, tuple(b / a if a else 0.0 for a, b in pairwise(before)))


def acceptance_of_length(length: float, block: int) -> SimulatedAcceptance:
    """The profile of one chance for all positions under which a whole block of drafts yields ``length`` tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(block + 1)) < length else (low, middle)
    return SimulatedAcceptance(f"length {length:g}", (low,) * block)


def _listed(text: str) -> list[float] | None:
    """Numbers with commas or spaces between them, in brackets or not; None when that is not what the text is."""
    try:
        return [float(part) for part in text.strip().strip("[]").replace(",", " ").split()]
    except ValueError:
        return None


def _content(name: str) -> str:
    path = typed_path(name)
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        return ""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if isinstance(found, dict):
        found = found.get("survivals")
    return json.dumps(found) if isinstance(found, list) else ""
