"""Has steps captured ahead of timing that requests together are sure to replay: rounds that meet them first would be
thrown away.

Those are whole blocks of so many requests, and their drafts. What plans trim is a matter of chance, and the table that
they are made by was measured on much of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkchat.bench.arms import Arm
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.params import SamplingParams
from sparkchat.sampling_kind import sampling_kind


def capture_ahead(
    run: EngineRun,
    arms: Sequence[Arm],
    concurrency: int,
    sampling: SamplingParams,
    block: int,
    begin: Callable[[], None],
    draft_temperature: str = "target",
) -> int | None:
    """Capture for rounds of ``concurrency`` requests of ``arms``; returns how many steps that were, or None where there
    is nothing to capture.

    ``block``: drafts of a request where the arm does not say. ``begin`` is called before anything is captured.
    """
    words = sampling_kind(sampling).split("-")
    takes_reference = "penalised" in words or draft_temperature != "target"  # which replays nothing
    # One request meets what was captured at the start, and the rest in its first round.
    if concurrency == 1 or takes_reference or not run.captures:
        return None
    begin()
    blocks = {(0 if arm.mode == "off" else arm.block_size or block, _shares(arm)) for arm in arms}
    return run.capture_ahead(concurrency - 1, concurrency, sorted(blocks), _draws(words))


def _shares(arm: Arm) -> bool:
    return arm.mode in ("compact", "cap-accept")


def _draws(words: Sequence[str]) -> str:
    """The kind of draw that a captured step is made for (engine/captured/laws.py), by the kind of sampling."""
    if "greedy" in words:
        return "greedy"
    return "filtered" if "filtered" in words else "sampled"
