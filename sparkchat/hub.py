"""The only client of the Hugging Face hub: finds files, fetches them into the Hugging Face cache, and checks them.

A cut download goes on where it stopped, as long as the file has not changed; a snapshot becomes visible only
when every one of its files is whole. Nothing is asked of the network when everything needed is on disk.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from sparkchat.errors import DamagedFile, ModelNotFound, NoAccess, SparkchatError, Unreachable, UsageError
from sparkchat.paths import Paths
from sparkchat.profile import HubSource
from sparkchat.store import (
    Progress,
    disk_errors,
    ensure_space,
    git_sha1_of,
    human,
    locked,
    move_into_place,
    sha256_of,
)

ANSWER_SECONDS = 4.0
"""How long the hub may take for its first answer before the next source is tried."""

# The base of every transport error of the HTTP library that huggingface_hub was built on, whichever that is.
TransportError: type[Exception] = HfHubHTTPError.__mro__[1]

_TRIES = 4
_READ_SECONDS = 30.0
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_UNWANTED = ("consolidated*", "README*", "LICENSE*")
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    path: str
    size: int
    etag: str
    """sha256 of a large file, git's sha1 of a small one."""


@dataclass(frozen=True)
class Listing:
    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)


def repo_folder(source: HubSource, paths: Paths) -> Path:
    return paths.hub_cache / ("models--" + source.repo.replace("/", "--"))


def cached(source: HubSource, paths: Paths) -> Path | None:
    """The local folder (or the one file) of a source that is complete on disk; no network."""
    folder = repo_folder(source, paths)
    commit = source.revision if source.is_pinned else _read_ref(folder, source.revision)
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    if source.file is not None:
        file = snapshot / source.file
        return file if file.is_file() else None
    return snapshot if _is_complete(snapshot, f"hf:{source.repo}") else None


def commit_of(source: HubSource, paths: Paths) -> str | None:
    return source.revision if source.is_pinned else _read_ref(repo_folder(source, paths), source.revision)


def _token() -> str | None:
    """The access token that Hugging Face's own tools would send."""
    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def reachability() -> str:
    """One line on whether the hub answers, for a report."""
    if constants.HF_HUB_OFFLINE:
        return "not asked: HF_HUB_OFFLINE is set"
    try:
        answer = _within(ANSWER_SECONDS, lambda: get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS))
    except (TransportError, TimeoutError, OSError) as error:
        return f"{constants.ENDPOINT} does not answer ({_short(error)})"
    return f"{constants.ENDPOINT} answers ({answer.status_code})"


def list_files(source: HubSource) -> Listing:
    """What would be fetched, with sizes and checksums. Raises ModelNotFound, NoAccess or Unreachable."""
    token = _token()
    info = _asked(source, token, lambda: _within(ANSWER_SECONDS, lambda: _model_info(source, token)))
    commit = str(info.sha or source.revision)
    names = [s.rfilename for s in info.siblings or ()]
    wanted = [source.file] if source.file is not None else _needed(names)
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        what = missing[0] if missing else "no .safetensors weights"
        raise ModelNotFound(f"hf:{source.repo} holds {'no ' if missing else ''}{what}; it cannot be run from there")
    by_name = {s.rfilename: s for s in info.siblings or ()}
    files = tuple(_remote_file(source.repo, commit, by_name[name], token) for name in wanted)
    return Listing(source.repo, commit, files)


def fetch(source: HubSource, paths: Paths, progress: Progress) -> Path:
    """Bring a source onto this machine and return its folder or file. Waits for another process doing the same."""
    listing = list_files(source)
    folder = repo_folder(source, paths)
    with locked(paths.models / ".locks" / f"{folder.name}.lock", f"hf:{source.repo}", progress), disk_errors(folder):
        ensure_space(folder, missing_bytes(listing, folder), f"hf:{source.repo}")
        headers = build_hf_headers(token=_token() or False)
        _Download(listing, folder, headers, progress).run()
        _publish(listing, source, folder)
    found = cached(source, paths)
    if found is None:
        raise DamagedFile(f"hf:{source.repo} was fetched, but files it names are missing; the repository is incomplete")
    return found


def missing_bytes(listing: Listing, folder: Path) -> int:
    """Bytes still to come, counting what an earlier cut download left."""
    blobs = folder / "blobs"
    return sum(file.size - _size(_part(blobs, file)) for file in listing.files if _size(blobs / file.etag) != file.size)


def verify_snapshot(snapshot: Path) -> list[str]:
    """Names of files whose content does not match the checksum that the cache stores them under."""
    return [
        str(file.relative_to(snapshot))
        for file in sorted(snapshot.rglob("*"))
        if file.is_file() and not _is_whole(file)
    ]


