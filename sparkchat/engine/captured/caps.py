"""How many drafts each request of a captured step might have taken at most, where the device settled it and told only
what was taken."""

from __future__ import annotations

from collections.abc import Sequence

from sparkchat.engine.calibration import survival_of
from sparkchat.engine.captured.outcome import CapturedOutcome
from sparkchat.engine.lagged_lengths import BatchBudgets
from sparkchat.engine.lagged_plan import admit
from sparkchat.engine.step_plan import StepIntent
from sparkchat.params import Correction


def caps_of(
    intents: Sequence[StepIntent],
    budgets: BatchBudgets,
    outcomes: Sequence[CapturedOutcome],
    temperatures: Sequence[float] | None,
) -> dict[int, int]:
    """By index, of the cap-accept requests that are planned; not in a step that cuts one at the end of its answer.

    ``temperatures``: of the pair's confidences, by which the device ranks drafts; None leaves them as they are.
    """
    caps = {
        index: min(budget.drafts, intents[index].draft_len)
        for index, budget in budgets.own.items()
        if intents[index].mode == "cap-accept"
    }
    if budgets.shared is None or all(intents[index].mode != "cap-accept" for index in budgets.sharing):
        return caps
    correction = None if temperatures is None else Correction(tuple(temperatures), (0.0,) * len(temperatures))
    alive = [survival_of(outcomes[index].row.confidence_logit, correction) for index in budgets.sharing]
    lens = admit(alive, [intents[index].draft_len for index in budgets.sharing], budgets.shared.drafts)
    shared = zip(budgets.sharing, lens, strict=True)
    return caps | {index: length for index, length in shared if intents[index].mode == "cap-accept"}
