"""What differs between two sessions: settings, the first token that differs in each answer, acceptance and speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sparkchat.trace.counts import acceptance_by_position
from sparkchat.trace.ratio_change import (
    LEVEL,
    METHOD_WITHIN,
    Cluster,
    RatioChange,
    ratio_change,
    within_one_answer,
)
from sparkchat.trace.tokens import AnswerTokens, SessionTokens, session_tokens

DIFF_SCHEMA = "sparkchat.trace-diff/1"
MOST_DIFFERENT = 1000
"""Answers whose difference is kept; the others are counted."""
CONTEXT = 48
"""Characters shown before and behind the place where two texts part."""
_SETTINGS = (
    *("model", "model_revision", "model_sha256", "drafter", "drafter_revision", "drafter_sha256", "block_size"),
    *(
        "mode",
        "device",
        "dtype",
        "threads",
        "context",
        "temperatures",
        "calibration",
        "refine",
        "kernels",
        "graphs",
        "chat_template",
        "versions",
    ),
)

Pair = tuple[AnswerTokens, AnswerTokens]


@dataclass(frozen=True)
class TraceDiff:
    """The comparison of two files."""

    data: Mapping[str, Any]

    @property
    def is_same(self) -> bool:
        """Every answer of one session is in the other, token for token."""
        return not (self.data["num_different"] or self.data["num_only_a"] or self.data["num_only_b"])

    def to_json(self) -> dict[str, Any]:
        return dict(self.data)

    def to_text(self) -> str:
        # Words for people stand in a file of their own; nothing else here needs them.
        from sparkchat.trace.diff_text import diff_lines

        return "\n".join(diff_lines(self.data))


def diff(path_a: Path, path_b: Path) -> TraceDiff:
    """Compare two traces; see ``read_lines`` for their errors."""
    a, b = session_tokens(path_a), session_tokens(path_b)
    pairs, only_a, only_b, paired_by = _paired(a.answers, b.answers)
    different = [found for found in (_difference(*pair) for pair in pairs) if found is not None]
    acceptance, rate, speed = _changes(pairs, only_a, only_b)
    return TraceDiff(
        {
            "schema": DIFF_SCHEMA,
            "a": str(path_a),
            "b": str(path_b),
            "damaged_lines": {"a": a.damage.num_lines, "b": b.damage.num_lines},
            "settings": _settings(a, b),
            "paired_by": paired_by,
            "num_paired": len(pairs),
            "num_only_a": len(only_a),
            "num_only_b": len(only_b),
            "num_same_prompt": sum(_has_same_prompt(*pair) is True for pair in pairs),
            "num_equal": len(pairs) - len(different),
            "num_different": len(different),
            "different": different[:MOST_DIFFERENT],
            "confidence_level": LEVEL,
            "acceptance_length": acceptance.to_json(),
            "draft_acceptance_rate": rate.to_json(),
            "tokens_per_second": speed.to_json(),
            "mean_step_ms": {"a": a.totals.all.step_ms.mean, "b": b.totals.all.step_ms.mean},
            "acceptance_by_position": _by_position(a, b),
        }
    )


def _settings(a: SessionTokens, b: SessionTokens) -> list[dict[str, Any]]:
    """Header fields that differ."""
    header_a, header_b = a.totals.header or {}, b.totals.header or {}
    pairs = [(name, header_a.get(name), header_b.get(name)) for name in _SETTINGS]
    tables = [(header.get("cost_table") or {}).get("id") for header in (header_a, header_b)]
    pairs.append(("cost_table", tables[0], tables[1]))
    return [{"name": name, "a": value_a, "b": value_b} for name, value_a, value_b in pairs if value_a != value_b]


def _paired(
    a: Sequence[AnswerTokens], b: Sequence[AnswerTokens]
) -> tuple[list[Pair], list[AnswerTokens], list[AnswerTokens], str]:
    """By the request's id where both sessions use it once, else in the order the answers began."""
    counts_a, counts_b = (Counter(answer.key for answer in answers) for answers in (a, b))
    by_key = {answer.key: answer for answer in b if counts_b[answer.key] == 1}
    pairs = [(each, by_key[each.key]) for each in a if counts_a[each.key] == 1 and each.key in by_key]
    if pairs:
        keys = {each.key for each, _ in pairs}
        return pairs, [each for each in a if each.key not in keys], [each for each in b if each.key not in keys], "id"
    length = min(len(a), len(b))
    return list(zip(a[:length], b[:length], strict=True)), list(a[length:]), list(b[length:]), "order"


def _has_same_prompt(a: AnswerTokens, b: AnswerTokens) -> bool | None:
    return None if a.prompt is None or b.prompt is None else a.prompt == b.prompt


