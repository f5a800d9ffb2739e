"""HTML: one file with the numbers, the plots and the answers. No script, and nothing is loaded from anywhere.

Everything from the trace is escaped, and characters that cannot be seen are spelt out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sparkchat.trace.export import plot
from sparkchat.trace.export.answers import RecordedAnswer, answers
from sparkchat.trace.export.figures import Figures
from sparkchat.trace.export.words import answer_numbers, one_line, shown, visible, without_text
from sparkchat.trace.reader import Damage, opened, read_lines

MOST_CHARACTERS = 2_000_000
"""Of answers; a browser is slow with more."""

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #111;
  background: #fff; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
th, td {{ text-align: right; padding: .15em .7em; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1em; }}
.plots svg {{ max-width: 100%; height: auto; border: 1px solid #ddd; }}
.question {{ font-weight: bold; margin: .5em 0; }}
.answer, .question {{ white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }}
.answer {{ border-left: 3px solid #ccc; padding-left: .8em; }}
.thinking {{ color: #555; }}
.draft {{ background: #dff3e8; }}
.target {{ text-decoration: underline; text-decoration-color: #d55e00; }}
.note {{ color: #555; }}
</style></head><body>
"""


def write_report(trace: Path, write: Callable[[str], object], damage: Damage) -> list[str]:
    figures = Figures()
    opened(trace, again=True).close()
    for line in read_lines(trace, damage):
        figures.add(line)
    data = figures.totals.to_json()
    write(_HEAD.format(title=_text(f"Session {trace.name}")))
    write(f"<h1>Session {_text(trace.name)}</h1>\n")
    write(_facts(figures.totals.header or {}, damage))
    write(_numbers(data))
    write('<div class="plots">' + "\n".join(plot.svg(body) for body in figures.plots()) + "</div>\n")
    write(_modes(data["by_mode"]))
    write(_positions(data["acceptance_by_position"]))
    write(
        "<h2>Answers</h2>\n<p class=note><span class=draft>Proposed by the drafter and accepted</span>, "
        "<span class=target>the model's own</span>.</p>\n"
    )
    left_out = _answers(trace, write)
    write("</body></html>\n")
    return [f"{left_out} answers are left out of the report: it holds {MOST_CHARACTERS} characters"] if left_out else []


def _answers(trace: Path, write: Callable[[str], object]) -> int:
    """Returns how many were left out."""
    room, left_out = MOST_CHARACTERS, 0
    for answer in answers(trace, Damage()):
        length = sum(len(run.text) for run in answer.runs) + len(answer.start.get("prompt_text") or "")
        if length > room:
            left_out += 1
            continue
        room -= length
        write(_answer(answer))
    if left_out:
        write(f"<p class=note>{left_out} answers are left out here; convert the trace to Markdown to read them.</p>\n")
    return left_out


def _facts(header: Mapping[str, Any], damage: Damage) -> str:
    versions = header.get("versions")
    rows = [
        ("model", header.get("model")),
        ("drafter", header.get("drafter")),
        ("device", " ".join(str(header[name]) for name in ("device", "dtype") if header.get(name))),
        ("recorded", header.get("created")),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else None),
        ("damaged lines", damage.num_lines or None),
    ]
    cells = "".join(f"<tr><td>{name}</td><td>{_text(str(value))}</td></tr>" for name, value in rows if value)
    return f"<table>{cells}</table>\n"


def _numbers(data: Mapping[str, Any]) -> str:
    calibration = data["calibration"] or {}
    rows = [
        ("answers", data["num_turns"]),
        ("tokens of the answers", data["num_completion_tokens"]),
        ("tokens per second", data["tokens_per_second"]),
        ("first token after (ms)", data["mean_ttft_ms"]),
        ("steps", data["num_steps"]),
        ("tokens a step, the model's own included", data["mean_acceptance_length"]),
        ("drafts proposed", data["num_proposed_draft_tokens"]),
        ("drafts verified", data["num_verified_draft_tokens"]),
        ("drafts accepted", data["num_accepted_draft_tokens"]),
        ("calibration error of the survival estimates", calibration.get("ece")),
    ]
    cells = "".join(f"<tr><td>{_text(name)}</td><td>{shown(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>\n"


def _modes(by_mode: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("mode", "steps", "tokens a step", "verify length", "ms a step", "predicted", "tokens/s", "lost to the cap")
    names = ("num_steps", "mean_acceptance_length", "mean_verify_len", "mean_step_ms", "mean_predicted_step_ms")
    more = ("tokens_per_second", "num_trimmed_tokens")
    rows = [(mode, *(shown(figures[name]) for name in (*names, *more))) for mode, figures in by_mode.items()]
    return "<h2>By mode</h2>\n" + _table(head, rows)


def _positions(positions: Sequence[Mapping[str, Any]]) -> str:
    head = ("position", "proposed", "verified", "accepted", "of all steps", "of steps that verified it")
    names = ("position", "proposed", "verified", "accepted", "rate_of_all_steps", "rate_of_verified_steps")
    rows = [tuple(shown(row[name]) for name in names) for row in positions[:64]]
    return "<h2>By draft position</h2>\n" + _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>\n"


def _answer(answer: RecordedAnswer) -> str:
    asked = answer.start.get("prompt_text")
    question = f"<div class=question>{escape(visible(asked))}</div>" if asked else _note(without_text(answer))
    head = f"<h3>Answer {answer.number + 1}</h3>{question}\n"
    thinking = _runs(answer, "thinking")
    folded = f'<details><summary>thinking</summary><div class="answer thinking">{thinking}</div></details>\n'
    return (
        f"{head}{folded if thinking else ''}<div class=answer>{_runs(answer, 'answer')}</div>"
        f"{_note(answer_numbers(answer))}\n"
    )


def _note(text: str) -> str:
    return f"<p class=note>{_text(text)}</p>"


def _runs(answer: RecordedAnswer, channel: str) -> str:
    runs = (run for run in answer.runs if run.channel == channel)
    return "".join(f"<span class={run.origin}>{escape(visible(run.text))}</span>" for run in runs)


def _text(text: str) -> str:
    return escape(one_line(text))
