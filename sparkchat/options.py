"""The options of a run by their long names: one table that flags, environment, profiles and requests share.

A value is checked here for its type only; ranges belong to the class that uses it (``SamplingParams``).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sparkchat.errors import UsageError
from sparkchat.finite import is_number, short
from sparkchat.params import DRAFT_TEMPERATURES, MODES

Kind = Literal["number", "whole", "switch", "text", "choice", "texts", "bias"]

_WANTED: dict[Kind, str] = {
    "number": "a finite number",
    "whole": "a whole number",
    "switch": "true or false",
    "text": "a text",
    "choice": "one of the listed words",
    "texts": "a text, or a list of texts",
    "bias": "token ids with a finite value to add, e.g. 42=-1.5",
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Option:
    """One option: its long name with underscores, and what its value looks like."""

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    is_sampling: bool = False
    """A field of ``SamplingParams``."""

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else _WANTED[self.kind]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SPARKCHAT_" + self.name.upper()


def _table(*options: Option) -> dict[str, Option]:
    return {option.name: option for option in options}


SAMPLING: dict[str, Option] = _table(
    *(
        Option(name, "number", is_sampling=True)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    ),
    *(Option(name, "whole", is_sampling=True) for name in ("top_k", "min_tokens", "max_tokens", "seed")),
    Option("logit_bias", "bias", is_sampling=True),
    Option("stop", "texts", is_sampling=True),
    Option("ignore_eos", "switch", is_sampling=True),
)
"""The fields of ``SamplingParams``."""

RUN: dict[str, Option] = _table(
    Option("mode", "choice", tuple(MODES)),
    Option("context", "whole"),
    Option("cache_tokens", "whole"),
    Option("think", "switch"),
    Option("reasoning_effort", "text"),
    Option("system", "text"),
    Option("device", "text"),
    Option("dtype", "choice", ("auto", "float32", "bfloat16")),
    *SAMPLING.values(),
)
"""What ``[run]`` of a profile may set."""

RESOLVED: dict[str, Option] = RUN | _table(
    Option("drafter", "text"),
    Option("block_size", "whole"),
    Option("accept_cap", "whole"),
    Option("draft_temperature", "choice", tuple(DRAFT_TEMPERATURES)),
    Option("refine", "switch"),
    Option("tp", "whole"),
    Option("graphs", "switch"),
)
"""What flags and ``SPARKCHAT_*`` variables may set."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like ``word``, or None when none is close."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def unknown(what: str, word: object, known: Iterable[str]) -> str:
    """One sentence on an unknown word, with the nearest known one."""
    names = sorted(known)
    near = nearest(str(word), names, cutoff=0.5)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(names)}"
    return f"{what} {word!r} is unknown; {hint}"


def check(option: Option, value: Any, where: str) -> Any:
    """A value that already has a type (TOML, JSON, a parsed flag). ``where`` names it in the error."""
    checked = _CHECKS[option.kind](value)
    if checked is None or (option.choices and checked not in option.choices):
        raise UsageError(f"{where} is {short(value)}; give {option.wanted}")
    return checked


def parse(option: Option, text: str, where: str) -> Any:
    """A value given as text (an environment variable, or typed during a session)."""
    value: Any = text
    if option.kind == "switch":
        word = text.strip().lower()
        value = True if word in _TRUE else False if word in _FALSE else text
    elif option.kind in ("number", "whole"):
        value = _number(text, whole=option.kind == "whole")
    elif option.kind == "bias":
        value = [part for part in text.split(",") if part.strip()]
    return check(option, value, where)


def _number(text: str, *, whole: bool) -> Any:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return text


def _as_number(value: Any) -> float | None:
    return value if is_number(value) else None


def _as_whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_text(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return value


def _as_texts(value: Any) -> tuple[str, ...] | None:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or any(_as_text(item) is None for item in values):
        return None
    return tuple(values)


def _as_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    """``{"42": -1.5}``, ``[[42, -1.5]]`` or ``["42=-1.5"]``; a later entry for the same id wins."""
    pairs: Iterable[Any] = value.items() if isinstance(value, dict) else value
    if isinstance(value, str) or not isinstance(value, (dict, list, tuple)):
        return None
    found: dict[int, float] = {}
    for pair in pairs:
        parts = pair.split("=", 1) if isinstance(pair, str) else pair
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or any(isinstance(part, bool) for part in parts):
            return None
        # int() would make 5 of 5.7 and 10 of "1_0": another token than was written.
        if not isinstance(parts[0], int) and not re.fullmatch(r"\s*\d+\s*", str(parts[0]), re.ASCII):
            return None
        try:
            token_id, bias = int(parts[0]), float(parts[1])
        except (TypeError, ValueError, OverflowError):
            return None
        # JSON has no infinity, and the engine is reached through JSON: -100 forbids a token as well.
        if not math.isfinite(bias) or token_id < 0:
            return None
        found[token_id] = bias
    return tuple(found.items())


_CHECKS = {
    "number": _as_number,
    "whole": _as_whole,
    "switch": _as_switch,
    "text": _as_text,
    "choice": _as_text,
    "texts": _as_texts,
    "bias": _as_bias,
}
