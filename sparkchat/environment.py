"""What this machine is: processor, memory, GPUs, terminal, versions. Standard library only; never imports torch."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors", "gguf", "huggingface_hub", "textual", "rich", "typer")


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True)
class Memory:
    total_bytes: int | None
    available_bytes: int | None


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that this process may use; empty without the driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    fields = "index,name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _visible(_parse_gpus(done.stdout)) if done.returncode == 0 else ()


def _parse_gpus(text: str) -> list[Gpu]:
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 5 and row[0].isdigit():
            total, free = (int(cell) << 20 if cell.isdigit() else 0 for cell in row[2:4])
            found.append(Gpu(int(row[0]), row[1], total, free, row[4]))
    return found


def _visible(found: list[Gpu]) -> tuple[Gpu, ...]:
    """CUDA_VISIBLE_DEVICES by number; names of other kinds (UUIDs) are left to CUDA itself."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(found)
    wanted = [part.strip() for part in chosen.split(",")]
    if any(part and not part.lstrip("-").isdigit() for part in wanted):
        return tuple(found)
    by_index = {gpu.index: gpu for gpu in found}
    return tuple(by_index[int(part)] for part in wanted if part.isdigit() and int(part) in by_index)


def torch_has_cuda() -> bool:
    """By the version of the installed package, e.g. ``2.13.0+cpu``; torch itself is not imported."""
    return not str(package_version("torch") or "+cpu").endswith("+cpu")


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions() -> dict[str, str | None]:
    return {name: package_version(name) for name in _PACKAGES}


def memory() -> Memory:
    """Of the machine, or of the control group when that allows less."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
        total, available = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    except (OSError, ValueError, KeyError, IndexError):
        return Memory(None, None)
    limit = _group_limit()
    if limit is None:
        return Memory(total, available)
    return Memory(min(total, limit), min(available, _group_left(limit)))


_GROUP = Path("/sys/fs/cgroup")


def _group_limit() -> int | None:
    try:
        text = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _group_left(limit: int) -> int:
    """What the control group may still take: file pages that can be dropped do not count as taken."""
    try:
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return limit
    pages = {key: int(value) for key, value in (line.split() for line in lines if len(line.split()) == 2)}
    return max(0, limit - used + pages.get("inactive_file", 0) + pages.get("active_file", 0))


def has_bf16_product() -> bool:
    """Whether this processor multiplies bfloat16 matrices (models/linear.py asks oneDNN itself)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    flags = set(next((line.split(":", 1)[1] for line in text.splitlines() if line.startswith("flags")), "").split())
    if not flags:
        return True
    return {"avx512bw", "avx512vl", "avx512dq"} <= flags or "avx_ne_convert" in flags


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def python_version() -> str:
    return f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"


def is_interactive() -> bool:
    """May a full-screen program run here: stdin, stdout and stderr are ttys and TERM is not dumb."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream is not None and stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def terminal() -> dict[str, object]:
    size = shutil.get_terminal_size()
    return {
        "stdin_tty": sys.stdin is not None and sys.stdin.isatty(),
        "stdout_tty": sys.stdout is not None and sys.stdout.isatty(),
        "stderr_tty": sys.stderr is not None and sys.stderr.isatty(),
        "term": os.environ.get("TERM"),
        "colorterm": os.environ.get("COLORTERM"),
        "no_color": "NO_COLOR" in os.environ,
        "columns": size.columns,
        "lines": size.lines,
        "encoding": getattr(sys.stdout, "encoding", None),
        "full_screen": is_interactive(),
    }
