"""One token of an answer: where it lies, and how it came about, in a line of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkchat.ui.document import Section
from sparkchat.ui.origins import OriginRun
from sparkchat.ui.stats import number
from sparkchat.ui.step_log import MOST_STEPS, StepRecord, first_number

NOT_AT_HAND = f"is not at hand any more: the last {MOST_STEPS} steps are, and a trace has them all"


@dataclass(frozen=True)
class TokenSpan:
    """Where a token lies in its section, and which step made it."""

    section: Section
    start: int
    end: int
    origin: str
    step: int | None
    position: int | None
    """Its place among the drafts of the step, from 0; None for the target's own."""


def token_at(section: Section, offset: int, steps: Sequence[StepRecord]) -> TokenSpan | None:
    """The token that holds the character at ``offset``; ``steps`` are those of the answer that are still at hand.

    None where nothing is known of the origin: a question, a note, or an answer that was loaded from disk.
    """
    run = section.origins.at(offset)
    if run is None:
        return None
    record = find_step(steps, run.step)
    if run.origin != "draft" or record is None:
        return TokenSpan(section, run.start, run.end, run.origin, run.step, None)
    return _draft_at(section, offset, run, record.step)


def find_step(steps: Sequence[StepRecord], step: int | None) -> StepRecord | None:
    index = step_index(steps, step)
    return None if index is None else steps[index]


def step_index(steps: Sequence[StepRecord], step: int | None) -> int | None:
    """Where the step of that number is; the steps of an answer are numbered without gaps."""
    if step is None or not steps:
        return None
    index = step - first_number(steps)
    return index if 0 <= index < len(steps) and steps[index].step.get("i") == step else None


def _draft_at(section: Section, offset: int, run: OriginRun, step: dict[str, Any]) -> TokenSpan:
    start = run.start
    texts = (step.get("draft_text") or ())[: step.get("correct_drafts") or 0]
    for position, text in enumerate(texts):
        end = min(start + len(str(text)), run.end)
        if offset < end or position == len(texts) - 1:
            return TokenSpan(section, start, max(end, start + 1), run.origin, run.step, position)
        start = end
    return TokenSpan(section, run.start, run.end, run.origin, run.step, None)


def walked(sections: Sequence[Section], at: TokenSpan | None, by: int) -> tuple[Section, int] | None:
    """(section, offset) of the token before or after ``at``; without one, the last token. None where there is none."""
    known = [section for section in sections if section.origins and not section.is_folded]
    if not known:
        return None
    if at is None or at.section not in known:
        return known[-1], known[-1].origins.end - 1
    offset = at.end if by > 0 else at.start - 1
    if 0 <= offset < at.section.origins.end:
        return at.section, offset
    index = known.index(at.section) + by
    if not 0 <= index < len(known):
        return at.section, at.start
    return known[index], 0 if by > 0 else known[index].origins.end - 1


def token_line(span: TokenSpan, record: StepRecord | None) -> str:
    """What is known of the token: its kind, its step, and the draft it stands in place of."""
    text = repr(span.section.slice(span.start, span.end))
    if span.step is None:
        return f"{text} from the prompt pass, before any draft"
    where = f"step {span.step + 1}"
    if record is None:
        return f"{text} {span.origin}, {where}, which {NOT_AT_HAND}"
    step = record.step
    if span.origin == "corrected":
        return f"{text} {_correction(step)}, {where}"
    if span.origin == "draft":
        place = span.position or 0
        survival, chance = _at(step, "survival", place), _at(step, "draft_prob", place)
        chances = f"survival {number(survival, 2)}, p(draft) {number(chance, 2)}"
        return f"{text} draft {place + 1}, accepted: {chances}, {where}"
    if span.origin == "bonus":
        verify_len, drafts = step.get("verify_len") or 0, len(step.get("draft_ids") or ())
        cut = f" (cut at {verify_len} of {drafts})" if verify_len < drafts else ""
        return f"{text} the target's own, after {step.get('correct_drafts') or 0} accepted drafts{cut}, {where}"
    return f"{text} plain decoding, nothing drafted, {where}"


def _correction(step: dict[str, Any]) -> str:
    reject = step.get("reject") or {}
    place = int(reject.get("pos") or 0)
    drafts = step.get("draft_text") or ()
    draft = repr(str(drafts[place])) if place < len(drafts) else f"token {reject.get('draft_id', '-')}"
    chances = f"p(draft) {number(reject.get('p_draft'), 2)}, p(target) {number(reject.get('p_target'), 2)}"
    return f"chosen by the target over draft {place + 1} {draft}: {chances}, rank {reject.get('target_rank', '-')}"


def _at(step: dict[str, Any], name: str, place: int) -> float | None:
    values = step.get(name) or ()
    return values[place] if place < len(values) else None
