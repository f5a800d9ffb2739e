"""``--engine URL``: what a run needs when the engine is somebody else's."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from sparkchat.catalog import chosen_profile, load_profile
from sparkchat.cli.arguments import is_typed, session, typed_flags
from sparkchat.cli.prepare import chosen_model, refuse_pointless, trace_path
from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.params import LoadSpec
from sparkchat.paths import user_paths
from sparkchat.remote.connection import Server
from sparkchat.remote.engine import RemoteEngine
from sparkchat.resolve import Resolution, resolve_options

KEY_VARIABLE = "SPARKCHAT_ENGINE_KEY"
_LOCAL = (
    *("mode", "drafter", "block_size", "accept_cap", "draft_temperature", "refine"),
    *("device", "dtype", "context", "cache_tokens", "tp", "graphs"),
)
_LOCAL_FLAGS = ("offline", "dummy_weights", "simulate_acceptance")


def prepare_remote(ctx: typer.Context, url: str) -> tuple[RunConfig, Callable[[], RemoteEngine]]:
    """The config of a run on the engine at ``url``, and what makes its front end's engine.

    MODEL is what the server calls it, or a profile, whose sampling then holds there too. Raises UsageError for what
    only an engine of our own could do.
    """
    server = Server(url, os.environ.get(KEY_VARIABLE) or None)
    name = chosen_model(ctx.params["model"])
    # The profile that was asked for, or that of MODEL where it is one: its sampling and system text hold there too.
    asked = ctx.params.get("profile")
    profile = chosen_profile(asked, user_paths()) if asked else load_profile(name, user_paths()) if name else None
    options = resolve_options(profile, typed_flags(ctx), os.environ)
    _refuse_local(ctx, options)
    refuse_pointless(ctx, options)
    sampling = options.sampling()
    where = server.url.split("//", 1)[1]
    config = RunConfig(
        # The server decides the mode, and says so.
        spec=LoadSpec(name=name or where, model_path="", mode="server"),  # type: ignore[arg-type]
        sampling=sampling,
        system=options["system"],
        think=options["think"],
        reasoning_effort=options["reasoning_effort"],
        raw=ctx.params["raw"],
        trace_path=trace_path(ctx.params["trace"], ctx.params["force"]),
        trace_force=ctx.params["force"],
        verbose=ctx.params["verbose"],
        label=where if name is None else f"{name} at {where}",
        sources=options.sources(),
        argv=session(ctx).argv,
        debug=session(ctx).debug,
    )
    return config, lambda: RemoteEngine(server, name, sampling, may_differ=profile is not None)


def _refuse_local(ctx: typer.Context, options: Resolution) -> None:
    for name in _LOCAL:
        if options.is_typed(name):
            raise UsageError(f"{options.asked(name)} has no place with --engine: the server there decides it; drop one")
    for name in _LOCAL_FLAGS:
        if is_typed(ctx, name):
            raise UsageError(f"--{name.replace('_', '-')} has no place with --engine, which loads nothing; drop one")
