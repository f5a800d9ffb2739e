"""From a command line to a RunConfig: what ``run`` and ``batch`` share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from sparkchat.catalog import DrafterRef, ModelRef, check_inner_drafter, find_drafter, find_model
from sparkchat.cli.arguments import session, typed_flags
from sparkchat.cli.memory import refuse_before_fetch, within_memory
from sparkchat.cli.progress import fetch_progress
from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.fit import refuse_too_large
from sparkchat.inventory import ensure_space_for_all, is_on_disk
from sparkchat.locate import Located, is_offline, locate
from sparkchat.paths import Paths, user_paths
from sparkchat.resolve import Resolution, build_config, refuse_impossible, resolve_options
from sparkchat.simulation import WHAT, parse_simulation


def chosen_model(argument: str | None) -> str | None:
    """MODEL, or SPARKCHAT_MODEL, or None for the embedded default."""
    return argument if argument is not None else os.environ.get("SPARKCHAT_MODEL") or None


def prepare(ctx: typer.Context) -> RunConfig:
    """Resolve every option, refuse what cannot be honoured, and bring the files onto this machine."""
    paths, params = user_paths(), ctx.params
    model = find_model(chosen_model(params["model"]), paths, params.get("profile"))
    options = resolve_options(model.profile, typed_flags(ctx), os.environ)
    drafter = find_drafter(options["drafter"], model, paths)
    if params.get("dummy_weights", False):
        model, drafter = dummy_shapes(model, drafter, paths)
    refuse_impossible(options, model, drafter)
    refuse_pointless(ctx, options)
    _refuse_simulation(params.get("simulate_acceptance"), drafter)
    offline, num_requests = is_offline(params["offline"]), params.get("concurrency") or 1
    is_here = model.path is not None or is_on_disk(model.sources, paths)
    if is_here or not offline:
        # What is neither here nor to be had is not found, whatever memory there is.
        refuse_too_large(options, model)
    trace = trace_path(params.get("trace"), params.get("force", False))
    if not is_here and not offline:
        refuse_before_fetch(model, drafter, options, paths, num_requests)
        ensure_space_for_all([("model", model.sources), ("drafter", drafter.sources)], paths)
    with fetch_progress() as progress:
        found = (
            Located(model.path) if model.path else locate(model.sources, model.name, paths, progress, offline=offline)
        )
        found_drafter = Located(drafter.path) if drafter.path else None
        if drafter.sources:
            name = options["drafter"] or model.name
            found_drafter = locate(drafter.sources, name, paths, progress, offline=offline)
    if drafter.is_inner:
        check_inner_drafter(drafter, found.path, model)
        found_drafter = found
    # What a model can do is known for certain only now that it is here.
    refuse_impossible(options, replace(model, path=found.path), drafter)
    config = build_config(options, model, drafter, (found, found_drafter), paths)
    spec, notices = within_memory(config, replace(model, path=found.path), drafter, options, paths, num_requests)
    spec = replace(
        spec,
        dummy_weights=params.get("dummy_weights", False),
        simulate_acceptance=params.get("simulate_acceptance"),
    )
    return replace(
        config,
        spec=spec,
        notices=(*config.notices, *notices),
        raw=params.get("raw", False),
        trace_path=trace,
        trace_force=params.get("force", False),
        verbose=params.get("verbose", False),
        argv=session(ctx).argv,
        debug=session(ctx).debug,
    )


def refuse_pointless(ctx: typer.Context, options: Resolution) -> None:
    """Options that another option leaves no room for."""
    if ctx.params.get("raw"):
        for name in ("system", "think", "reasoning_effort"):
            if options.is_typed(name):
                raise UsageError(f"{options.asked(name)} has no place with --raw, which sends the exact text; drop one")
    if options.is_typed("reasoning_effort") and options.is_typed("think") and not options["think"]:
        raise UsageError(
            f"{options.asked('reasoning_effort')} says how long to think, and thinking was switched off; drop one"
        )
    if ctx.params.get("force") and ctx.params["trace"] is None:
        raise UsageError("--force overwrites a trace file, but no --trace FILE was given; add it, or drop --force")


def dummy_shapes(model: ModelRef, drafter: DrafterRef, paths: Paths) -> tuple[ModelRef, DrafterRef]:
    """Where the configs lie that dummy weights are made for: a local folder's own, or those shipped for a profile."""
    shipped = paths.shipped_shapes / model.name
    path = model.path or shipped
    if not os.path.isfile(path / "config.json"):
        known = sorted(folder.name for folder in paths.shipped_shapes.glob("*") if os.path.isdir(folder))
        raise UsageError(
            f"--dummy-weights: no shapes of {model.name} are shipped; give {', '.join(known)}, "
            "or a folder with a config.json"
        )
    if drafter.path is None and drafter.is_present and not drafter.is_inner:
        folder = shipped / "drafter"
        drafter = (
            DrafterRef(path=folder) if os.path.isdir(folder) else DrafterRef(reason_off="no drafter: no shapes of it")
        )
    return replace(model, path=path), drafter


def _refuse_simulation(text: str | None, drafter: DrafterRef) -> None:
    if text is None:
        return
    parse_simulation(text)
    if not drafter.is_present:
        raise UsageError(
            f"{WHAT} {text} needs a drafter, but {drafter.reason_off or 'no drafter'}; give --drafter PATH"
        )


def trace_path(path: Path | None, force: bool) -> Path | None:
    """Refused now rather than after a model has been loaded."""
    if path is None:
        return None
    # The questions of os.path: those of Path raise where a name is too long or a folder may not be entered.
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        reason = "is a folder" if os.path.isdir(path) else "lies in a folder that does not exist"
        raise UsageError(f"--trace {path} {reason}; give a file in an existing folder")
    if os.path.lexists(path) and not force:
        raise UsageError(f"--trace {path} exists already; give another name, or add --force to overwrite it")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise SparkchatError(f"--trace {path} cannot be written; give a file in a folder that you can write to")
    return path
