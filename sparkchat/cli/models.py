"""``list``, ``show``, ``pull``, ``rm`` and ``verify``: profiles and the files they name."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sparkchat import environment, inventory, strict_json
from sparkchat.catalog import DrafterRef, ModelRef, find_drafter, find_model, known_repositories, profile_files
from sparkchat.cli import arguments as a
from sparkchat.cli.memory import memory_report
from sparkchat.cli.output import as_json, data, note, printable, table
from sparkchat.cli.prepare import chosen_model
from sparkchat.cli.progress import fetch_progress
from sparkchat.errors import DamagedFile, ModelNotFound, NotEnoughDisk, SparkchatError, UsageError
from sparkchat.fit import describe_needs, needs_of, this_machine
from sparkchat.locate import is_offline, refetch
from sparkchat.params import Correction, CostTable
from sparkchat.paths import Paths, user_paths
from sparkchat.profile import HubSource, Profile, Setting, Source, WheelSource
from sparkchat.resolve import resolve_options
from sparkchat.snapshot import cached_repositories
from sparkchat.store import MARGIN_BYTES, human


def register(app: typer.Typer) -> None:
    app.command("list")(list_models)
    for command in (show, pull, rm, verify):
        app.command()(command)


def list_models(json_: a.AsJson = False) -> None:
    """Profiles and fetched repositories, and which of their files are on this machine."""
    paths = user_paths()
    entries = [_entry(name, paths) for name in (*profile_files(paths), *_other_repositories(paths))]
    if json_:
        as_json(entries)
        return
    rows = [(e["name"], _size(e), e["state"], e["modified"] or "-", e["label"] or "-") for e in entries]
    table(("NAME", "SIZE", "STATE", "MODIFIED", "LABEL"), rows)


def _size(entry: dict[str, Any]) -> str:
    """Of what is here, or of what a fetch would bring where that is pinned."""
    size = entry["bytes"] or entry["pinned_bytes"]
    return human(size) if size else "-"


def _other_repositories(paths: Paths) -> list[str]:
    """Names of models in the hub's cache that no profile names."""
    named = known_repositories(paths)
    found = [source for source in cached_repositories(paths) if source.repo not in named]
    return [f"hf:{s.repo}" + ("" if s.revision == "main" else f"@{s.revision}") for s in found]


def _entry(name: str, paths: Paths) -> dict[str, Any]:
    """One profile; a broken one is listed with its error rather than hiding the rest."""
    try:
        model = find_model(name, paths)
        files = inventory.local_files(model.path, model.sources, paths)
        found = [file.stat() for file in files]
    except (SparkchatError, OSError) as error:
        nothing: dict[str, Any] = dict.fromkeys(("bytes", "pinned_bytes", "modified", "label"))
        return {"name": name, **nothing, "state": f"broken: {error}", "files": []}
    profile, first = model.profile, next(iter(model.sources), None)
    newest = max((stat.st_mtime for stat in found), default=None)
    return {
        "name": name,
        "bytes": sum(stat.st_size for stat in found) if files else None,
        "pinned_bytes": None if first is None else first.size,
        "state": "on disk" if files else "not fetched",
        "modified": None if newest is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(newest)),
        "label": None if profile is None else profile.get("model.label"),
        "files": [str(file) for file in files],
    }


def show(
    ctx: typer.Context,
    model: a.Model = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Every option, and where its value came from.")] = False,
    profile: a.ProfileName = None,
    context: a.ContextLength = None,
    json_: a.AsJson = False,
) -> None:
    """What MODEL is: sources, licence, drafter, memory, defaults; --resolved names the source of every value."""
    paths = user_paths()
    found = find_model(chosen_model(model), paths, profile)
    settings = dict(found.profile.settings) if found.profile is not None else {}
    if resolved:
        settings = _resolved(found, settings)
    drafter = find_drafter(settings["drafter"].value if resolved else None, found, paths)
    report = _description(found, drafter, settings, paths) | memory_report(found, drafter, context, paths)
    if json_:
        as_json(report)
        return
    for key in ("name", "kind", "path", "state", "drafter", "reason_off", "memory", "machine"):
        if report[key] is not None:
            data(f"{key.ljust(_KEY_WIDTH)}  {printable(str(report[key]))}")
    for number, line in enumerate(report["memory_plan"]["lines"] if report["memory_plan"] else ()):
        data(f"{('' if number else 'memory plan').ljust(_KEY_WIDTH)}  {printable(line)}")
    for key, setting in settings.items():
        data(f"{key.ljust(_KEY_WIDTH)}  {printable(_shown(setting.value))}  ({printable(setting.source)})")


_KEY_WIDTH = 26
_AS_OPTIONS = ("drafter.block_size", "speculation.refine")
"""Keys of a profile that are shown as the options they set."""


