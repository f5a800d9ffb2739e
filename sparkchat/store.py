"""Files on disk that must be whole: locks, free space, checksums, and moving a finished file into place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from sparkchat.errors import DamagedFile, NotEnoughDisk, SparkchatError

MARGIN_BYTES = 16 << 20
"""Room that a download leaves on the disk."""

_CHUNK = 1 << 20


class Progress(Protocol):
    """Where a fetch reports to."""

    def say(self, message: str) -> None:
        """One plain sentence."""

    def update(self, what: str, done: int, total: int | None) -> None:
        """Bytes so far; called often, and only when something has come or has been done."""


def human(num_bytes: int) -> str:
    """Bytes in words, e.g. ``98.4 MB``."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def free_bytes(folder: Path) -> int:
    """Free space where ``folder`` is or will be made."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def ensure_space(folder: Path, need: int, what: str) -> None:
    """Raise NotEnoughDisk before the first byte when ``need`` bytes and a margin do not fit."""
    free = free_bytes(folder)
    if free < need + MARGIN_BYTES:
        raise NotEnoughDisk(
            f"{what} needs {human(need + MARGIN_BYTES)} of disk, and {folder} has {human(free)} free; "
            "free some space, or set XDG_CACHE_HOME or HF_HOME to a larger disk"
        )


def full_disk(folder: Path) -> NotEnoughDisk:
    return NotEnoughDisk(
        f"the disk of {folder} is full ({human(free_bytes(folder))} free), and what was begun has been removed; "
        "free some space and try again"
    )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(folder) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            raise SparkchatError(
                f"cannot write to the cache folder {folder}: {error.strerror}; "
                "set XDG_CACHE_HOME or HF_HOME to a folder that you can write to"
            ) from error
        raise


@contextmanager
def locked(lock_file: Path, what: str, progress: Progress) -> Iterator[None]:
    """Hold a lock that the system drops when the process ends; a second process waits and says so."""
    with disk_errors(lock_file.parent):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"another sparkchat is fetching {what}; waiting for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_now(lock_file: Path, what: str) -> Iterator[None]:
    """As ``locked``, but raise SparkchatError instead of waiting."""
    with disk_errors(lock_file.parent):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_file)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise SparkchatError(
                f"another sparkchat is fetching {what}; stop it first, or wait until it is done"
            ) from None
    try:
        yield
    finally:
        lock.release()


def sha256_of(file: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    digest, done = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


def git_sha1_of(file: Path) -> str:
    """The name git gives to a file's content; the hub uses it for small files."""
    digest = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def move_into_place(part: Path, target: Path) -> None:
    """Make a finished file visible under its name, all at once, after its bytes have reached the disk."""
    with part.open("rb+") as stream:
        os.fsync(stream.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, target)


def check_whole(file: Path, size: int | None, sha256: str | None, stamps: Path, fix: str) -> None:
    """Raise DamagedFile unless the file has that size and checksum.

    A checksum that was right is remembered with the file's size and time, so that the next start need not
    read the whole file again.
    """
    found = file.stat()
    if size is not None and found.st_size != size:
        raise DamagedFile(f"{file} has {found.st_size} bytes instead of {size}; {fix}")
    if sha256 is None:
        return
    stamp = stamps / f"{sha256}.json"
    record = [str(file), found.st_size, found.st_mtime_ns, found.st_ino]
    if _read_stamp(stamp) == record:
        return
    if sha256_of(file) != sha256:
        raise DamagedFile(f"{file} does not have the checksum {sha256[:12]}...; {fix}")
    _write_stamp(stamp, record)


def _read_stamp(stamp: Path) -> object:
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(stamp: Path, record: list[object]) -> None:
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        partial = stamp.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(stamp)
    except OSError:
        # Only a saving of time: a cache that cannot be written is read again at the next start.
        return


def remove_tree(path: Path) -> int:
    """Remove a file or folder; returns the bytes it held."""
    if path.is_symlink() or os.path.isfile(path):
        size = path.lstat().st_size
        path.unlink(missing_ok=True)
        return size
    size = tree_bytes(path)
    shutil.rmtree(path, ignore_errors=True)
    return size


def tree_bytes(path: Path) -> int:
    """Bytes of the regular files under ``path``, which may vanish while they are counted."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
