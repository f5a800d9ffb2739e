"""``sparkchat doctor`` and ``sparkchat paths``: what this machine is, and where things lie."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import typer

import sparkchat
from sparkchat import environment
from sparkchat.catalog import DEFAULT_MODEL, find_drafter, find_model
from sparkchat.cli import arguments as a
from sparkchat.cli.output import as_json, data, printable
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.features import features
from sparkchat.hub_access import hub_client
from sparkchat.locate import is_offline, on_disk
from sparkchat.paths import Paths, user_paths
from sparkchat.store import free_bytes, human


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command("paths")(show_paths)


def show_paths(json_: a.AsJson = False) -> None:
    """Every folder that sparkchat reads or writes."""
    folders = user_paths().to_json()
    if json_:
        as_json(folders)
        return
    width = max(map(len, folders))
    for name, folder in folders.items():
        data(f"{name.ljust(width)}  {printable(folder)}")


def doctor(json_: a.AsJson = False, offline: a.Offline = False) -> None:
    """A report on this machine: versions, processor, GPUs, memory, disk, terminal, network, and what is off and why."""
    report = _report(user_paths(), is_offline(offline))
    if json_:
        as_json(report)
        return
    for name, lines in _as_lines(report):
        data(name)
        for line in lines:
            data(f"  {printable(line)}")


def _report(paths: Paths, offline: bool) -> dict[str, Any]:
    memory = environment.memory()
    return {
        "sparkchat": sparkchat.__version__,
        "python": environment.python_version(),
        "packages": environment.package_versions(),
        "torch_has_cuda": environment.torch_has_cuda(),
        "cuda": {"torch": environment.torch_cuda(), "driver": environment.driver_cuda()},
        "processor": {"name": environment.processor(), "cores": environment.num_cores()},
        "memory": {"total_bytes": memory.total_bytes, "available_bytes": memory.available_bytes},
        "gpus": [
            {
                "index": g.index,
                "name": g.name,
                "total_bytes": g.memory_bytes,
                "free_bytes": g.free_bytes,
                "driver": g.driver,
                "compute": g.compute or None,
            }
            for g in environment.gpus()
        ],
        "peer_access": [
            {"from": a, "to": b, "state": state} for (a, b), state in sorted(environment.peer_access().items())
        ],
        "folders": {name: _folder(Path(folder)) for name, folder in paths.to_json().items() if name in _WRITTEN},
        "terminal": environment.terminal(),
        "sources": {"hub": _hub_state(offline), "pip": importlib.util.find_spec("pip") is not None},
        "default_model": _default_model(paths),
        "features": [{"name": f.name, "on": f.is_on, "reason_off": f.reason_off} for f in features(paths)],
    }


_WRITTEN = ("config", "data", "state", "cache", "hub_cache")


def _folder(folder: Path) -> dict[str, Any]:
    existing = folder
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    writable = os.path.isdir(existing) and os.access(existing, os.W_OK)
    return {
        "path": str(folder),
        "exists": os.path.isdir(folder),
        "writable": writable,
        "free_bytes": free_bytes(existing),
    }


def _hub_state(offline: bool) -> str:
    if offline:
        return "not asked: offline"
    try:
        return str(hub_client().reachability())
    except UsageError as error:
        return error.message


def _default_model(paths: Paths) -> dict[str, Any]:
    try:
        model = find_model(None, paths)
        found = on_disk(model.sources, paths, model.name)
        state = "not fetched yet" if found is None else f"on disk: {found.path}"
        drafter = find_drafter(None, model, paths)
        reason = drafter.reason_off
    except SparkchatError as error:
        state, reason = error.message, None
    return {"name": DEFAULT_MODEL, "state": state, "reason_off": reason}


def _as_lines(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    memory, processor, terminal = report["memory"], report["processor"], report["terminal"]
    packages = [f"{name} {version or 'is not installed'}" for name, version in report["packages"].items()]
    gpus = [
        f"{g['index']}: {g['name']}, compute capability {g['compute'] or 'unknown'}, "
        f"{human(g['free_bytes'])} of {human(g['total_bytes'])} free, driver {g['driver']}"
        for g in report["gpus"]
    ]
    pairs = [p for p in report["peer_access"] if p["from"] < p["to"]]
    gpus += [f"peer access {p['from']} - {p['to']}: {p['state']}" for p in pairs]
    cuda = [f"CUDA of {name}: {version or 'none'}" for name, version in report["cuda"].items()]
    off = [f"{f['name']}: {f['reason_off']}" for f in report["features"] if not f["on"]]
    on = ", ".join(f["name"] for f in report["features"] if f["on"])
    folders = [
        f"{name}: {f['path']} ({'writable' if f['writable'] else 'NOT writable'}, {human(f['free_bytes'])} free)"
        for name, f in report["folders"].items()
    ]
    free = "unknown" if memory["available_bytes"] is None else human(memory["available_bytes"])
    total = "unknown" if memory["total_bytes"] is None else human(memory["total_bytes"])
    model = report["default_model"]
    return [
        ("versions", [f"sparkchat {report['sparkchat']}", report["python"], *packages, *cuda]),
        ("processor", [f"{processor['name']}, {processor['cores']} cores usable"]),
        ("memory", [f"{free} of {total} available"]),
        ("GPUs", gpus or ["none that this process can use"]),
        ("folders", folders),
        ("terminal", [f"{name}: {value}" for name, value in terminal.items()]),
        (
            "sources",
            [f"hub: {report['sources']['hub']}", f"pip: {'present' if report['sources']['pip'] else 'MISSING'}"],
        ),
        ("off, and why", off or ["nothing"]),
        ("on", [on or "nothing"]),
        (f"model {model['name']}", [model["state"], *([model["reason_off"]] if model["reason_off"] else [])]),
    ]
