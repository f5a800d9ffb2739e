"""How exports put numbers and foreign text into words."""

from __future__ import annotations

import re

from sparkchat.trace.export.answers import RecordedAnswer
from sparkchat.trace.summary import num_prompt_tokens

# Controls, what turns the direction of writing, line ends that are none to us, and halves of characters.
UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Text with what cannot be seen, or may not stand in XML, spelt out; tabs and newlines stay."""
    return UNSHOWN.sub(lambda found: f"<U+{ord(found[0]):04X}>", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


def shown(value: float | None, digits: int = 2) -> str:
    """A measured number, or a dash."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def without_text(answer: RecordedAnswer) -> str:
    """What stands in place of a question whose text the trace does not have."""
    number = num_prompt_tokens(answer.start)
    size = f"{number} tokens" if number is not None else "unknown length"
    return f"a question of {size}, whose text is not in the trace"


def answer_numbers(answer: RecordedAnswer) -> str:
    """One line about an answer: tokens, speed, acceptance, mode, why it ended."""
    end = answer.end
    tokens = len(end["token_ids"]) if end else answer.num_committed + (answer.num_steps > 0)
    speed = (end.get("timing") or {}).get("tokens_per_second")
    mode = end.get("mode") or answer.start.get("mode") or "-"
    reason = end.get("finish_reason", "no end recorded")
    return " · ".join(
        (
            f"{tokens} tokens",
            f"{shown(speed)} tok/s",
            f"acceptance length {shown(answer.mean_acceptance_length)}",
            one_line(str(mode)),
            one_line(str(reason)),
        )
    )