class _Download:
    """The files of one listing, one after the other, into ``blobs``."""

    def __init__(self, listing: Listing, folder: Path, headers: dict[str, str], progress: Progress) -> None:
        self.listing = listing
        self.blobs = folder / "blobs"
        self.headers = headers | {"Accept-Encoding": "identity"}
        self.progress = progress
        self.done = 0

    def run(self) -> None:
        self.blobs.mkdir(parents=True, exist_ok=True)
        for file in self.listing.files:
            if _size(self.blobs / file.etag) != file.size or not (self.blobs / file.etag).is_file():
                self._file(file)
            self.done += file.size
            self._report(0)
        for leftover in self.blobs.glob("*.sparkchat-part"):
            leftover.unlink(missing_ok=True)

    def _file(self, file: RemoteFile) -> None:
        part = _part(self.blobs, file)
        try:
            self._bytes(file, part)
        except OSError:
            # A full disk must not keep a useless file; after a cut connection (another error) the part stays.
            part.unlink(missing_ok=True)
            raise
        if not _matches(part, file):
            part.unlink(missing_ok=True)
            raise DamagedFile(
                f"{file.path} of hf:{self.listing.repo} came with the wrong checksum and has been removed; try again"
            )
        move_into_place(part, self.blobs / file.etag)

    def _bytes(self, file: RemoteFile, part: Path) -> None:
        reason, tries = "", 0
        while _size(part) < file.size or not part.exists():
            before = _size(part)
            try:
                self._request(file, part)
                reason = "the connection ended early"
            except HfHubHTTPError as error:
                status = error.response.status_code
                if status not in (408, 429) and status < 500:
                    raise _explain(error, HubSource(self.listing.repo), _token()) from None
                reason = f"it answers with error {status}"
            except TransportError as error:
                reason = _short(error)
            # A try that brought bytes costs nothing: only tries without any are counted.
            tries = 0 if _size(part) > before else tries + 1
            if tries >= _TRIES:
                kept = f"{human(_size(part))} of {human(file.size)} kept in {part} for the next try"
                raise Unreachable(f"the hub stopped sending {file.path} of hf:{self.listing.repo}: {reason}; {kept}")
            if _size(part) < file.size:
                time.sleep(min(0.25 * 2**tries, 4.0))

    def _request(self, file: RemoteFile, part: Path) -> None:
        start = _size(part)
        if start > file.size:
            part.unlink()
            start = 0
        url = hf_hub_url(self.listing.repo, file.path, revision=self.listing.commit)
        headers = self.headers | ({"Range": f"bytes={start}-"} if start else {})
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_READ_SECONDS
        ) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                return
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            goes_on = response.status_code == 206 and _range_start(response.headers) == start
            with part.open("ab" if goes_on else "wb") as stream:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    self._report(stream.tell())

    def _report(self, in_file: int) -> None:
        self.progress.update(f"hf:{self.listing.repo}", self.done + in_file, self.listing.num_bytes)


def _publish(listing: Listing, source: HubSource, folder: Path) -> None:
    snapshot = folder / "snapshots" / listing.commit
    for file in listing.files:
        link = snapshot / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(folder / "blobs" / file.etag, link.parent)
        if not (link.is_symlink() and os.readlink(link) == target):
            fresh = link.with_name(f".{link.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(target)
            fresh.replace(link)
    if not source.is_pinned:
        ref = folder / "refs" / source.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.commit, encoding="utf-8")


def _model_info(source: HubSource, token: str | None) -> Any:
    api = HfApi(token=token or False)
    return api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=ANSWER_SECONDS)