def _resolved(model: ModelRef, settings: dict[str, Setting]) -> dict[str, Setting]:
    """The options of a run by their own names, and the rest of the profile by its keys."""
    options = resolve_options(model.profile, {}, os.environ).settings
    rest = {key: s for key, s in settings.items() if not key.startswith("run.") and key not in _AS_OPTIONS}
    return {**options, **rest}


def _description(model: ModelRef, drafter: DrafterRef, settings: dict[str, Setting], paths: Paths) -> dict[str, Any]:
    files = inventory.local_files(model.path, model.sources, paths)
    profile: Profile | None = model.profile
    needs = needs_of(profile)
    return {
        "name": model.name,
        "kind": model.kind,
        "path": str(files[0].parent if len(files) > 1 else files[0]) if files else None,
        "state": "on disk" if files else "not fetched",
        "drafter": str(drafter.path) if drafter.path else INNER if drafter.is_inner else None,
        "memory": _memory_needs(needs) if needs else None,
        "machine": _machine_line(needs) if needs else None,
        "reason_off": drafter.reason_off,
        "profiles": [str(layer.file) for layer in profile.files] if profile is not None else [],
        "settings": {key: {"value": _plain(s.value), "source": s.source} for key, s in settings.items()},
    }


INNER = "in the model's own checkpoint"


def _memory_needs(needs: dict[int, float]) -> str:
    return f"{describe_needs(needs)} (an estimate, by number of devices)"


def _machine_line(needs: dict[int, float]) -> str:
    """What this machine has, and on how many of its devices the model fits."""
    machine = this_machine("auto")
    fitting = [str(count) for count in sorted(needs) if machine.fits(needs, count)]
    verdict = f"fits on {' or '.join(fitting)}" if fitting else "DOES NOT FIT"
    return f"{machine.describe()}, {verdict}" if machine.devices else machine.describe()


def _plain(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, CostTable):
        return {"rows": list(value.rows), "step_ms": list(value.step_ms), "plain_ms": value.plain_ms}
    if isinstance(value, Correction):
        return {"temperatures": list(value.temperatures), "shifts": list(value.shifts)}
    if isinstance(value, (HubSource, WheelSource)):
        kind = "hub" if isinstance(value, HubSource) else "wheel"
        return {"kind": kind} | asdict(value) | ({"pinned": value.is_pinned} if isinstance(value, HubSource) else {})
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], (HubSource, WheelSource)):
        return ", then ".join(_with_size(source) for source in value)
    if value is None or value == ():
        return "-"
    return value if isinstance(value, str) else strict_json.dumps(_plain(value))


def _with_size(source: Source) -> str:
    return source.describe() if source.size is None else f"{source.describe()}, {human(source.size)}"


def pull(
    model: a.Model = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")] = False,
    profile: a.ProfileName = None,
    context: a.ContextLength = None,
    json_: a.AsJson = False,
    offline: a.Offline = False,
) -> None:
    """Fetch MODEL and its drafter; what is whole on this machine is not fetched again."""
    paths = user_paths()
    found = find_model(chosen_model(model), paths, profile)
    drafter = find_drafter(None, found, paths)
    parts = [("model", found.sources), ("drafter", drafter.sources)]
    parts = [(what, sources) for what, sources in parts if sources]
    if dry_run:
        memory = memory_report(found, drafter, context, paths, ask_hub=not is_offline(offline))
        _dry_run(found, parts, paths, memory, as_json_=json_, offline=is_offline(offline))
        return
    if context is not None:
        raise UsageError("--context has no meaning for a fetch; add --dry-run to see what it takes, or leave it out")
    if is_offline(offline):
        raise ModelNotFound(
            f"pull {found.name} cannot fetch offline; drop --offline (or SPARKCHAT_OFFLINE, HF_HUB_OFFLINE)"
        )
    pulled = {}
    inventory.ensure_space_for_all(parts, paths)
    with fetch_progress() as progress:
        for what, sources in parts:
            located = refetch(sources, found.name, paths, progress)
            pulled[what] = {"path": str(located.path), "source": located.source, "revision": located.revision}
    if json_:
        as_json({"name": found.name, **pulled})
        return
    for what, entry in pulled.items():
        data(f"{what}: {entry['path']}  (from {entry['source']})")
    if not pulled:
        data(f"{found.name} is a local path; nothing to fetch")


