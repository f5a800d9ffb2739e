"""The disk side of the Hugging Face cache: which revision is whole, how a fetched one becomes visible, how one goes.

Bytes lie in ``blobs``, named by their checksum; a snapshot is a folder of links to them. Nothing here asks the network.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.paths import Paths
from sparkchat.profile import HubSource
from sparkchat.store import git_sha1_of, remove_tree, sha256_of, tree_bytes

PART = ".sparkchat-part"
"""Ends the name of a blob that is not whole yet."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What disks without symbolic links answer."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SMALL = 32 << 20
_FRESH = ".sparkchat-"
"""Begins the name of a snapshot that is being put together; the commit follows."""


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


def lock_file(source: HubSource, paths: Paths) -> Path:
    """Beside what it protects, so that programs with caches of their own but one hub cache see each other."""
    return paths.hub_cache / ".locks" / repo_folder(source, paths).name / "sparkchat.lock"


def cached(source: HubSource, paths: Paths) -> Path | None:
    """The local folder (or the one file) of a source that is complete on disk; no network."""
    commit = commit_of(source, paths)
    if commit is None:
        return None
    snapshot = repo_folder(source, paths) / "snapshots" / commit
    if source.file is not None:
        file = snapshot / source.file
        return file if os.path.isfile(file) else None
    return snapshot if is_complete(snapshot, f"hf:{source.repo}") else None


def commit_of(source: HubSource, paths: Paths) -> str | None:
    return source.revision if source.is_pinned else _read_ref(repo_folder(source, paths), source.revision)


def cached_repositories(paths: Paths) -> list[HubSource]:
    """Repositories in the cache that hold a model folder, by their branches, or by commit where they have none."""
    found = []
    # Path.glob raises where a folder above may not be entered.
    folders = sorted(paths.hub_cache.glob("models--*--*")) if os.path.isdir(paths.hub_cache) else []
    for folder in folders:
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = sorted(
            str(ref.relative_to(folder / "refs")) for ref in (folder / "refs").rglob("*") if os.path.isfile(ref)
        )
        by_ref = {name: _read_ref(folder, name) for name in refs}
        commits = sorted(snapshot.name for snapshot in folder.glob("snapshots/*"))
        by_name = by_ref | {commit: commit for commit in commits if commit not in by_ref.values()}
        found += [
            HubSource(repo, name)
            for name, commit in by_name.items()
            if commit is not None and _holds_model(folder / "snapshots" / commit)
        ]
    return found


def _holds_model(snapshot: Path) -> bool:
    return os.path.isfile(snapshot / "config.json") and any(snapshot.glob("*.safetensors"))


def missing_bytes(listing: Listing, folder: Path) -> int:
    """Bytes still to come, counting what an earlier cut download left."""
    blobs = folder / "blobs"
    return sum(
        file.size - min(size_of(part_of(blobs, file)), file.size)
        for file in listing.files
        if not is_held(file, listing, folder)
    )


def is_held(file: RemoteFile, listing: Listing, folder: Path) -> bool:
    """Whether all bytes are here: as a blob, or in its place on a disk without links."""
    blob, place = folder / "blobs" / file.etag, folder / "snapshots" / listing.commit / file.path
    if os.path.isfile(blob):
        return size_of(blob) == file.size
    return os.path.isfile(place) and not place.is_symlink() and matches(place, file.size, file.etag)


def part_of(blobs: Path, file: RemoteFile) -> Path:
    """Named after the content, so that bytes of a file that has changed are never appended to."""
    return blobs / f"{file.etag}{PART}"


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def verify_snapshot(snapshot: Path) -> list[str]:
    """Names of files whose content does not match the checksum that the cache stores them under."""
    return [
        str(file.relative_to(snapshot))
        for file in sorted(snapshot.rglob("*"))
        if not os.path.isdir(file) and not (os.path.isfile(file) and _is_whole(file))
    ]


def damaged_files(found: Path) -> list[Path]:
    """What ``pull`` looks at again: a file fetched alone, or the small files of a folder, named by their checksums.

    Large ones of a folder are left to ``verify``: reading them takes minutes.
    """
    if os.path.isfile(found):
        files = [found]
    else:
        files = [file for file in found.rglob("*") if not os.path.isdir(file) and size_of(file) <= _SMALL]
    return [file for file in files if not (os.path.isfile(file) and _is_whole(file))]


def publish(listing: Listing, source: HubSource, folder: Path) -> None:
    """Make a fetched revision visible: all of it at once, or where a part of it is there already, weights last."""
    snapshot = folder / "snapshots" / listing.commit
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{_FRESH}{listing.commit}"
    remove_tree(fresh)
    if not os.path.exists(snapshot) and _has_links(folder):
        for file in listing.files:
            link = fresh / file.path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_target(file, snapshot, folder))
        try:
            fresh.rename(snapshot)
        except OSError:
            # Another tool has made the folder in this moment.
            remove_tree(fresh)
    for file in sorted(listing.files, key=lambda file: file.path.endswith(".safetensors")):
        _link(snapshot / file.path, _target(file, snapshot, folder))
    if not source.is_pinned:
        ref = folder / "refs" / source.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh_ref = ref.with_name(f".{ref.name}.sparkchat")
        fresh_ref.write_text(listing.commit, encoding="utf-8")
        fresh_ref.replace(ref)


def _target(file: RemoteFile, snapshot: Path, folder: Path) -> str:
    return os.path.relpath(folder / "blobs" / file.etag, (snapshot / file.path).parent)


