"""Model files that a wheel on the package index carries: fetched with pip, checked, and unpacked.

pip knows the index, the proxy and the certificates of this machine, so no host is named here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from sparkchat.errors import DamagedFile, SparkchatError, Unreachable
from sparkchat.paths import Paths
from sparkchat.profile import WheelSource
from sparkchat.store import (
    Progress,
    disk_errors,
    ensure_space,
    full_disk,
    locked,
    move_into_place,
    remove_tree,
    sha256_of,
    tree_bytes,
)

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20


def model_file(source: WheelSource, paths: Paths) -> Path:
    """Where the unpacked member lies once it is whole; named by its checksum, so versions never mix."""
    return paths.models / source.sha256[:12] / Path(source.member).name


def cached(source: WheelSource, paths: Paths) -> Path | None:
    file = model_file(source, paths)
    return file if os.path.isfile(file) else None


def work_folder(source: WheelSource, paths: Paths) -> Path:
    return paths.models / ".parts" / f"{source.package}-{source.version}"


def lock_file(source: WheelSource, paths: Paths) -> Path:
    return paths.models / ".locks" / f"{source.package}-{source.version}.lock"


def needed_bytes(source: WheelSource) -> int:
    """Disk at its fullest: pip holds the wheel twice for a moment, then wheel and member lie side by side."""
    return source.wheel_size + max(source.wheel_size, source.size)


def fetch(source: WheelSource, paths: Paths, progress: Progress) -> Path:
    """Bring the member onto this machine. Waits for another process doing the same."""
    target = model_file(source, paths)
    work = work_folder(source, paths)
    with locked(lock_file(source, paths), source.describe(), progress), disk_errors(paths.models):
        if os.path.isfile(target) and target.stat().st_size == source.size:
            return target
        # What a killed run left: pip cannot go on with it.
        remove_tree(work)
        ensure_space(paths.models, needed_bytes(source), source.describe())
        try:
            work.mkdir(parents=True)
            wheel = _download(source, work, progress)
            _unpack(source, wheel, target, work)
        finally:
            remove_tree(work)
    return target


def _download(source: WheelSource, work: Path, progress: Progress) -> Path:
    temporary, log = work / "tmp", work / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(work), f"{source.package}=={source.version}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # The same disk as the target, so that the space that was checked is the space that is used.
            env=dict(os.environ) | {"TMPDIR": str(temporary)},
        )
        seen = -1
        try:
            while process.poll() is None:
                done = min(tree_bytes(work), source.wheel_size)
                if done != seen:
                    progress.update(source.describe(), done, source.wheel_size)
                seen = done
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise _explain(source, log.read_text(encoding="utf-8", errors="replace"), work)
    return _checked_wheel(source, work, progress)


def _checked_wheel(source: WheelSource, work: Path, progress: Progress) -> Path:
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DamagedFile(f"pip fetched {len(wheels)} wheels for {source.describe()} instead of one; try again")
    progress.update(source.describe(), source.wheel_size, source.wheel_size)
    found = sha256_of(wheels[0])
    if found != source.wheel_sha256:
        raise DamagedFile(
            f"{source.describe()} came with checksum {found[:12]}... instead of {source.wheel_sha256[:12]}... "
            "and has been removed; the index serves another file than the profile names"
        )
    return wheels[0]


def _unpack(source: WheelSource, wheel: Path, target: Path, work: Path) -> None:
    part = work / "member"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as stream, part.open("wb") as out:
            while chunk := stream.read(_CHUNK):
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DamagedFile(f"{source.describe()} does not hold {source.member}: {error}; nothing was kept") from None
    if sha256_of(part) != source.sha256:
        raise DamagedFile(f"{source.member} of {source.describe()} has the wrong checksum; nothing was kept")
    move_into_place(part, target)


def _explain(source: WheelSource, log: str, work: Path) -> SparkchatError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if "No space left on device" in log:
        return full_disk(work.parent.parent)
    if any("No module named pip" in line for line in lines):
        return Unreachable(
            f"{source.describe()} cannot be fetched: {sys.executable} has no pip; run it with `-m ensurepip`"
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    last = (errors or lines or ["pip said nothing"])[0]
    return Unreachable(f"pip cannot fetch {source.describe()}: {last[:200]}; check the network and pip's own settings")
