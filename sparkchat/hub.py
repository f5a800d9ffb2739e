"""The only client of the Hugging Face hub: finds files, fetches them into the Hugging Face cache, and checks them.

A cut download goes on where it stopped, as long as the file has not changed; a snapshot becomes visible only
when every one of its files is whole. Nothing is asked of the network when everything needed is on disk.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from sparkchat.errors import DamagedFile, ModelNotFound, NoAccess, SparkchatError, Unreachable
from sparkchat.headers import (
    Headers,
    Read,
    UnreadableHeader,
    bytes_reader,
    folder_headers,
    read_gguf,
    safetensors_head,
)
from sparkchat.hub_access import what_to_check, why_no_client, without_password
from sparkchat.options import nearest
from sparkchat.paths import Paths
from sparkchat.profile import HubSource
from sparkchat.snapshot import (
    PART,
    Listing,
    RemoteFile,
    cached,
    is_held,
    lock_file,
    matches,
    missing_bytes,
    part_of,
    publish,
    repo_folder,
    size_of,
)
from sparkchat.store import Progress, disk_errors, ensure_space, human, locked, move_into_place

ANSWER_SECONDS = 4.0
"""How long the hub may take for its first answer before the next source is tried."""

# The base of every transport error of the HTTP library that huggingface_hub was built on, whichever that is.
TransportError: type[Exception] = HfHubHTTPError.__mro__[1]
# What that library raises at an address that is none, a class apart.
InvalidAddress: type[Exception] = getattr(
    sys.modules[TransportError.__module__.partition(".")[0]], "InvalidURL", TransportError
)
_NO_HUB = (ValueError, TypeError, LookupError, AttributeError)
"""What the hub's client raises at an answer that it cannot read."""

_TRIES = 4
_ETAG = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
"""What may become the name of a file."""
_LONGEST_WAIT = 60.0
"""A hub that asks for a longer pause than this is not waited for."""
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
_UNWANTED = ("consolidated*", "README*", "LICENSE*")
T = TypeVar("T")


def _token() -> str | None:
    """The access token that Hugging Face's own tools would send; none where its file cannot be read."""
    try:
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except (OSError, UnicodeDecodeError):
        return None
    if token is not None and not (token.isascii() and token.isprintable()):
        raise NoAccess(
            "your access token holds characters that none has; log in again (`hf auth login`), or set HF_TOKEN"
        )
    return token


def reachability() -> str:
    """One line on whether the hub answers, for a report."""
    if constants.HF_HUB_OFFLINE:
        return "not asked: HF_HUB_OFFLINE is set"
    try:
        _open_client("anything")
        answer = _within(ANSWER_SECONDS, lambda: get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS))
    except (TransportError, TimeoutError, OSError) as error:
        return f"{constants.ENDPOINT} does not answer ({_short(error)})"
    except Unreachable as error:
        return error.message
    return f"{constants.ENDPOINT} answers ({answer.status_code})"


def list_files(source: HubSource) -> Listing:
    """What would be fetched, with sizes and checksums. Raises ModelNotFound, NoAccess or Unreachable."""
    token = _token()
    info = _asked(source, token, lambda: _within(ANSWER_SECONDS, lambda: _model_info(source, token)))
    commit = str(info.sha or source.revision)
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DamagedFile(f"the hub names no commit for hf:{source.repo} but {commit[:60]!r}; do not use it")
    names = [s.rfilename for s in info.siblings or ()]
    wanted = [source.file] if source.file is not None else _needed(names)
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        raise _not_held(source, missing, names)
    by_name = {s.rfilename: s for s in info.siblings or ()}
    files = tuple(_remote_file(source.repo, commit, by_name[name], token) for name in wanted)
    return Listing(source.repo, commit, files)


def _not_held(source: HubSource, missing: list[str], names: list[str]) -> ModelNotFound:
    held = [name for name in names if name.endswith(".gguf")]
    if not held:
        what = f"no {missing[0]}" if missing else "no .safetensors weights"
        return ModelNotFound(f"hf:{source.repo} holds {what}; it cannot be run from there")
    near = nearest(missing[0], held) if missing else None
    what = f"no {missing[0]}" if missing else "GGUF files and no other weights"
    return ModelNotFound(
        f"hf:{source.repo} holds {what}; give one of its files, e.g. hf:{source.repo}/{near or held[0]}"
    )


