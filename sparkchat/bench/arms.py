"""The ways to decode that ``bench`` sets side by side."""

from __future__ import annotations

from dataclasses import dataclass

from sparkchat.errors import UsageError
from sparkchat.options import unknown
from sparkchat.params import Mode

BASELINE = "off"
WITHOUT_TABLE = "compact-no-table"
EVERY_LENGTH = "fixed"
"""Stands for all fixed lengths: static, static-1, static-2, ..."""


@dataclass(frozen=True)
class Arm:
    """One way to decode the same prompts."""

    name: str
    mode: Mode
    block_size: int | None = None
    """Drafts a step, where it is not the run's own."""
    by_table: bool = True
    """Plans may look at the step costs."""


def possible_arms(kind: str | None, has_confidence: bool, block: int | None) -> dict[str, Arm]:
    """By name, in order: what this pair can do. ``kind`` of drafter: dspark, mtp, or None without one."""
    arms = [Arm(BASELINE, "off")]
    if kind == "mtp":
        arms.append(Arm("mtp", "static"))
    elif kind is not None:
        arms.append(Arm("static", "static"))
        if has_confidence:
            arms += [
                Arm("compact", "compact"),
                Arm(WITHOUT_TABLE, "compact", by_table=False),
                Arm("cap-accept", "cap-accept"),
            ]
        arms += [Arm(f"static-{length}", "static", length) for length in range(1, block or 0)]
    return {arm.name: arm for arm in arms}


def chosen_arms(names: list[str] | None, possible: dict[str, Arm]) -> list[Arm]:
    """The named arms, plain decoding first; without names all but the shorter static blocks. Raises UsageError."""
    if names is None:
        return [arm for arm in possible.values() if not arm.name.startswith("static-")]
    fixed = [name for name in possible if name == "static" or name.startswith("static-")]
    wanted = [part for name in names for part in (fixed if name == EVERY_LENGTH and fixed else [name])]
    for name in wanted:
        if name not in possible:
            raise UsageError(f"--arms: {unknown('arm', name, [*possible, EVERY_LENGTH])}")
    return [possible[name] for name in dict.fromkeys([BASELINE, *wanted])]
