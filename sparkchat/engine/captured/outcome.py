"""A step's record on the host, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparkchat.engine.calibration import survival_of
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
        return survival_of(self.row.confidence_logit, correction)


def outcomes_of(records: Records, host: Tensor, draft_lens: Sequence[int]) -> list[CapturedOutcome]:
    """The outcomes of the first seats; host is the copy of ``records.device_rows``."""
    numbers, rows = records.read(host[: len(draft_lens)])
    # At once for all requests: a call on a tensor takes as long as the lists of one request.
    ids, confidence, p_draft, p_target = (rows[name].tolist() for name in ("ids", "confidence", "p_draft", "p_target"))
    found = []
    for r, length in enumerate(draft_lens):
        row = RowOutcome(
            draft_ids=[int(number) for number in ids[r][:length]],
            confidence_logit=confidence[r][:length],
            p_draft=p_draft[r][:length],
            p_target=p_target[r][:length],
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