def _difference(a: AnswerTokens, b: AnswerTokens) -> dict[str, Any] | None:
    """Where the tokens of two answers part; None when they are the same."""
    if a.token_ids == b.token_ids:
        return None
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    index = next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
    # Pieces may hold several tokens: what both had said before is certain from the earlier one on.
    at = min(a.text_before(index), b.text_before(index))
    text_a, text_b = a.text, b.text
    ahead = zip(text_a[at : at + CONTEXT], text_b[at : at + CONTEXT], strict=False)
    at += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ahead))
    return {
        "id": a.key,
        "turn": {"a": a.number, "b": b.number},
        "same_prompt": _has_same_prompt(a, b),
        "num_tokens": {"a": len(a.token_ids), "b": len(b.token_ids)},
        "index": index,
        "token": {"a": _at(a, index), "b": _at(b, index)},
        "line": {"a": a.line_of(index), "b": b.line_of(index)},
        "before": text_a[max(at - CONTEXT, 0) : at],
        "after": {"a": text_a[at : at + CONTEXT], "b": text_b[at : at + CONTEXT]},
        "finish_reason": {"a": a.finish_reason, "b": b.finish_reason},
        "reason": _reason(a, b),
    }


def _at(answer: AnswerTokens, index: int) -> int | None:
    return answer.token_ids[index] if index < len(answer.token_ids) else None


def _reason(a: AnswerTokens, b: AnswerTokens) -> str | None:
    """Why the two answers need not be the same, as far as the files tell; None when they should be, up to rounding."""
    if _has_same_prompt(a, b) is False:
        return "the questions differ"
    changed = [name for name in sorted({*a.sampling, *b.sampling} - {"seed"}) if _value(a, name) != _value(b, name)]
    if changed:
        return f"other sampling: {', '.join(changed)}"
    if a.is_greedy:
        return None
    if _value(a, "seed") != _value(b, "seed"):
        return "sampled with other seeds"
    if a.modes != b.modes:
        return "sampled under other modes, which draw in another order"
    return None


def _value(answer: AnswerTokens, name: str) -> Any:
    return answer.sampling.get(name)


def _changes(
    pairs: Sequence[Pair], only_a: Sequence[AnswerTokens], only_b: Sequence[AnswerTokens]
) -> tuple[RatioChange, RatioChange, RatioChange]:
    """Acceptance length, accepted of verified drafts, tokens a second."""
    units = list(_units(pairs, only_a, only_b))

    def clusters(of: Any) -> Iterator[Cluster]:
        for a, b in units:
            yield Cluster(*(of(a) if a is not None else (0, 0)), *(of(b) if b is not None else (0, 0)))

    acceptance = ratio_change(clusters(lambda answer: (sum(answer.committed), len(answer.committed))))
    if acceptance.low is None and len(pairs) == 1 and not only_a and not only_b:
        (a, b) = pairs[0]
        blocks = ratio_change(within_one_answer(a.committed, b.committed), method=METHOD_WITHIN)
        if blocks.low is not None:
            acceptance = blocks
    rate = ratio_change(clusters(lambda answer: (answer.num_accepted, answer.num_verified)))
    return acceptance, rate, ratio_change(clusters(_speed), is_factor=True)


def _units(
    pairs: Sequence[Pair], only_a: Sequence[AnswerTokens], only_b: Sequence[AnswerTokens]
) -> Iterator[tuple[AnswerTokens | None, AnswerTokens | None]]:
    """Answers to the same question are one unit of chance, others two."""
    for a, b in pairs:
        if _has_same_prompt(a, b) is False:
            yield a, None
            yield None, b
        else:
            yield a, b
    yield from ((a, None) for a in only_a)
    yield from ((None, b) for b in only_b)


def _speed(answer: AnswerTokens) -> tuple[float, float]:
    """Tokens after the first, and the seconds they took."""
    if answer.decode_ms is None or answer.decode_ms <= 0 or len(answer.token_ids) < 2:
        return 0.0, 0.0
    return len(answer.token_ids) - 1.0, answer.decode_ms / 1e3


def _by_position(a: SessionTokens, b: SessionTokens) -> list[dict[str, Any]]:
    rows_a, rows_b = (acceptance_by_position(session.totals.all.counts) for session in (a, b))
    found = []
    for index in range(min(max(len(rows_a), len(rows_b)), 64)):
        rates = [rows[index]["rate_of_verified_steps"] if index < len(rows) else None for rows in (rows_a, rows_b)]
        found.append({"position": index + 1, "rate_of_verified_steps": {"a": rates[0], "b": rates[1]}})
    return found