def fetch(source: HubSource, paths: Paths, progress: Progress) -> Path:
    """Bring a source onto this machine and return its folder or file. Waits for another process doing the same."""
    listing = list_files(source)
    folder = repo_folder(source, paths)
    with locked(lock_file(source, paths), f"hf:{source.repo}", progress), disk_errors(folder):
        ensure_space(folder, missing_bytes(listing, folder), f"hf:{source.repo}")
        headers = build_hf_headers(token=_token() or False)
        _Download(listing, folder, headers, progress).run()
        publish(listing, source, folder)
    found = cached(source, paths)
    if found is None:
        raise DamagedFile(f"hf:{source.repo} was fetched, but files it names are missing; the repository is incomplete")
    return found


class _Download:
    """The files of one listing, one after the other, into ``blobs``."""

    def __init__(self, listing: Listing, folder: Path, headers: dict[str, str], progress: Progress) -> None:
        self.listing = listing
        self.blobs = folder / "blobs"
        self.headers = headers | {"Accept-Encoding": "identity"}
        self.progress = progress
        self.ended_early: set[str] = set()
        """Files that were once found shorter than announced, and begun afresh."""
        self.done = 0

    def run(self) -> None:
        self.blobs.mkdir(parents=True, exist_ok=True)
        for file in self.listing.files:
            if not is_held(file, self.listing, self.blobs.parent):
                self._file(file)
            self.done += file.size
            self._report(0)
        for leftover in self.blobs.glob(f"*{PART}"):
            leftover.unlink(missing_ok=True)

    def _file(self, file: RemoteFile) -> None:
        part = part_of(self.blobs, file)
        was_begun = size_of(part) > 0
        try:
            is_right = self._whole(file, part)
            if not is_right and was_begun:
                # What an earlier run left may be what is wrong.
                self.progress.say(f"{file.path} does not have its checksum after it was resumed; fetching it afresh")
                part.unlink(missing_ok=True)
                is_right = self._whole(file, part)
        except OSError:
            # A full disk must not keep a useless file; after a cut connection (another error) the part stays.
            part.unlink(missing_ok=True)
            raise
        if not is_right:
            part.unlink(missing_ok=True)
            raise DamagedFile(
                f"{file.path} of hf:{self.listing.repo} came with the wrong checksum and has been removed; try again"
            )
        move_into_place(part, self.blobs / file.etag)

    def _whole(self, file: RemoteFile, part: Path) -> bool:
        self._bytes(file, part)
        # Reading a large file again takes a while: the report shows that something is going on.
        return matches(part, file.size, file.etag, lambda _: self._report(file.size))

    def _bytes(self, file: RemoteFile, part: Path) -> None:
        reason, tries, furthest = "", 0, size_of(part)
        while size_of(part) < file.size or not part.exists():
            pause = min(0.25 * 2**tries, 4.0)
            try:
                reason = self._request(file, part)
            except HfHubHTTPError as error:
                if not _is_busy(error):
                    raise _explain(error, HubSource(self.listing.repo, self.listing.commit), _token()) from None
                reason, pause = f"it answers with error {error.response.status_code}", _pause(error, tries)
                if pause > _LONGEST_WAIT or (tries == _TRIES - 1 and error.response.status_code == 429):
                    raise _explain(error, HubSource(self.listing.repo), _token()) from None
            except TransportError as error:
                reason = _short(error)
            # A try that brought bytes costs nothing: only tries without any are counted.
            reached = size_of(part)
            tries = 0 if reached > furthest else tries + 1
            furthest = max(furthest, reached)
            if tries >= _TRIES:
                kept = f"{human(reached)} of {human(file.size)} kept in {part} for the next try"
                raise Unreachable(f"the hub stopped sending {file.path} of hf:{self.listing.repo}: {reason}; {kept}")
            if reached < file.size:
                if pause >= 1:
                    self.progress.say(f"{file.path}: {reason}; asking again in {pause:.0f} s")
                time.sleep(pause)

    def _request(self, file: RemoteFile, part: Path) -> str:
        """One try; returns why it ended, should the file not be whole by then."""
        start = size_of(part)
        if start > file.size:
            part.unlink()
            start = 0
        url = hf_hub_url(self.listing.repo, file.path, revision=self.listing.commit)
        headers = self.headers | ({"Range": f"bytes={start}-"} if start else {})
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=_read_seconds()
        ) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                if file.path in self.ended_early:
                    raise DamagedFile(
                        f"{file.path} of hf:{self.listing.repo} ends after {start} bytes, although the hub announced "
                        f"{file.size}; nothing of it is used, try again later"
                    )
                self.ended_early.add(file.path)
                return "it has no bytes where the file should go on"
            if response.status_code >= 400:
                response.read()
                hf_raise_for_status(response)
            first = _range_start(response.headers) if response.status_code == 206 else 0
            if first not in (0, start):
                return "it sends another part of the file than was asked for"
            with part.open("ab" if first else "wb") as stream:
                for chunk in response.iter_raw():
                    if stream.tell() + len(chunk) > file.size:
                        raise DamagedFile(
                            f"the hub sends more of {file.path} of hf:{self.listing.repo} than the {human(file.size)} "
                            "it announced; nothing of it is used, try again later"
                        )
                    stream.write(chunk)
                    self._report(stream.tell())
        return "the connection ended early"

    def _report(self, in_file: int) -> None:
        self.progress.update(f"hf:{self.listing.repo}", self.done + in_file, self.listing.num_bytes)


