"""What a kernel's machine code for an H200 says: its loops and what is in them, without a GPU.

A multiprocessor issues four instructions of warps a clock, one to each of its quarters; of whole numbers' sums, shifts,
choices of bits and comparisons half as many, of multiplications and sums of real numbers all.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_MULTIPLIED = ("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2", "IMAD")
_NAMED = {
    "LDS", "LDSM", "STS", "STSM", "LDG", "LDGSTS", "STG", "LDL", "STL", "LDGDEPBAR", "DEPBAR", "ATOM", "ATOMG", "RED",
    "MUFU", "SHFL", "F2F", "F2I", "I2F", "I2FP", "POPC", "REDUX", "MATCH", "VOTE", "S2R", "BRA", "BAR", "WARPSYNC",
    "NOP", "CALL", "BSSY", "BSYNC", "SYNCS", "MOV", "CS2R", "R2UR", "EXIT",
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """A loop that holds no other."""

    instructions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def kinds(self) -> Counter[str]:
        """How many are "mma", "multiply", "integer", "uniform", or of a kind that goes by its own name."""
        return Counter(map(_kind, self.instructions))

    @property
    def calls(self) -> int:
        return sum("CALL" in instruction for instruction in self.instructions)

    @property
    def wide(self) -> Counter[str]:
        """Loads and stores by name and width, as ``LDGSTS.128``."""
        return Counter(name for name in map(_width, self.instructions) if name)


@dataclass(frozen=True)
class Listing:
    code: tuple[str, ...]
    loops: tuple[Loop, ...]
    """In the order of the code"""
    before: int
    """Instructions in front of the first loop"""

    @property
    def longest(self) -> Loop:
        return max(self.loops, key=len, default=Loop(()))


def machine_code(ptx: str) -> str:
    """sm_90a's machine code of a kernel as nvdisasm prints it."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        tools = triton.knobs.nvidia
        subprocess.run([tools.ptxas.path, "-arch=sm_90a", source, "-o", binary], check=True)
        return subprocess.run([tools.nvdisasm.path, "-c", binary], check=True, capture_output=True, text=True).stdout


def listing_of(ptx: str) -> Listing:
    """The loops of a kernel's machine code; what only waits, a few instructions long, is none."""
    labels: dict[str, int] = {}
    code: list[str] = []
    found: list[tuple[int, int]] = []
    for line in machine_code(ptx).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            jump = re.search(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if jump and jump[1] in labels and len(code) - labels[jump[1]] > 8:
                found.append((labels[jump[1]], len(code)))
    inner = [(a, b) for a, b in found if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)]
    loops = tuple(Loop(tuple(code[a:b])) for a, b in sorted(set(inner)))
    return Listing(tuple(code), loops, min((a for a, _ in inner), default=len(code)))


def _name(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def _kind(instruction: str) -> str:
    name = _name(instruction)
    base = name.split(".")[0]
    if "MMA" in base and base.startswith(("H", "I", "Q")):
        return "mma"
    if base in _MULTIPLIED:
        return "multiply"
    if base in _NAMED:
        return base
    return "uniform" if base.startswith("U") else "integer"


def _width(instruction: str) -> str:
    name = _name(instruction)
    parts = name.split(".")
    if parts[0] not in ("LDG", "LDGSTS", "STG", "LDS", "STS", "LDL", "STL"):
        return ""
    size = next((p for p in parts[1:] if p in ("128", "64", "U8", "S8", "U16", "S16")), "32")
    return f"{parts[0]}.{size}"