def _has_links(folder: Path) -> bool:
    """Whether the disk knows symbolic links; exFAT and some network disks do not."""
    probe = folder / f"{_FRESH}link"
    try:
        probe.unlink(missing_ok=True)
        probe.symlink_to("blobs")
        probe.unlink()
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _link(link: Path, target: str) -> None:
    if link.is_symlink() and os.readlink(link) == target:
        return
    if os.path.isfile(link) and not os.path.exists(link.parent / target):
        return  # in its place already
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.sparkchat")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # The bytes themselves, as the hub's own tools do there.
        fresh = link.parent / target
    fresh.replace(link)


def remove_revision(source: HubSource, paths: Paths) -> tuple[list[Path], int]:
    """Remove a source's revision, and the bytes that no other revision in the cache uses.

    Returns what was removed and the bytes that freed.
    """
    folder = repo_folder(source, paths)
    if not os.path.isdir(folder):
        return [], 0
    before, commit = tree_bytes(folder), commit_of(source, paths)
    removed = [] if commit is None else _hide_links(source, folder, commit)
    for left in folder.glob(f"{_FRESH}*"):
        remove_tree(left)
    if commit is not None and not os.path.exists(folder / "snapshots" / commit):
        removed += _remove_refs(folder, commit)
    removed += _remove_unused_blobs(folder)
    if not any((folder / "snapshots").glob("*")):
        remove_tree(folder)
        return [folder], before
    return removed, before - tree_bytes(folder)


def _hide_links(source: HubSource, folder: Path, commit: str) -> list[Path]:
    """The links go at once, and before the bytes they lead to: what a killed removal leaves is no model."""
    snapshot = folder / "snapshots" / commit
    place = snapshot if source.file is None else snapshot / source.file
    if not (place.is_symlink() or os.path.exists(place)):
        return []
    hidden = folder / f"{_FRESH}{commit}"
    remove_tree(hidden)
    place.rename(hidden)
    if source.file is not None and not any(file for file in snapshot.rglob("*") if not os.path.isdir(file)):
        remove_tree(snapshot)
    return [place]


def _remove_refs(folder: Path, commit: str | None) -> list[Path]:
    removed = []
    for ref in (folder / "refs").rglob("*"):
        if os.path.isfile(ref) and ref.read_text(encoding="utf-8", errors="replace").strip() == commit:
            ref.unlink()
            removed.append(ref)
    return removed


def _remove_unused_blobs(folder: Path) -> list[Path]:
    links = (file for file in (folder / "snapshots").rglob("*") if file.is_symlink())
    used = {os.path.basename(os.readlink(link)) for link in links}
    removed = [blob for blob in (folder / "blobs").glob("*") if blob.name not in used]
    for blob in removed:
        remove_tree(blob)
    return removed


def _read_ref(folder: Path, revision: str) -> str | None:
    if ".." in PurePosixPath(revision).parts:
        raise UsageError(f"revision {revision!r} is not possible; give a branch, a tag or a commit")
    try:
        text = (folder / "refs" / revision).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    if re.fullmatch(r"[0-9a-f]{40}", text):
        return text
    # A revision may also be a commit that was fetched under a branch's name.
    return revision if os.path.isdir(folder / "snapshots" / revision) else None


def may_lack_files(found: Path) -> bool:
    """Is it a folder without a tokenizer? Drafters have none; of a model, another tool may have fetched weights
    alone. Which it is, the hub can tell."""
    return os.path.isdir(found) and not any(os.path.isfile(found / name) for name in _TOKENIZERS)


def is_complete(snapshot: Path, name: str) -> bool:
    """Is everything there? Raises DamagedFile for weights that are there but cut short."""
    if not os.path.isfile(snapshot / "config.json"):
        return False
    try:
        weights = _shards(snapshot) or list(snapshot.glob("*.safetensors"))
    except ValueError:
        return False
    if not weights or not all(os.path.isfile(file) for file in weights):
        return False
    for file in weights:
        if not has_all_tensors(file):
            raise DamagedFile(
                f"{file.name} of {name} is cut short in {snapshot}; type `sparkchat pull {name}` to mend it"
            )
    return True


def _shards(folder: Path) -> list[Path]:
    """Files that the index of a model folder names; empty without an index. Raises ValueError for one that is none."""
    index = folder / "model.safetensors.index.json"
    if not os.path.isfile(index):
        return []
    try:
        return [folder / str(name) for name in set(json.loads(index.read_bytes())["weight_map"].values())]
    except (OSError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: {error}") from None


def missing_shards(path: Path) -> list[Path]:
    """Files that are not in a model folder although its index names them."""
    try:
        return sorted(file for file in _shards(path) if not os.path.isfile(file))
    except ValueError:
        return []


def has_all_tensors(file: Path) -> bool:
    """Does the file end where its own header says? (8 bytes of length, a JSON header, then the tensors.)"""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > 100 << 20:
                return False
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return file.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return False


def matches(file: Path, size: int, etag: str, on_bytes: Callable[[int], None] | None = None) -> bool:
    """Whether a file has that size and, where the ETag is a checksum, that content."""
    return size_of(file) == size and _has_checksum(file, etag, on_bytes)


def _is_whole(file: Path) -> bool:
    return _has_checksum(file, file.resolve().name)


def _has_checksum(file: Path, name: str, on_bytes: Callable[[int], None] | None = None) -> bool:
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return sha256_of(file, on_bytes) == name
    return git_sha1_of(file) == name if re.fullmatch(r"[0-9a-f]{40}", name) else True
