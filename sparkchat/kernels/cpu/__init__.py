"""Decoder layers on a processor: products with packed weights and all that lies between them, as one call.

torch's own operations cost a decode step of a small model more in being started than in what they do. Here the whole
stack of layers is one function, compiled for this processor when it is first needed (Numba; kept in the cache folder),
which every thread runs. Weights stay in 4 or 8 bits or bfloat16 and are expanded in registers; everything else is
float32. The order of sums is fixed: a row gets the same bits alone, beside others, and with any number of threads.

    from sparkchat.kernels.cpu.matrix import PackedMatrix, pack_bf16, pack_codes
    from sparkchat.kernels.cpu.decoder import Decoder

``is_supported`` says whether this processor and this installation can; where they cannot, torch's operations are used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import time
from pathlib import Path

from sparkchat.paths import user_paths
from sparkchat.switches import word_of

ROOM = 16 * 1024 * 1024
"""Bytes that must be free for the compiled code, which takes a tenth of it."""
OLD = 30 * 24 * 3600
"""Seconds after which compiled code of another version is removed."""
OFF = "SPARKCHAT_CPU_KERNELS"
"""Set to 0 in the environment: torch's operations are used, the reference for these kernels."""


@functools.cache
def why_not() -> str | None:
    """Why these kernels cannot be used here, in words for a user; None when they can."""
    if word_of(OFF) == "0":
        return f"{OFF}=0 is set"
    if sys.platform not in ("linux", "darwin"):
        return f"they are not made for {sys.platform}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed; pip install numba"
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    triple = binding.get_process_triple()
    if triple.startswith("x86_64") and not all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return "this processor lacks AVX2, FMA or F16C"
    if not triple.startswith(("x86_64", "aarch64", "arm64")):
        return f"they are not made for {triple.split('-')[0]}"
    # Numba reads this once, when it is imported.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_folder(user_paths().cpu_kernels)))
    return _why_not_kept(Path(os.environ["NUMBA_CACHE_DIR"]))


def _why_not_kept(folder: Path) -> str | None:
    """Why compiled code cannot lie in the folder, which is made: Numba would end the program in the middle of it."""
    try:
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            _drop_old(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"compiled code cannot be kept in {folder}: {error.strerror}"
    if not os.access(folder, os.W_OK):
        return f"compiled code cannot be kept in {folder}: it is not writable"
    if free < ROOM:
        return f"compiled code cannot be kept in {folder}: the disk is full"
    return None


def _drop_old(folder: Path) -> None:
    """Remove what other versions left beside a new folder and have not used for a while."""
    for other in folder.parent.iterdir():
        is_ours = re.fullmatch("[0-9a-f]{16}", other.name) is not None and other != folder
        if is_ours and time.time() - other.stat().st_mtime > OLD:
            shutil.rmtree(other, ignore_errors=True)


def is_supported() -> bool:
    return why_not() is None


def is_loaded() -> bool:
    """Whether this process uses them already: what they do for little, nobody loads them for."""
    return "sparkchat.kernels.cpu.team" in sys.modules


def is_compiled() -> bool:
    """Whether the code for this processor lies in the cache folder: making it takes about twenty seconds."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"]) if is_supported() else None
    return folder is not None and any(folder.glob("**/team*.nbc"))


def compiled_folder(parent: Path) -> Path:
    """Where in a cache folder the compiled code lies: by all it was compiled from, for Numba looks at one file."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return parent / digest.hexdigest()[:16]