def _model_info(source: HubSource, token: str | None) -> Any:
    api = HfApi(token=token or False)
    return api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=ANSWER_SECONDS)


def _asked(source: HubSource, token: str | None, ask: Callable[[], T]) -> T:
    """Run one request; try again when the hub is busy; say in plain words what went wrong."""
    if constants.HF_HUB_OFFLINE:
        raise Unreachable(f"hf:{source.repo} is not on this machine, and HF_HUB_OFFLINE is set; unset it to fetch")
    _open_client(f"hf:{source.repo}")
    for number in range(_TRIES):
        try:
            return ask()
        except HfHubHTTPError as error:
            pause = _pause(error, number)
            if not _is_busy(error) or number == _TRIES - 1 or pause > ANSWER_SECONDS:
                raise _explain(error, source, token) from None
            time.sleep(pause)
        except (TransportError, TimeoutError, OSError) as error:
            raise Unreachable(
                f"the hub does not answer for hf:{source.repo} ({_short(error)}); {what_to_check(constants.ENDPOINT)}"
            ) from None
        except HFValidationError:
            raise ModelNotFound(f"the hub allows no name like hf:{source.repo}; check the spelling") from None
        except _NO_HUB:
            raise Unreachable(
                f"what answers for hf:{source.repo} at {without_password(constants.ENDPOINT)} is no hub: a login page "
                f"of the network, or another server; {what_to_check(constants.ENDPOINT)} and HF_ENDPOINT"
            ) from None
    raise AssertionError("unreachable")


def _open_client(name: str) -> None:
    """Raises Unreachable where this machine's settings allow no request at all."""
    try:
        get_session()
    except (*_NO_HUB, TransportError, InvalidAddress, ImportError, OSError) as error:
        why = why_no_client(error, constants.ENDPOINT)
        raise Unreachable(f"the hub cannot be asked for {name}: {why}") from None


def _is_busy(error: HfHubHTTPError) -> bool:
    return error.response.status_code in (408, 429) or error.response.status_code >= 500


def _pause(error: HfHubHTTPError, number: int) -> float:
    """Seconds before the next try: what the hub asks for, else longer each time."""
    asked = error.response.headers.get("Retry-After", "")
    return float(asked) if re.fullmatch(r"\d{1,6}", asked) else 0.25 * 2**number


