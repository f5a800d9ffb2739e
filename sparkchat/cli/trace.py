"""``sparkchat trace summary`` and ``trace verify``: read exported sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkchat.cli import arguments as a
from sparkchat.cli.output import as_json, block
from sparkchat.errors import DamagedFile

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces that --trace has written.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Read exported sessions.", rich_markup_mode=None)
    group.command("summary")(summary)
    group.command("verify")(verify)
    app.add_typer(group, name="trace")


def summary(files: Files, json_: a.AsJson = False) -> None:
    """Tokens, acceptance and times of each FILE."""
    from sparkchat.trace import summarize

    _show([summarize(file) for file in files], json_)


def verify(files: Files, json_: a.AsJson = False) -> None:
    """Check that each FILE agrees with itself; exit 6 when one does not."""
    from sparkchat import trace

    checked = [trace.verify(file) for file in files]
    _show(checked, json_)
    bad = [str(report.path) for report in checked if not report.ok]
    if bad:
        raise DamagedFile(
            f"{len(bad)} of {len(checked)} traces fail their checks: {', '.join(bad)}; see the report above"
        )


def _show(reports: Sequence[Any], json_: bool) -> None:
    """One object for one file, a list for several."""
    if json_:
        values = [report.to_json() for report in reports]
        as_json(values[0] if len(values) == 1 else values)
        return
    for number, report in enumerate(reports):
        block(("\n" if number else "") + report.to_text())
