"""Names and shapes of trace lines, schema ``sparkchat.trace/1``: one JSON object a line, its kind under "type".

Every line carries ``schema`` and ``type``. Lines of one answer carry ``turn`` (0, 1, ... in the order the answers
started) and ``id`` (the request's own). ``null`` means not measured, never 0. Lengths count drafts only.

header       created (UTC), argv, redaction, and what the engine said when it was ready
turn         t_ns, sampling, seed, mode, block_size, prompt_text (the question; null when redacted or asked as token
             ids), prompt_token_ids (null and a sha256 when redacted), num_prompt_tokens, cached_tokens
step         the step record, and deltas: the text that became certain since the line before
mode_change  from, to, t_ns; id null when it holds for all answers
setting_change  changes: option -> {from, to}, t_ns; holds for this answer from the next step on. Newer than the other
             kinds: readers pass over kinds that they do not know
error        error (class), message; turn null when no answer had started
end          finish_reason, stop, error, text, thinking, token_ids, usage, speculation, timing, calibration, deltas
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SCHEMA = "sparkchat.trace/1"
FAMILY = "sparkchat.trace/"
LINE_TYPES = ("header", "turn", "step", "mode_change", "error", "end")

Check = Callable[[Any], bool]


def shape_problem(line: Mapping[str, Any]) -> str | None:
    """What keeps a line of a known type from being read, in words; None when it can be read."""
    for name, (check, want) in _REQUIRED.get(line["type"], {}).items():
        if name not in line:
            return f"{line['type']} line without {name}"
        if not check(line[name]):
            return f"{name} is not {want}"
    for name, (check, want) in _OPTIONAL.get(line["type"], {}).items():
        if line.get(name) is not None and not check(line[name]):
            return f"{name} is not {want}"
    return None


_LIMIT = 2**63
_LONGEST_BLOCK = 4096


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_whole(value) and -_LIMIT <= value < _LIMIT)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < _LIMIT


def _is_length(value: Any) -> bool:
    """A length within a block; counts are kept in lists of that size."""
    return _is_whole(value) and 0 <= value <= _LONGEST_BLOCK


def _is_turn(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_ids(value: Any) -> bool:
    # Lists are most of a file: types and bounds are asked of a list at once, not of each entry.
    return _is_list_of(value, int) and (not value or (min(value) >= 0 and max(value) < _LIMIT))


def _is_numbers(value: Any) -> bool:
    return _is_list_of(value, float, type(None)) or _list_of(lambda item: item is None or _is_number(item))(value)


def _is_texts(value: Any) -> bool:
    return _is_list_of(value, str)


def _is_list_of(value: Any, *types: type) -> bool:
    return isinstance(value, list) and set(map(type, value)).issubset(types)


def _block(check: Check) -> Check:
    """A list with an entry for each draft of a block, or for each row of it."""
    return lambda value: isinstance(value, list) and len(value) <= _LONGEST_BLOCK + 1 and check(value)


def _is_delta(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("text"))
        and _is_text(value.get("channel"))
        and _is_ids(value.get("token_ids"))
        and _is_texts(value.get("origins", []))
    )


def _is_reject(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    counts = [value.get(name) for name in ("pos", "draft_id", "target_id", "target_rank")]
    numbers = [value.get(name) for name in ("p_draft", "p_target")]
    return all(item is None or _is_count(item) for item in counts) and all(
        item is None or _is_number(item) for item in numbers
    )


def _is_cost_table(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_numbers(value.get(name, [])) for name in ("rows", "step_ms"))


def _is_speculation(value: Any) -> bool:
    """Every count a whole number and every list one of counts, where present; nothing else is relied on."""
    if not isinstance(value, dict):
        return False
    counts = [value.get(name, 0) for name in COUNT_FIELDS]
    lists = [value.get(name, []) for name in LIST_FIELDS]
    mean = value.get("mean_acceptance_length")
    return all(map(_is_count, counts)) and all(map(_is_ids, lists)) and (mean is None or _is_number(mean))


def _is_timing(value: Any) -> bool:
    return isinstance(value, dict) and all(item is None or _is_number(item) for item in value.values())


def _is_usage(value: Any) -> bool:
    return isinstance(value, dict) and all(item is None or _is_count(item) for item in value.values())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


COUNT_FIELDS = (
    "num_steps",
    "num_proposed_draft_tokens",
    "num_verified_draft_tokens",
    "num_accepted_draft_tokens",
)
LIST_FIELDS = (
    "acceptance_histogram",
    "verify_len_histogram",
    "proposed_at_pos",
    "verified_at_pos",
    "accepted_at_pos",
)

_COUNT = (_is_count, "a whole number of 0 or more")
_LENGTH = (_is_length, f"a whole number from 0 to {_LONGEST_BLOCK}")
_IDS = (_is_ids, "a list of token ids")
_TURN = (_is_count, "a turn number")
_MAYBE_TURN = (_is_turn, "a turn number or null")
_TEXT = (_is_text, "text")
_NUMBER = (_is_number, "a number")
_NUMBERS = (_block(_is_numbers), "a short list of numbers")
_BLOCK_IDS = (_block(_is_ids), f"a list of at most {_LONGEST_BLOCK + 1} token ids")
_OBJECT = (_is_object, "an object")
_DELTAS = (_list_of(_is_delta), "a list of text pieces")

_REQUIRED: dict[str, dict[str, tuple[Check, str]]] = {
    "turn": {"turn": _TURN},
    "step": {
        "turn": _TURN,
        "i": _COUNT,
        "mode": _TEXT,
        "prefix_len": _COUNT,
        "draft_ids": _BLOCK_IDS,
        "verify_len": _LENGTH,
        "rows": _LENGTH,
        "correct_drafts": _LENGTH,
        "committed_ids": _BLOCK_IDS,
    },
    "end": {
        "turn": _TURN,
        "finish_reason": _TEXT,
        "token_ids": _IDS,
        "speculation": (_is_speculation, "an object of counts"),
    },
    "error": {"message": _TEXT},
    "mode_change": {"to": _TEXT},
}
_MEASURED = (
    "draft_ms",
    "plan_ms",
    "verify_ms",
    "accept_ms",
    "step_ms",
    "predicted_step_ms",
    "predicted_theta",
    "tokens_per_second",
)
_OPTIONAL: dict[str, dict[str, tuple[Check, str]]] = {
    "header": {
        "block_size": _LENGTH,
        "argv": (_is_texts, "a list of text"),
        "heads": _OBJECT,
        "cost_table": (_is_cost_table, "an object of costs"),
        **dict.fromkeys(("model", "drafter", "device", "dtype", "mode", "reason_off", "created"), _TEXT),
    },
    "turn": {
        "t_ns": _COUNT,
        "sampling": _OBJECT,
        "mode": _TEXT,
        "block_size": _LENGTH,
        "prompt_text": _TEXT,
        "prompt_token_ids": _IDS,
        "num_prompt_tokens": _COUNT,
        "cached_tokens": _COUNT,
    },
    "step": {
        "t_ns": _COUNT,
        "mode_requested": _TEXT,
        "draft_text": (_block(_is_texts), "a short list of text"),
        "draft_prob": _NUMBERS,
        "target_prob": _NUMBERS,
        "confidence_logit": _NUMBERS,
        "confidence": _NUMBERS,
        "survival": _NUMBERS,
        "budget": _NUMBER,
        "cap_trim": _LENGTH,
        "bonus_token": _COUNT,
        "reject": (_is_reject, "an object of ids and probabilities"),
        "graph": _OBJECT,
        "fallback": _TEXT,
        "refined": _OBJECT,
        "rows_reclaimed": _NUMBER,
        "bytes_reclaimed": _NUMBER,
        "deltas": _DELTAS,
        **dict.fromkeys(_MEASURED, _NUMBER),
    },
    "end": {
        "text": _TEXT,
        "thinking": _TEXT,
        "error": _TEXT,
        "usage": (_is_usage, "an object of counts"),
        "timing": (_is_timing, "an object of numbers"),
        "calibration": _OBJECT,
        "deltas": _DELTAS,
    },
    "error": {"turn": _MAYBE_TURN, "error": _TEXT},
    "mode_change": {"turn": _MAYBE_TURN, "t_ns": _COUNT},
}
