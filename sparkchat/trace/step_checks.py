"""What must hold within one step line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from sparkchat.params import MODES
from sparkchat.trace.counts import accepted_drafts

_TOLERANCE = 1e-6


def step_problems(step: Mapping[str, Any], block_size: int | None) -> Iterator[tuple[str, str]]:
    """(check, what does not hold) of one step; ``block_size`` is that of its answer, where known."""
    for name, check in _STEP_CHECKS:
        for message in check(step):
            yield name, message
    if step["mode"] == "static" and block_size is not None and len(step["draft_ids"]) != block_size:
        message = f"a static step proposed {len(step['draft_ids'])} drafts, expected block size {block_size}"
        yield "static block", message


def _check_rows(step: Mapping[str, Any]) -> Iterator[str]:
    if step["rows"] != step["verify_len"] + 1:
        yield f"rows is {step['rows']}, verify_len + 1 is {step['verify_len'] + 1}"


def _check_verify_len(step: Mapping[str, Any]) -> Iterator[str]:
    if step["verify_len"] > len(step["draft_ids"]):
        yield f"verify_len {step['verify_len']} of {len(step['draft_ids'])} drafts"
    if step["mode"] == "off" and step["draft_ids"]:
        yield f"{len(step['draft_ids'])} drafts in mode off"


def _check_accepted(step: Mapping[str, Any]) -> Iterator[str]:
    if step["correct_drafts"] > step["verify_len"]:
        yield f"{step['correct_drafts']} drafts accepted of {step['verify_len']} verified"
    accepted = accepted_drafts(step)
    if step["committed_ids"][:accepted] != step["draft_ids"][:accepted]:
        yield f"the first {accepted} committed ids are not the first {accepted} drafts"


def _check_committed(step: Mapping[str, Any]) -> Iterator[str]:
    committed = len(step["committed_ids"])
    if committed > step["verify_len"] + 1:
        yield f"{committed} ids committed from {step['verify_len'] + 1} verified rows"
    if committed > step["correct_drafts"] + 1:
        yield f"{committed} ids committed with {step['correct_drafts']} accepted drafts"
    bonus = step.get("bonus_token")
    if bonus is not None and step["committed_ids"][-1:] != [bonus]:
        yield f"bonus_token {bonus} is not the last committed id"


def _check_cap(step: Mapping[str, Any]) -> Iterator[str]:
    trim = step.get("cap_trim")
    if step["mode"] == "compact" and trim is not None:
        yield f"cap_trim is {trim} in compact, where it cannot be known"
    if trim is not None and step["correct_drafts"] + trim > len(step["draft_ids"]):
        yield f"{step['correct_drafts']} accepted and {trim} trimmed of {len(step['draft_ids'])} drafts"


def _check_reject(step: Mapping[str, Any]) -> Iterator[str]:
    reject = step.get("reject")
    if reject is None:
        return
    position = reject.get("pos")
    if not isinstance(position, int) or not 0 <= position < step["verify_len"]:
        yield f"reject.pos is {position!r} with {step['verify_len']} drafts verified"
    elif position < len(step["draft_ids"]) and reject.get("draft_id") != step["draft_ids"][position]:
        yield f"reject.draft_id {reject.get('draft_id')!r} is not the draft at {position}"


def _check_lengths(step: Mapping[str, Any]) -> Iterator[str]:
    for name in ("draft_text", "draft_prob", "target_prob", "confidence_logit", "confidence", "survival"):
        values = step.get(name)
        if values and len(values) != len(step["draft_ids"]):
            yield f"{name} has {len(values)} entries for {len(step['draft_ids'])} drafts"


def _check_survival(step: Mapping[str, Any]) -> Iterator[str]:
    values = [value for value in step.get("survival") or [] if value is not None]
    if any(not 0.0 <= value <= 1.0 for value in values):
        yield "a survival is not between 0 and 1"
    if any(after > before + _TOLERANCE for before, after in pairwise(values)):
        yield "survival rises along the block"


def _check_probabilities(step: Mapping[str, Any]) -> Iterator[str]:
    reject = step.get("reject") or {}
    for name in ("draft_prob", "target_prob", "confidence"):
        if any(value is not None and not 0.0 <= value <= 1.0 + _TOLERANCE for value in step.get(name) or []):
            yield f"a {name} is not between 0 and 1"
    for name in ("p_draft", "p_target"):
        value = reject.get(name)
        if value is not None and not 0.0 <= value <= 1.0 + _TOLERANCE:
            yield f"reject.{name} {value} is not between 0 and 1"


def _check_mode(step: Mapping[str, Any]) -> Iterator[str]:
    for name in ("mode", "mode_requested"):
        if step.get(name) is not None and step[name] not in MODES:
            yield f"{name} {step[name]!r} is none of {', '.join(MODES)}"


_STEP_CHECKS: tuple[tuple[str, Callable[[Mapping[str, Any]], Iterator[str]]], ...] = (
    ("rows = verify_len + 1", _check_rows),
    ("verify_len", _check_verify_len),
    ("accepted", _check_accepted),
    ("committed", _check_committed),
    ("cap_trim", _check_cap),
    ("reject", _check_reject),
    ("lengths", _check_lengths),
    ("survival", _check_survival),
    ("probabilities", _check_probabilities),
    ("mode", _check_mode),
)
