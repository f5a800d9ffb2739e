"""``sparkchat run``: one answer, a line REPL, or the full-screen chat."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from sparkchat import environment
from sparkchat.catalog import profile_files
from sparkchat.cli import arguments as a
from sparkchat.cli.prepare import prepare
from sparkchat.config import Color, Output, RunConfig
from sparkchat.errors import UsageError
from sparkchat.paths import typed_path, user_paths

_MOST_PIPED = 64 << 20
"""Bytes of text on stdin; a device that never ends would fill the memory."""
_ONE_SHOT_ONLY = {"prompt_ids": "--prompt-ids", "json_": "--json", "jsonl": "--jsonl"}


def register(app: typer.Typer) -> None:
    app.command()(run)


@a.with_options(a.ANSWERING)
def run(
    ctx: typer.Context,
    model: a.Model = None,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", show_default=False)] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="1,2,3", help="Exact token ids.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One object at the end.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Events as they happen.")] = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="CHAT", help="Go on with a kept chat: last, or its id.", show_default=False),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="URL",
            help="Chat with a running SGLang, vLLM, llama.cpp or sparkchat server instead.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="A line REPL instead of the full screen.")] = False,
    color: Annotated[
        str,
        typer.Option(
            "--color", metavar="WHEN", help="auto, always or never.", envvar="SPARKCHAT_COLOR", show_envvar=False
        ),
    ] = "auto",
    ascii_: Annotated[
        bool,
        typer.Option("--ascii", help="Draw with ASCII characters only.", envvar="SPARKCHAT_ASCII", show_envvar=False),
    ] = False,
) -> int:
    """Chat with MODEL, or answer PROMPT (after the text piped in, if any) and end."""
    ids = _token_ids(prompt_ids)
    _refuse_question_for_model(model)
    text = _prompt_text(tuple(prompt or ()), ids is not None, plain, ctx.params["raw"])
    _refuse_output(ctx, is_one_shot=ids is not None or text is not None)
    make_engine: Callable[[], Any] | None = None
    if engine is None:
        config = prepare(ctx)
    else:
        from sparkchat.cli.remote import prepare_remote

        config, make_engine = prepare_remote(ctx, engine)
    config = replace(
        config,
        prompt_ids=ids,
        output=_output(json_, jsonl),
        color=_color(color, "--color" if a.is_typed(ctx, "color") else "SPARKCHAT_COLOR"),
        ascii=ascii_ or not environment.shows_unicode(),
        resume=resume,
    )
    return _answer(config, ids if ids is not None else text, plain, make_engine)


def _refuse_question_for_model(model: str | None) -> None:
    """The first word is MODEL, also where only a question was typed."""
    if (
        model is not None
        and " " in model
        and not os.path.exists(typed_path(model))
        and model not in profile_files(user_paths())
    ):
        raise UsageError(
            f"{model[:40]!r} stands where MODEL does; to ask it, type: sparkchat run smollm2-135m 'QUESTION'"
        )


def _answer(
    config: RunConfig, prompt: str | tuple[int, ...] | None, plain: bool, make_engine: Callable[[], Any] | None
) -> int:
    if prompt is not None:
        from sparkchat.ui.plain import run_one_shot

        return run_one_shot(config, prompt, make_engine)
    if plain or not environment.is_interactive():
        from sparkchat.ui.plain import run_repl

        return run_repl(config, make_engine)
    from sparkchat.ui.app import run_tui

    return run_tui(config, make_engine)


def _prompt_text(words: tuple[str, ...], has_ids: bool, plain: bool, raw: bool) -> str | None:
    """What to answer, or None for a chat. Text that is piped in stands before PROMPT."""
    if has_ids:
        if words:
            raise UsageError("PROMPT and --prompt-ids both say what to answer; give one of them")
        return None
    is_piped = sys.stdin is None or not sys.stdin.isatty()
    if not words and sys.stdin is not None and (plain or not is_piped):
        return None
    piped = _piped_text() if is_piped else ""
    typed = _encodable(" ".join(words))
    if raw:
        text = piped + typed
    else:
        # Editors and shells of Windows begin a file with a mark that is no part of the text.
        piped = piped.removeprefix("\ufeff").rstrip("\r\n")
        text = f"{piped}\n{typed}" if piped and typed else piped or typed
    if not (text if raw else text.strip()):
        raise UsageError("there is nothing to answer; give a PROMPT, pipe text in, or run in a terminal to chat")
    return text


def _piped_text() -> str:
    if sys.stdin is None:
        return ""
    data = sys.stdin.buffer.read(_MOST_PIPED + 1)
    if len(data) > _MOST_PIPED:
        raise UsageError(
            f"more than {_MOST_PIPED >> 20} MiB are piped in, which no context holds; pipe in the part that matters"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the text piped in is not UTF-8 (byte {error.start}); convert it first") from None


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"PROMPT is not valid UTF-8 (character {error.start}); check the terminal's encoding"
        ) from None
    return text


def _token_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts):
        raise UsageError(f"--prompt-ids {text[:40]!r} is not possible; give token ids with commas, e.g. 1,2,3")
    return tuple(int(part) for part in parts)


def _refuse_output(ctx: typer.Context, *, is_one_shot: bool) -> None:
    params = ctx.params
    if params["json_"] and params["jsonl"]:
        raise UsageError("--json and --jsonl both say how to print; give one of them")
    if params["prompt_ids"] is not None:
        for name in ("raw", "system", "think", "reasoning_effort"):
            if a.is_typed(ctx, name):
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} has no place with --prompt-ids, which are the exact input; drop one")
    if is_one_shot and params["resume"] is not None:
        raise UsageError("--resume goes on with a chat, but a PROMPT asks for one answer; drop one of them")
    if not is_one_shot:
        for name, flag in _ONE_SHOT_ONLY.items():
            if params[name]:
                raise UsageError(f"{flag} is for one answer; give a PROMPT, or pipe text in")


def _output(as_json: bool, as_jsonl: bool) -> Output:
    return "json" if as_json else "jsonl" if as_jsonl else "text"


def _color(word: str, asked: str) -> Color:
    if word not in ("auto", "always", "never"):
        raise UsageError(f"{asked} {word} is unknown; give auto, always or never")
    if word == "auto" and os.environ.get("NO_COLOR") is not None:
        return "never"
    return word  # type: ignore[return-value]
