"""What ``bench`` tells: one object, and a table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkchat.bench.arms import BASELINE
from sparkchat.bench.equality import Equality
from sparkchat.bench.measuring import Tally
from sparkchat.bench.plot import Point

SCHEMA = "sparkchat.bench/1"
HEADER = (
    "TOGETHER",
    "ARM",
    "TOK/S",
    "X OFF",
    "TOK/S/USER",
    "X OFF",
    "LENGTH",
    "WINDOW",
    "USED",
    "TRIMMED",
    "BYTES",
    "STEP TIME",
)
"""Length: tokens a step; window: drafts verified a step; used: share of verified rows that became tokens; step time: by
how much predicted steps are longer than measured ones. Of simulated acceptance tokens are those expected."""


def rows_of(
    tallies: Mapping[int, Mapping[str, Tally]], equality: Mapping[str, Equality], kv_bytes_per_token: int
) -> list[dict[str, Any]]:
    """One row for each concurrency and arm. A speed-up is null where the arm answers otherwise than the baseline."""
    rows = []
    for together, by_arm in tallies.items():
        figures = {name: tally.to_json(kv_bytes_per_token) for name, tally in by_arm.items()}
        plain = figures.get(BASELINE)
        for name, found in figures.items():
            is_equal = name not in equality or equality[name].is_equal
            rows.append(
                {
                    "concurrency": together,
                    "arm": name,
                    **found,
                    "speed_up": _ratio(found, plain, "tokens_per_second") if is_equal else None,
                    "speed_up_per_user": _ratio(found, plain, "tokens_per_second_per_user") if is_equal else None,
                }
            )
    return rows


def step_times(tallies: Mapping[int, Mapping[str, Tally]]) -> list[dict[str, Any]]:
    """Milliseconds of all steps that were predicted, beside what they took, by number of requests."""
    found = []
    for together, by_arm in tallies.items():
        for name, tally in by_arm.items():
            sums = tally.sums
            if sums.measured_ms:
                found.append(
                    {
                        "requests": tally.together,
                        "concurrency": together,
                        "arm": name,
                        "steps": sums.predicted_steps,
                        "predicted_ms": sums.predicted_ms / sums.predicted_steps,
                        "measured_ms": sums.measured_ms / sums.predicted_steps,
                        "error": tally.step_time_error,
                    }
                )
    return found


def table_rows(rows: Sequence[Mapping[str, Any]], refused: Sequence[str]) -> list[list[str]]:
    """Cells below ``HEADER``; ``refused`` arms get a word in the place of their speed-ups."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    cells = []
    for row in rows:
        ups = [cell(row[name], ".2f") for name in ("speed_up", "speed_up_per_user")]
        if row["arm"] in refused:
            ups = ["refused"] * 2
        error = row["step_time_error"]
        cells.append(
            [
                str(row["concurrency"]),
                row["arm"],
                cell(row["tokens_per_second"], ".1f"),
                ups[0],
                cell(row["tokens_per_second_per_user"], ".1f"),
                ups[1],
                cell(row["acceptance_length"], ".2f"),
                cell(row["mean_verify_len"], ".2f"),
                cell(row["utilisation"], ".0%"),
                str(row["trimmed_rows"]),
                _bytes(row["trimmed_bytes"]),
                "-" if error is None else f"{error:+.0%}",
            ]
        )
    return cells


def plot_lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        x, y = row["tokens_per_second_per_user"], row["tokens_per_second"]
        if x is not None and y is not None:
            lines.setdefault(row["arm"], []).append((x, y, row["concurrency"]))
    return lines


def _ratio(found: Mapping[str, Any], plain: Mapping[str, Any] | None, name: str) -> float | None:
    if plain is None or not found[name] or not plain[name]:
        return None
    return found[name] / plain[name]


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
