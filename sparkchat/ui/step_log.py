"""The newest steps of the session, kept small: a step is a few kilobytes as objects, and one as bytes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, overload

MOST_STEPS = 5000
"""Steps that can be looked at; the trace has them all."""


class StepRecord(NamedTuple):
    """A step event, and the text of the token that the target added in it."""

    step: dict[str, Any]
    bonus_text: str | None


class _Kept(NamedTuple):
    request_id: str
    data: bytes
    bonus_text: str | None


class StepLog:
    """Holds the last :data:`MOST_STEPS` steps, of whichever answers they were."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._kept: deque[_Kept] = deque(maxlen=most)

    def add(self, step: dict[str, Any], bonus_text: str | None) -> None:
        data = json.dumps(step, ensure_ascii=False, separators=(",", ":"))
        self._kept.append(_Kept(step["id"], data.encode("utf-8", "surrogatepass"), bonus_text))

    def clear(self) -> None:
        self._kept.clear()

    def of(self, request_id: str | None) -> Steps:
        """The steps of one answer that are still at hand, in order."""
        return Steps([each for each in self._kept if each.request_id == request_id])


class Steps(Sequence[StepRecord]):
    """Steps that become objects when they are looked at."""

    def __init__(self, kept: Sequence[_Kept]) -> None:
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(index, slice):
            return [_record(each) for each in self._kept[index]]
        return _record(self._kept[index])


def _record(kept: _Kept) -> StepRecord:
    return StepRecord(json.loads(kept.data.decode("utf-8", "surrogatepass")), kept.bonus_text)
