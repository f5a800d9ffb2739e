"""A trace in the formats of other programs. Every exporter reads the trace line by line and writes as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkchat.errors import UsageError
from sparkchat.trace.export.confidence import write_confidence
from sparkchat.trace.export.markdown import write_markdown
from sparkchat.trace.export.new_file import new_file
from sparkchat.trace.export.perfetto import write_perfetto
from sparkchat.trace.export.report import write_report
from sparkchat.trace.export.step_table import write_step_table
from sparkchat.trace.export.svg_sheet import write_svg
from sparkchat.trace.reader import Damage

Write = Callable[[str], object]


@dataclass(frozen=True)
class Format:
    """``write(trace, write, damage)`` raises as ``read_lines`` does, and UsageError when there is nothing to write."""

    name: str
    ending: str
    what: str
    write: Callable[[Path, Write, Damage], list[str]]
    """Returns sentences for the user."""


FORMATS = (
    Format("csv", ".csv", "one row a step, for spreadsheets", write_step_table),
    Format("perfetto", ".json", "Chrome trace events, for ui.perfetto.dev", write_perfetto),
    Format("html", ".html", "a report in one file, with plots and answers", write_report),
    Format("svg", ".svg", "the plots alone", write_svg),
    Format("markdown", ".md", "the answers as a text to read", write_markdown),
    Format("confidence", ".jsonl", "confidence records, for DeepSpec's calibration script", write_confidence),
)


def export(trace: Path, out: Path, name: str | None, damage: Damage, *, force: bool = False) -> list[str]:
    """Write ``trace`` to the new file ``out``, in the format of that name or of the ending; returns what to tell.

    Raises as ``format_of``, ``new_file`` and ``read_lines`` do; nothing of the file stays then.
    """
    chosen = format_of(name, out)
    with new_file(out, trace, force=force) as write:
        notes = chosen.write(trace, write, damage)
    return [*notes, f"{out} written: {chosen.what}"]


def format_of(name: str | None, target: Path | None) -> Format:
    """The format with that name, or, without one, that of the file's ending."""
    if name is not None:
        found = next((each for each in FORMATS if each.name == name.lower()), None)
        if found is None:
            raise UsageError(f"--to {name} is no format; use {_names()}")
        return found
    ending = target.suffix.lower() if target is not None else ""
    found = next((each for each in FORMATS if each.ending == ending), None)
    if found is None:
        asked = f"{target} has no ending that names a format" if target is not None else "no format was given"
        raise UsageError(f"{asked}; use --to with {_names()}")
    return found


def _names() -> str:
    return ", ".join(f"{each.name} ({each.ending})" for each in FORMATS)