def _read_seconds() -> float:
    """How long a connection may bring nothing before the file is asked for again, from where it stands."""
    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT) if "HF_HUB_DOWNLOAD_TIMEOUT" in os.environ else 30.0


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Run a request in a thread: looking up a host name knows no timeout of its own."""
    box: list[Any] = []

    def work() -> None:
        try:
            box.append((True, ask()))
        except (*_NO_HUB, TransportError, OSError) as error:
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
    if isinstance(error, EntryNotFoundError):
        return ModelNotFound(f"{name} does not hold a file that its own listing names; try again later")
    if isinstance(error, GatedRepoError):
        return _explain_gate(error, name, token)
    if token is not None and status in (401, 403) and _is_refused(token):
        return _explain_bad_token(source)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        if token is None:
            return ModelNotFound(
                f"{name} does not exist, or is private: check the spelling, or log in (`hf auth login`, or HF_TOKEN)"
            )
        return ModelNotFound(f"{name} does not exist, or your token may not see it: check the spelling and the token")
    if status == 403:
        return NoAccess(
            f"the hub forbids reading {name} (error 403): "
            + ("log in (`hf auth login`, or HF_TOKEN)" if token is None else "your token lacks the right to read it")
        )
    if status == 429:
        wait = error.response.headers.get("Retry-After", "")
        pause = f"wait {wait} s" if wait.isdigit() else "wait a few minutes"
        more = "" if token is not None else ", or log in (`hf auth login`, or HF_TOKEN), which allows more"
        return Unreachable(f"the hub limits how often it may be asked (error 429 for {name}); {pause}{more}")
    return Unreachable(f"the hub has trouble of its own (error {status} for {name}); try again later")


def _explain_gate(error: HfHubHTTPError, name: str, token: str | None) -> NoAccess:
    if token is None:
        return NoAccess(
            f"{name} is gated: accept its terms on its hub page, then log in (`hf auth login`, or HF_TOKEN)"
        )
    if "awaiting" in str(error).lower():
        return NoAccess(f"{name} is gated, and your request for access awaits its owner's answer; try again after it")
    return NoAccess(f"{name} is gated and your token has no access: ask for it on its hub page, or wait if you have")


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
    if sibling.size is not None and etag and re.fullmatch(_ETAG, str(etag)):
        return RemoteFile(path, int(sibling.size), str(etag))
    return _head(repo, commit, path, token)


def _head(repo: str, commit: str, path: str, token: str | None) -> RemoteFile:
    from huggingface_hub import get_hf_file_metadata

    source = HubSource(repo, commit)
    url = hf_hub_url(repo, path, revision=commit)
    found = _asked(source, token, lambda: get_hf_file_metadata(url, token=token or False, timeout=ANSWER_SECONDS))
    if found.size is None or not found.etag or not re.fullmatch(_ETAG, found.etag):
        raise Unreachable(f"the hub gives no size or no usable ETag for {path} of hf:{repo}; try again later")
    return RemoteFile(path, found.size, found.etag)


def _needed(names: list[str]) -> list[str]:
    def matches(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [n for n in names if "/" not in n and matches(n, _WANTED) and not matches(n, _UNWANTED)]
    return wanted if any(name.endswith(".safetensors") for name in wanted) else []


def _range_start(headers: Any) -> int | None:
    found = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def remote_headers(source: HubSource) -> Headers:
    """The headers of a model that is not on this machine, a few kilobytes of each file.

    Raises what ``list_files`` raises, and UnreadableHeader.
    """
    listing, token = list_files(source), _token()

    def reader(file: RemoteFile) -> Read:
        def read(offset: int, count: int) -> bytes:
            count = min(count, file.size - offset)
            if count <= 0:
                return b""
            return _asked(source, token, lambda: _read_range(listing, file, offset, count))

        return read

    if source.file is not None:
        return read_gguf(reader(listing.files[0]))
    by_name = {file.path: file for file in listing.files}
    if "config.json" not in by_name:
        raise UnreadableHeader("no config.json")
    text = reader(by_name["config.json"])(0, by_name["config.json"].size)
    shards = [reader(file) for file in listing.files if file.path.endswith(".safetensors")]
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableHeader(f"config.json: {error}") from None
    with ThreadPoolExecutor(8) as pool:
        return folder_headers(config, [bytes_reader(data) for data in pool.map(safetensors_head, shards)])


def _read_range(listing: Listing, file: RemoteFile, offset: int, count: int) -> bytes:
    """Some bytes of a file; whatever more a server sends that ignores ranges is not waited for."""
    url = hf_hub_url(listing.repo, file.path, revision=listing.commit)
    headers = build_hf_headers(token=_token() or False) | {"Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={offset}-{offset + count - 1}"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_read_seconds()) as response:
        if response.status_code >= 400:
            response.read()
            hf_raise_for_status(response)
        skip = 0 if response.status_code == 206 else offset
        if response.status_code == 206 and _range_start(response.headers) != offset:
            raise UnreadableHeader(f"{file.path}: another part of the file than was asked for")
        data = b""
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= skip + count:
                break
    return data[skip : skip + count]
