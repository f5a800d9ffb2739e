"""What this machine is: processor, memory, GPUs, terminal, versions. Standard library only; never imports torch."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "gguf", "huggingface_hub", "textual", "rich", "typer")


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    compute: str = ""
    """Compute capability, e.g. 9.0; empty when the driver's tool does not say."""


@dataclass(frozen=True)
class Memory:
    total_bytes: int | None
    available_bytes: int | None


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that this process may use; empty without the driver's own tool."""
    fields = "index,name,memory.total,memory.free,driver_version"
    # Older drivers do not know the last field, and then answer nothing at all.
    for query in (f"{fields},compute_cap", fields):
        text = _ask_tool(f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if text is not None:
            return _visible(_parse_gpus(text))
    return ()


def has_gpu_tool() -> bool:
    return shutil.which("nvidia-smi") is not None


def _ask_tool(*arguments: str) -> str | None:
    """What the driver's own tool prints; None when there is none or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def driver_cuda() -> str | None:
    """The newest CUDA that the driver runs."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _ask_tool() or "")
    return found[1] if found else None


def peer_access() -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> OK, or in the driver's words why not; empty when it is not said."""
    found: dict[tuple[int, int], str] = {}
    for line in (_ask_tool("topo", "-p2p", "r") or "").splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if len(cells) < 2 or not re.fullmatch(r"GPU\d+", cells[0]) or re.fullmatch(r"GPU\d+", cells[1]):
            continue
        row = int(cells[0].removeprefix("GPU"))
        found |= {(row, column): cell for column, cell in enumerate(cells[1:]) if cell != "X"}
    return found


def _parse_gpus(text: str) -> list[Gpu]:
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) in (5, 6) and row[0].isdigit():
            total, free = (int(cell) << 20 if cell.isdigit() else 0 for cell in row[2:4])
            found.append(Gpu(int(row[0]), row[1], total, free, row[4], row[5] if len(row) == 6 else ""))
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
    return torch_cuda() is not None


def torch_cuda() -> str | None:
    """The CUDA that the installed torch was built with, by its own version file; torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


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


def shows_unicode() -> bool:
    """Whether the locale's encoding has more than ASCII and a few letters: bars, marks and arrows would be ``?``."""
    try:
        "\u2588\u2713".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


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
