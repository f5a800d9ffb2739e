"""A step's record on the host, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkchat.engine.calibration import corrected_survival
from sparkchat.engine.captured.state import Records
from sparkchat.engine.records import RowOutcome
from sparkchat.params import Correction


@dataclass(frozen=True)
class CapturedOutcome:
    """What one request's part of a step came to."""

    row: RowOutcome
    verify_len: int
    is_draft_sound: bool
    damaged_from: int
    """Drafts before the first target row that is not of numbers; more than can be taken when all are."""

    def survival(self, correction: Correction | None) -> list[float]:
        """Survival of every draft, as the loop computes it."""
        if not self.row.confidence_logit:
            return []
        logits = torch.tensor([self.row.confidence_logit])
        values = corrected_survival(logits.masked_fill(logits.isnan(), -torch.inf), [correction])
        return values[0].tolist()


def outcomes_of(records: Records, host: Tensor, draft_lens: Sequence[int]) -> list[CapturedOutcome]:
    """The outcomes of the first seats; host is the copy of ``records.device_rows``."""
    numbers, rows = records.read(host[: len(draft_lens)])
    found = []
    for r, length in enumerate(draft_lens):
        row = RowOutcome(
            draft_ids=rows["ids"][r, :length].long().tolist(),
            confidence_logit=rows["confidence"][r, :length].tolist(),
            p_draft=rows["p_draft"][r, :length].tolist(),
            p_target=rows["p_target"][r, :length].tolist(),
            taken=numbers["taken"][r],
            full=numbers["full"][r],
            next_id=numbers["next_id"][r],
            target_rank=_constant(numbers["target_rank"][r]),
        )
        found.append(
            CapturedOutcome(
                row=row,
                verify_len=numbers["verify_len"][r],
                is_draft_sound=bool(numbers["is_draft_sound"][r]),
                damaged_from=numbers["damaged_from"][r],
            )
        )
    return found


def _constant(value: int):  # type: ignore[no-untyped-def]
    return lambda: value
