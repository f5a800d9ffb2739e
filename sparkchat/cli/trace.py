"""``sparkchat trace``: read, check, compare, convert and play recorded sessions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sparkchat import environment
from sparkchat.cli import arguments as a
from sparkchat.cli.output import as_json, block, note
from sparkchat.config import Color
from sparkchat.errors import DamagedFile, UsageError

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace that --trace has written.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces that --trace has written.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Read, check, compare, convert and play recorded sessions.", rich_markup_mode=None)
    for command in (summary, verify, diff, convert, replay):
        group.command(command.__name__)(command)
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


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A trace that --trace has written.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    json_: a.AsJson = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 when tokens differ.")] = False,
) -> int:
    """Where the answers of A and B part, and how acceptance and speed changed from A to B."""
    from sparkchat.trace.diff import diff as compare

    found = compare(first, second)
    _show([found], json_)
    return 1 if exit_code and not found.is_same else 0


def convert(
    file: File,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The file to write, or - for stdout.", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="csv, perfetto, html, svg, markdown or confidence. Default: by the ending of OUT.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="The same as OUT.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write FILE in the format of another program: OUT.csv, .json (Perfetto), .html, .svg, .md or .jsonl."""
    from sparkchat.trace import Damage
    from sparkchat.trace.export import export, format_of

    if out is not None and output is not None and out != output:
        raise UsageError(f"convert was given two files to write, {out} and {output}; give one of them")
    target = out or output
    is_stdout = target is None or str(target) == "-"
    damage = Damage()
    if is_stdout or target is None:
        notes = format_of(to, None).write(file, _stdout(), damage)
        sys.stdout.flush()
    else:
        notes = export(file, target, to, damage, force=force)
    if damage.num_lines:
        notes.insert(0, f"{damage.num_lines} damaged lines of {file} are left out; `sparkchat trace verify` names them")
    for sentence in notes:
        note(sentence)


def replay(
    file: File,
    speed: Annotated[
        float, typer.Option("--speed", metavar="F", help="2 is twice as fast, 0 shows all at once.")
    ] = 1.0,
    step: Annotated[bool, typer.Option("--step", help="Begin paused; the right arrow gives the next step.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="One line a step on stdout, no full screen.")] = False,
    color: Annotated[str, typer.Option("--color", metavar="WHEN", help="auto, always or never.")] = "auto",
    ascii_: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
) -> int:
    """Play FILE at its own pace on the screen of the chat; without a terminal, one line a step."""
    if not 0 <= speed <= 1000:
        raise UsageError(f"--speed {speed:g} is not possible; give a factor from 0 (all at once) to 1000")
    if color not in ("auto", "always", "never"):
        raise UsageError(f"--color {color} is not known; use auto, always or never")
    ascii_only = ascii_ or not environment.shows_unicode()
    if plain or not environment.is_interactive():
        if step:
            raise UsageError("--step needs the full screen: a terminal, and no --plain; leave it out to see every step")
        from sparkchat.ui.plain_replay import run_plain_replay

        return run_plain_replay(file, speed=speed, ascii_only=ascii_only)
    from sparkchat.ui.replay import run_replay

    return run_replay(file, speed=speed, is_paused=step, color=cast(Color, color), ascii_only=ascii_only)


def _stdout() -> Any:
    """A pipe gets the exact bytes; a terminal gets control characters spelt out."""
    if sys.stdout.isatty():
        from sparkchat.ui.safe_text import TerminalFilter

        shown = TerminalFilter()
        return lambda text: sys.stdout.write(shown.feed(text))
    return lambda text: sys.stdout.buffer.write(text.encode("utf-8", "replace"))


def _show(reports: Sequence[Any], json_: bool) -> None:
    """One object for one file, a list for several."""
    if json_:
        values = [report.to_json() for report in reports]
        as_json(values[0] if len(values) == 1 else values)
        return
    for number, report in enumerate(reports):
        block(("\n" if number else "") + report.to_text())
