"""The program's entry: builds the command line, and is the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any

import typer

import sparkchat
from sparkchat.cli import batch, doctor, models, run, trace
from sparkchat.cli.arguments import Session
from sparkchat.cli.output import data, note, printable
from sparkchat.errors import Interrupted, SparkchatError, Terminated
from sparkchat.resolve import misspelt_variables

app = typer.Typer(
    name="sparkchat",
    help="A terminal chat whose engine shows every step of speculative decoding.",
    no_args_is_help=False,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        data(f"sparkchat {sparkchat.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere on the command line.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        data(ctx.get_help())


run.register(app)
batch.register(app)
models.register(app)
trace.register(app)
doctor.register(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    typed = list(sys.argv[1:] if argv is None else argv)
    arguments, debug = _without_debug(typed)
    debug = debug or _debug_from_environment()
    _prepare_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        for sentence in misspelt_variables(os.environ):
            note(sentence)
        code = app(arguments, prog_name="sparkchat", standalone_mode=False, obj=Session(debug, ("sparkchat", *typed)))
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _reader_went_away()
    except SparkchatError as error:
        return _report(error, error.message, error.exit_code, debug)
    except typer.TyperException as error:
        return _report(error, _usage_message(error), error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _report(error, "stopped by ctrl+c", Interrupted.exit_code, debug)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _report(error, f"internal error, {what}; run it again with --debug for the details", 1, debug)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """``--debug`` may stand anywhere before ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [word for word in arguments[:end] if word != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _debug_from_environment() -> bool:
    text = os.environ.get("SPARKCHAT_DEBUG", "").strip().lower()
    return text not in ("", "0", "false", "no", "off")


def _prepare_streams() -> None:
    """A terminal that cannot show a character gets a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated("ended by SIGTERM")


def _report(error: BaseException, message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    try:
        note(message)
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_went_away()
    return code


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sparkchat"
    return f"{printable(error.format_message()).rstrip('.')}; see `{command} --help`"


def _reader_went_away() -> int:
    """The program that read our output has ended: keep Python from complaining about it at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    return 1
