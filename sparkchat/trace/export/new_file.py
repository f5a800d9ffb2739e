"""A file that appears under its name only when it is whole, mode 0600, and replaces no other unless asked to."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkchat.errors import NotEnoughDisk, SparkchatError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextmanager
def new_file(path: Path, source: Path, *, force: bool) -> Iterator[Callable[[str], object]]:
    """Context: a function that writes text (UTF-8). Left without an error, the file stands under its name.

    Raises UsageError when the file exists (and ``force`` is not set), is no ordinary file, or is ``source`` itself;
    NotEnoughDisk or SparkchatError when it cannot be written. Nothing is left behind then.
    """
    _refuse(path, source, force)
    # A link keeps pointing at its file, which is the one replaced.
    target = Path(os.path.realpath(path)) if force else path
    part: str | None = None
    try:
        handle, part = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(Path(part), target, force)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        kind = NotEnoughDisk if error.errno in _FULL else SparkchatError
        raise kind(f"{path} cannot be written: {error.strerror or error}; give another name or folder") from None
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)


def _refuse(path: Path, source: Path, force: bool) -> None:
    if not os.path.lexists(path):
        return
    if path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the trace itself, which is never replaced; give another name")
    if not force:
        raise _exists(path)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{path} is no ordinary file and is not replaced; give another name, or - for stdout")


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} exists already; give another name, or --force to replace it")


def _put_in_place(part: Path, target: Path, force: bool) -> None:
    if force:
        os.replace(part, target)
        return
    try:
        # A second name for the finished file; it fails where a file has appeared in the meantime.
        os.link(part, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(part, target)
