"""Reading a long trace takes no more memory than reading a short one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.trace_files import write_long_session

ROOT = Path(__file__).parents[2]
_MEASURE = """
import os, resource, sys
from pathlib import Path
from sparkchat.trace import Damage, summarize, verify
from sparkchat.trace.export import FORMATS
trace = Path(sys.argv[1])
assert verify(trace).num_failed_turns == 0 and summarize(trace).to_json()["num_turns"] > 1
with open(os.devnull, "w") as nowhere:
    for each in FORMATS:
        if each.name in sys.argv[2:]:
            each.write(trace, nowhere.write, Damage())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak_mib(trace: Path, *formats: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(trace), *formats], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    short = write_long_session(tmp_path / "short.spark.jsonl", 2**19)
    long = write_long_session(tmp_path / "long.spark.jsonl", 3 * 2**20)
    assert peak_mib(long, "perfetto") <= peak_mib(short, "perfetto") + 3


@pytest.mark.slow
def test_memory_does_not_grow_with_a_file_of_60_mib(tmp_path: Path) -> None:
    names = ("csv", "perfetto", "html", "svg", "markdown", "confidence")
    short = write_long_session(tmp_path / "short.spark.jsonl", 2**20)
    long = write_long_session(tmp_path / "long.spark.jsonl", 60 * 2**20)
    assert peak_mib(long, *names) <= peak_mib(short, *names) + 12


def test_a_line_of_many_mib_is_not_held(tmp_path: Path) -> None:
    short = write_long_session(tmp_path / "short.spark.jsonl", 2**19)
    padded = tmp_path / "padded.spark.jsonl"
    with padded.open("wb") as file:
        file.write(short.read_bytes())
        for _ in range(96):
            file.write(b"x" * 2**20)
    assert peak_mib(padded) <= peak_mib(short) + 40