def _dry_run(
    model: ModelRef,
    parts: list[tuple[str, Any]],
    paths: Paths,
    memory_plan: dict[str, Any],
    *,
    as_json_: bool,
    offline: bool,
) -> None:
    """Bytes, disk and memory before the first byte; exit 5 when the disk is too small."""
    plans = [(what, inventory.plan(sources, model.name, paths, offline=offline)) for what, sources in parts]
    to_fetch, to_hold = sum(plan.fetch_bytes for _, plan in plans), sum(plan.disk_bytes for _, plan in plans)
    free = inventory.free_for(plans, paths)
    needs = needs_of(model.profile)
    needed = needs.get(1)
    memory = environment.memory().available_bytes
    report = {
        "name": model.name,
        "parts": [
            {"part": what, "source": plan.source, "bytes": plan.fetch_bytes, "cached": plan.is_cached}
            for what, plan in plans
        ],
        "fetch_bytes": to_fetch,
        "disk_bytes": to_hold,
        "disk_free_bytes": free,
        "disk_fits": to_hold == 0 or to_hold + MARGIN_BYTES <= free,
        "memory_bytes": None if needed is None else int(needed * 1e9),
        "memory_available_bytes": memory,
        "memory_fits": None if needed is None or memory is None else needed * 1e9 <= memory,
    } | memory_plan
    if memory_plan["memory_plan"]:
        plan = memory_plan["memory_plan"]
        report |= {"memory_bytes": plan["total_bytes"], "memory_available_bytes": plan["free_bytes"]}
        report["memory_fits"] = None if plan["largest_context"] is None else plan["fits"]
    if as_json_:
        as_json(report)
    else:
        for part in report["parts"]:
            state = "on disk already" if part["cached"] else f"{human(part['bytes'])} from {part['source']}"
            data(f"{part['part']}: {printable(state)}")
        data(f"disk: {human(to_hold)} needed, {human(free)} free, {'fits' if report['disk_fits'] else 'DOES NOT FIT'}")
        for line in memory_plan["memory_plan"]["lines"] if memory_plan["memory_plan"] else ():
            data(f"memory: {line}")
        if not memory_plan["memory_plan"]:
            data(f"memory: {_memory_line(needed, memory)}")
        if len(needs) > 1:
            data(f"memory by number of devices: {describe_needs(needs)}; this machine: {_machine_line(needs)}")
    if not report["disk_fits"]:
        raise NotEnoughDisk(
            f"{model.name} needs {human(to_hold)} of disk and {human(free)} is free; free some space first"
        )


def _memory_line(needed: float | None, available: int | None) -> str:
    if needed is None or available is None:
        return "not known for this model" if needed is None else f"{needed} GB needed, free memory unknown"
    fits = "fits" if needed * 1e9 <= available else "DOES NOT FIT"
    return f"{needed} GB needed (an estimate), {human(available)} available, {fits}"


def rm(model: a.RequiredModel, json_: a.AsJson = False) -> None:
    """Remove the fetched files of MODEL and what cut downloads of it left."""
    paths = user_paths()
    found = find_model(model, paths)
    if not found.sources:
        raise SparkchatError(f"{model} is your own file, which sparkchat did not fetch; remove {found.path} yourself")
    sources, kept = _removable(found, paths)
    removed, num_bytes = inventory.remove(sources, paths)
    if not removed:
        raise ModelNotFound(f"nothing of {model} is on this machine; see `sparkchat list`")
    if json_:
        as_json({"name": found.name, "removed": [str(path) for path in removed], "bytes": num_bytes})
        return
    for path in removed:
        data(str(path))
    note(f"{human(num_bytes)} freed")
    for sentence in kept:
        note(sentence)


def _removable(model: ModelRef, paths: Paths) -> tuple[tuple[Source, ...], list[str]]:
    """Sources of a model and its drafter, but not those that another profile uses here; and a word on each of these."""
    users: dict[tuple[str, str], str] = {}
    for name in profile_files(paths):
        try:
            other = find_model(name, paths)
            if name != model.name and inventory.is_on_disk(other.sources, paths):
                both = (*other.sources, *find_drafter(None, other, paths).sources)
                users |= {(source.repo, source.revision): name for source in both if isinstance(source, HubSource)}
        except SparkchatError:
            continue
    sources, kept = [], []
    for source in (*model.sources, *find_drafter(None, model, paths).sources):
        user = users.get((source.repo, source.revision)) if isinstance(source, HubSource) else None
        if user is None:
            sources.append(source)
        elif inventory.is_on_disk((source,), paths):
            kept.append(f"{source.describe()} stays, because {user} uses it")
    return tuple(sources), kept


def verify(model: a.Model = None, json_: a.AsJson = False) -> None:
    """Read every file of MODEL and its drafter again, and compare checksums; exit 6 when one differs."""
    paths = user_paths()
    found = find_model(chosen_model(model), paths)
    drafter = find_drafter(None, found, paths)
    checked = inventory.verify(found.path, found.sources, paths)
    if not checked:
        raise ModelNotFound(f"{found.name} is not on this machine; type `sparkchat pull {found.name}`")
    checked += inventory.verify(drafter.path, drafter.sources, paths)
    if json_:
        as_json({"name": found.name, "files": [asdict(item) for item in checked]})
    else:
        for item in checked:
            data(f"{item.verdict.ljust(9)}  {printable(item.path)}")
    bad = [item for item in checked if item.verdict == "damaged"]
    if bad:
        raise DamagedFile(
            f"{len(bad)} of {len(checked)} files of {found.name} are damaged, first {bad[0].path}; "
            + (
                f"type `sparkchat rm {found.name}`, then `sparkchat pull {found.name}`"
                if found.sources
                else "copy it again"
            )
        )
