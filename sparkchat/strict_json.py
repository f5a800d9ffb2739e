"""The one place where JSON is written and read strictly: no NaN, no Infinity, always valid UTF-8, one line.

Numbers that JSON cannot hold become ``null``; that is also our word for "not measured".
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Legal inside JSON strings, but line breaks for str.splitlines() and some editors: one record must stay one line.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_BREAKS = tuple(map(chr, _LINE_BREAKS))


def dumps(value: Any, *, indent: int | None = None, keep_surrogates: bool = False) -> str:
    """JSON text of ``value``; NaN and infinities become null, lone surrogates U+FFFD (or escapes, where they are kept).

    Without ``indent`` the text has no line break. Raises TypeError for what JSON cannot express.
    """
    try:
        text = _encode(value, indent)
    except ValueError:
        text = _encode(without_nonfinite(value), indent)
    if text.isascii():
        return text
    text = _LONE_SURROGATE.sub(_escape if keep_surrogates else "\ufffd", text)
    # Looking for them takes a thousandth of what replacing them does.
    return text.translate(_LINE_BREAKS) if any(map(text.__contains__, _BREAKS)) else text


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def without_nonfinite(value: Any) -> Any:
    """A copy of a JSON-like value with every NaN and infinity replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_finite_key(key): without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nonfinite(item) for item in value]
    return value


def loads(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse strict JSON. Raises ValueError for NaN, Infinity, numbers that overflow, bad UTF-8 and too deep nesting.

    With ``unique_keys`` also for an object that names a key twice.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    hook = _unique if unique_keys else None
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        if "int_max_str_digits" not in str(error):
            raise
        # Python's own words tell how to lift its limit. A hook for whole numbers would slow all others down.
        raise ValueError("a whole number has too many digits") from None


def read_member(text: bytes, name: str) -> dict[str, Any]:
    """``{name: its value}`` from an object that ``loads`` refused for a number or some bytes of another member, or for
    what stands behind it.

    Empty where it cannot be told as it was written.
    """
    try:
        decoder = json.JSONDecoder(parse_int=_whole_or_infinity)
        value = decoder.raw_decode(text.decode("utf-8", "replace").lstrip())[0][name]
        is_whole = "\ufffd" not in json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return {name: value} if is_whole else {}


def _encode(value: Any, indent: int | None) -> str:
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, indent=indent)


def _finite_key(key: Any) -> Any:
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for n, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:n]))
        raise ValueError(f"{twice[:40]!r} is given twice")
    return found


def _whole_or_infinity(text: str) -> float:
    try:
        return int(text)
    except ValueError:  # more digits than Python reads
        return math.inf


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
