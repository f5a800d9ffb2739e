"""Has steps captured ahead of timing that many requests together are sure to replay: rounds that meet them first would
be thrown away.

Counted with five arms at 1 to 256 requests and answers of 48 tokens, rounds meet all of these steps but the largest,
for which short answers do not live long enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkchat.bench.arms import Arm
from sparkchat.bench.engine_runs import EngineRun
from sparkchat.params import SamplingParams

FEW = 8
"""So many requests meet other numbers of rows in every round, and a round of theirs is soon answered again."""


def capture_ahead(
    run: EngineRun, arms: Sequence[Arm], concurrency: int, before: int, sampling: SamplingParams, block: int
) -> int:
    """For rounds of ``concurrency`` requests of ``arms``, those of ``before`` requests being done; returns how many
    steps that were. ``block``: drafts of a request where the arm does not say."""
    above = max(before, FEW)
    takes_reference = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    if concurrency <= above or takes_reference:  # which replays nothing
        return 0
    blocks = {(0 if arm.mode == "off" else arm.block_size or block, _shares(arm)) for arm in arms}
    return run.capture_ahead(above, concurrency, sorted(blocks), _draws(sampling))


def _shares(arm: Arm) -> bool:
    return arm.mode in ("compact", "cap-accept")


def _draws(sampling: SamplingParams) -> str:
    if sampling.temperature == 0.0:
        return "greedy"
    return "filtered" if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 else "sampled"
