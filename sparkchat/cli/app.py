"""The command line itself: the root command and every group of verbs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import sparkchat
from sparkchat.cli import batch, bench, doctor, models, run, serve, trace, train, tune
from sparkchat.cli.arguments import Session
from sparkchat.cli.output import data, note, printable
from sparkchat.errors import Interrupted, UsageError
from sparkchat.resolve import misspelt_variables
from sparkchat.switches import refuse_unknown_words

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
serve.register(app)
models.register(app)
trace.register(app)
train.register(app)
tune.register(app)
bench.register(app)
doctor.register(app)


def run_line(arguments: list[str], typed: Sequence[str], *, debug: bool) -> int:
    """Run one command line and return its exit code. Raises SparkchatError."""
    for sentence in misspelt_variables(os.environ):
        note(sentence)
    refuse_unknown_words(os.environ)
    session = Session(debug, ("sparkchat", *typed))
    try:
        code = app(arguments, prog_name="sparkchat", standalone_mode=False, obj=session)
    except typer.TyperException as error:
        raise UsageError(_usage_message(error)) from error
    except typer.Abort as error:
        raise Interrupted("stopped") from error
    return code if isinstance(code, int) else 0


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sparkchat"
    return f"{printable(error.format_message()).rstrip('.')}{_value_given(error)}; see `{command} --help`"


def _value_given(error: Any) -> str:
    """The value that did not parse, which typer keeps in the cause and leaves out of the message."""
    problems = getattr(error.__cause__, "errors", None)
    if not callable(problems):
        return ""
    given, variable = problems()[0]["input"], getattr(getattr(error, "param", None), "envvar", None)
    place = f" in {variable}" if variable and os.environ.get(variable) == given else ""
    return f"; given was {printable(repr(given))}{place}"
