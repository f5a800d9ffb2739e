"""``sparkchat serve``: the engine behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace
from typing import Annotated

import typer

from sparkchat.cli import arguments as a
from sparkchat.cli.output import note
from sparkchat.cli.prepare import prepare
from sparkchat.errors import UsageError

KEY_VARIABLE = "SPARKCHAT_API_KEY"
_SERVING = {name: option for name, option in a.ANSWERING.items() if name != "raw"}
"""Chats are templated and text completions are exact: here the path says which."""


def register(app: typer.Typer) -> None:
    app.command()(serve)


@a.with_options(_SERVING)
def serve(
    ctx: typer.Context,
    model: a.Model = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on; another than this machine's own needs a key."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"Key that clients must send; {KEY_VARIABLE} keeps it out of the process list.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", help="Requests decoded together.")] = 8,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", metavar="N", help="Requests that may wait for a place; more get 429.")
    ] = 256,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="Time for running answers when the server ends.")
    ] = 30.0,
) -> int:
    """Serve MODEL to OpenAI clients: chat and text completions, streams, metrics. Options are defaults of requests."""
    for name, value, low in (("--concurrency", concurrency, 1), ("--max-waiting", max_waiting, 0)):
        if value < low:
            raise UsageError(f"{name} {value} is not possible; give a whole number of {low} or more")
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is not possible; give 0 to 65535")
    if not 0 <= grace <= 86400:
        raise UsageError(f"--grace {grace:g} is not possible; give 0 to 86400 seconds")
    key = _key(api_key, host)
    from sparkchat.serve.server import ServeOptions, run_server
    from sparkchat.ui.progress import LoadingLine

    config = prepare(ctx)
    config = replace(config, spec=replace(config.spec, concurrency=concurrency), argv=without_key(config.argv))
    loading = LoadingLine(config)

    def say(sentence: str) -> None:
        loading.clear()
        note(sentence)

    return run_server(config, ServeOptions(host, port, key, max_waiting, grace), say, loading.show)


def _key(typed: str | None, host: str) -> str | None:
    key = typed if typed is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(
            f"the API key is empty or holds what no header can; give visible ASCII without spaces in {KEY_VARIABLE}"
        )
    if key is None and not _is_own(host):
        raise UsageError(
            f"--host {host} lets other machines in, and no key keeps them out; set {KEY_VARIABLE} (or --api-key), "
            "or leave --host out"
        )
    return key


def _is_own(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_key(argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command line for the trace, which must not carry the key."""
    kept: list[str] = []
    for word in argv:
        if kept and kept[-1] == "--api-key":
            kept.append("(hidden)")
        elif word.startswith("--api-key="):
            kept.append("--api-key=(hidden)")
        else:
            kept.append(word)
    return tuple(kept)