def _asked(source: HubSource, token: str | None, ask: Callable[[], T]) -> T:
    """Run one request; try again when the hub is busy; say in plain words what went wrong."""
    if constants.HF_HUB_OFFLINE:
        raise Unreachable(f"hf:{source.repo} is not on this machine, and HF_HUB_OFFLINE is set; unset it to fetch")
    for number in range(_TRIES):
        try:
            return ask()
        except HfHubHTTPError as error:
            busy = error.response.status_code in (408, 429) or error.response.status_code >= 500
            if not busy or number == _TRIES - 1:
                raise _explain(error, source, token) from None
            time.sleep(0.25 * 2**number)
        except (TransportError, TimeoutError, OSError) as error:
            raise Unreachable(
                f"the hub does not answer for hf:{source.repo} ({_short(error)}); check the network"
            ) from None
    raise AssertionError("unreachable")


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Run a request in a thread: looking up a host name knows no timeout of its own."""
    box: list[Any] = []

    def work() -> None:
        try:
            box.append((True, ask()))
        except (HfHubHTTPError, TransportError, OSError, ValueError) as error:
            box.append((False, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    succeeded, value = box[0]
    if not succeeded:
        raise value
    answer: T = value
    return answer


def _explain(error: HfHubHTTPError, source: HubSource, token: str | None) -> SparkchatError:
    """The error of a request in plain words; never any part of the token."""
    name, status = f"hf:{source.repo}", error.response.status_code
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{name} has no revision {source.revision!r}; leave out @{source.revision} or check it")
    if isinstance(error, GatedRepoError):
        if token is None:
            return NoAccess(
                f"{name} is gated: accept its terms on its hub page, then log in (`hf auth login`, or HF_TOKEN)"
            )
        return NoAccess(
            f"{name} is gated and your token has no access: ask for it on its hub page, or wait if you have"
        )
    if token is not None and status in (401, 403) and _is_refused(token):
        return _explain_bad_token(source)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
        if token is None:
            return ModelNotFound(
                f"{name} does not exist, or is private: check the spelling, or log in (`hf auth login`, or HF_TOKEN)"
            )
        return ModelNotFound(f"{name} does not exist, or your token may not see it: check the spelling and the token")
    return Unreachable(f"the hub answers with error {status} for {name}; try again later")


def _is_refused(token: str) -> bool:
    try:
        HfApi(token=token).whoami()
    except HfHubHTTPError as error:
        return error.response.status_code == 401
    except (TransportError, OSError, ValueError):
        return False
    return False


def _explain_bad_token(source: HubSource) -> SparkchatError:
    name = f"hf:{source.repo}"
    try:
        _model_info(source, None)
    except (HfHubHTTPError, TransportError, OSError):
        return NoAccess(
            f"the hub refuses your token, and without one {name} does not exist or is hidden; "
            "log in again (`hf auth login`), or unset HF_TOKEN"
        )
    return NoAccess(
        f"the hub refuses your token, but {name} is public: put HF_HUB_DISABLE_IMPLICIT_TOKEN=1 before the command "
        "to go on without it, or log in again (`hf auth login`)"
    )


def _remote_file(repo: str, commit: str, sibling: Any, token: str | None) -> RemoteFile:
    path = str(sibling.rfilename)
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise DamagedFile(f"hf:{repo} names a file outside its folder: {path!r}; do not use it")
    etag = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    if sibling.size is not None and etag:
        return RemoteFile(path, int(sibling.size), str(etag))
    return _head(repo, commit, path, token)


def _head(repo: str, commit: str, path: str, token: str | None) -> RemoteFile:
    from huggingface_hub import get_hf_file_metadata

    source = HubSource(repo, commit)
    url = hf_hub_url(repo, path, revision=commit)
    found = _asked(source, token, lambda: get_hf_file_metadata(url, token=token or False, timeout=ANSWER_SECONDS))
    if found.size is None or not found.etag or not re.fullmatch(r"[A-Za-z0-9._-]+", found.etag):
        raise Unreachable(f"the hub gives no size or no usable ETag for {path} of hf:{repo}; try again later")
    return RemoteFile(path, found.size, found.etag)


def _needed(names: list[str]) -> list[str]:
    def matches(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [n for n in names if "/" not in n and matches(n, _WANTED) and not matches(n, _UNWANTED)]
    return wanted if any(name.endswith(".safetensors") for name in wanted) else []


def _read_ref(folder: Path, revision: str) -> str | None:
    if ".." in PurePosixPath(revision).parts:
        raise UsageError(f"revision {revision!r} is not possible; give a branch, a tag or a commit")
    try:
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except OSError:
        # A revision may also be a commit that was fetched under a branch's name.
        return revision if (folder / "snapshots" / revision).is_dir() else None


def _is_complete(snapshot: Path, name: str) -> bool:
    """Is everything there? Raises DamagedFile for weights that are there but cut short."""
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    weights = list(snapshot.glob("*.safetensors"))
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            weights = [snapshot / str(shard) for shard in shards]
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False
    if not weights or not all(file.is_file() for file in weights):
        return False
    for file in weights:
        if not _has_all_tensors(file):
            raise DamagedFile(
                f"{file.name} of {name} is cut short in {snapshot}; type `sparkchat pull {name}` to mend it"
            )
    return True


def _has_all_tensors(file: Path) -> bool:
    """Does the file end where its own header says? (8 bytes of length, a JSON header, then the tensors.)"""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > 100 << 20:
                return False
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return file.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error):
        return False


def _is_whole(file: Path) -> bool:
    name = file.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return sha256_of(file) == name
    if re.fullmatch(r"[0-9a-f]{40}", name):
        return git_sha1_of(file) == name
    return True


def _matches(part: Path, file: RemoteFile) -> bool:
    if _size(part) != file.size:
        return False
    if re.fullmatch(r"[0-9a-f]{64}", file.etag):
        return sha256_of(part) == file.etag
    return git_sha1_of(part) == file.etag if re.fullmatch(r"[0-9a-f]{40}", file.etag) else True


def _part(blobs: Path, file: RemoteFile) -> Path:
    """Named after the content, so that bytes of a file that has changed are never appended to."""
    return blobs / f"{file.etag}.sparkchat-part"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _range_start(headers: Any) -> int | None:
    found = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
