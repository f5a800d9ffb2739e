"""A comparison of two sessions as lines to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparkchat.strict_json import dumps
from sparkchat.trace.export.words import one_line, visible

MOST_SHOWN = 20
"""Differing answers that are shown; ``--json`` has more."""


def diff_lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield f"A: {data['a']}"
    yield f"B: {data['b']}"
    for side in ("a", "b"):
        if data["damaged_lines"][side]:
            yield f"{data['damaged_lines'][side]} damaged lines of {side.upper()} are left out"
    for setting in data["settings"]:
        yield f"{setting['name']}: A {_setting(setting['a'])}, B {_setting(setting['b'])}"
    yield _pairing(data)
    yield f"answers with the same tokens: {data['num_equal']} of {data['num_paired']}"
    for found in data["different"][:MOST_SHOWN]:
        yield from _difference(found)
    more = data["num_different"] - min(len(data["different"]), MOST_SHOWN)
    if more:
        yield f"and {more} answers more that differ"
    yield _change("acceptance length", data["acceptance_length"])
    yield _change("accepted of verified drafts", data["draft_acceptance_rate"])
    yield _change("tokens/s", data["tokens_per_second"])
    steps = data["mean_step_ms"]
    yield f"mean step: A {_number(steps['a'])} ms, B {_number(steps['b'])} ms"
    for row in data["acceptance_by_position"]:
        rates = row["rate_of_verified_steps"]
        yield f"position {row['position']}: accepted of verified A {_number(rates['a'])}, B {_number(rates['b'])}"
    methods = {data[name]["method"] for name in ("acceptance_length", "draft_acceptance_rate", "tokens_per_second")}
    for method in sorted(method for method in methods if method):
        yield f"intervals: {data['confidence_level']:.0%}, {method}"


def _pairing(data: Mapping[str, Any]) -> str:
    how = "their ids" if data["paired_by"] == "id" else "the order they began in"
    text = f"answers paired by {how}: {data['num_paired']}, of them with the same prompt {data['num_same_prompt']}"
    alone = [f"{data[f'num_only_{side}']} only in {side.upper()}" for side in ("a", "b") if data[f"num_only_{side}"]]
    return ", ".join([text, *alone])


def _difference(found: Mapping[str, Any]) -> Iterator[str]:
    turn, line, token, number = found["turn"], found["line"], found["token"], found["num_tokens"]
    where = f"turn {turn['a']}" if turn["a"] == turn["b"] else f"turn {turn['a']} (B: {turn['b']})"
    yield (
        f"{where}: first difference at token {found['index'] + 1} "
        f"(A has {number['a']} tokens, line {line['a']}; B has {number['b']}, line {line['b']})"
    )
    yield f"  both: …{_quoted(found['before'])}"
    for side in ("a", "b"):
        chosen = f"token {token[side]}" if token[side] is not None else f"ended ({found['finish_reason'][side]})"
        yield f"  {side.upper()}:    {chosen} {_quoted(found['after'][side])}…"
    yield f"  {found['reason'] or 'same question and settings: they part by rounding, or one engine is wrong'}"


def _change(name: str, change: Mapping[str, Any]) -> str:
    text = f"{name}: A {_number(change['a'])}, B {_number(change['b'])}"
    is_factor = "factor" in change
    value = change["factor"] if is_factor else change["difference"]
    if value is None:
        return text
    text += f", B is {value:.3f} times A" if is_factor else f", change {value:+.3f}"
    interval = change["interval"]
    if interval is None:
        return f"{text} (no interval: too few answers)"
    sign = "" if is_factor else "+"
    unit = "answers" if not change["method"].startswith("delta method, clusters") else "groups of steps"
    span = f"{interval['low']:{sign}.3f} to {interval['high']:{sign}.3f}"
    return f"{text} ({interval['level']:.0%} interval {span}, {change['num_clusters']} {unit})"


def _setting(value: Any) -> str:
    text = one_line(value) if isinstance(value, str) else _quoted(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _quoted(value: Any) -> str:
    """As JSON, on one line, with nothing that a terminal would take for a command."""
    return visible(dumps(value))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
