"""The marks the screen draws itself, in two sets; ``--ascii`` takes the second. Every mark is one cell wide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """One character per meaning, so that nothing depends on colour alone."""

    accepted: str
    rejected: str
    bonus: str
    unverified: str
    trimmed: str
    """Verified and alive, but cut off by the planned length (cap-accept)."""
    bar: str
    half_bar: str
    """The last cell of a bar that is less than full."""
    bar_space: str
    tick: str
    cut: str
    step_accepted: str
    step_verified: str
    vertical: str
    horizontal: str
    fence_open: str
    fence_close: str
    bullet: str
    user: str
    folded: str
    unfolded: str
    separator: str
    warning: str
    ellipsis: str


UNICODE = Glyphs(
    accepted="✓",
    rejected="✗",
    bonus="★",
    unverified="·",
    trimmed="−",
    bar="█",
    half_bar="▌",
    bar_space="░",
    tick="│",
    cut="╌",
    step_accepted="█",
    step_verified="░",
    vertical="│",
    horizontal="─",
    fence_open="╭",
    fence_close="╰",
    bullet="•",
    user="❯",
    folded="▸",
    unfolded="▾",
    separator="·",
    warning="▲",
    ellipsis="…",
)

ASCII = Glyphs(
    accepted="+",
    rejected="x",
    bonus="*",
    unverified=".",
    trimmed="-",
    bar="#",
    half_bar="=",
    bar_space=".",
    tick="|",
    cut="-",
    step_accepted="#",
    step_verified=".",
    vertical="|",
    horizontal="-",
    fence_open="+",
    fence_close="+",
    bullet="*",
    user=">",
    folded=">",
    unfolded="v",
    separator="|",
    warning="!",
    ellipsis="~",
)


def glyphs(ascii_only: bool) -> Glyphs:
    return ASCII if ascii_only else UNICODE
