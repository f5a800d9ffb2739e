"""One server for the tests that leave it as they found it, and a way to start others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import bigram, tape
from fixtures.surroundings import DEAD_SERVERS, USER_FOLDERS
from serve.served import Served

SCRIPT = (b"Hello", b" w\xc3", b"\xb6", b"rld", b", one", b" two", b" three", b" \xf0\x9f", b"\xa6\x8a", b" end.")
THINKING = ("<think>", b" so", b" this", b" is", b" hard", "</think>", b" Not", b" really", b" after", b" all")
TAPE = tape.Tape((SCRIPT, THINKING))
"""A chat, and any text that does not end in byte 1, plays the first; with ``ignore_eos`` it begins again and again."""
HELLO = b"".join(SCRIPT).decode()
CONTEXT = 2000


@pytest.fixture(scope="session")
def pair(build_once: Callable[..., Any]) -> tuple[Path, Path]:
    """F-tape with a drafter that is right after even tokens."""

    def build(folder: Path) -> tuple[Path, Path]:
        drafter = bigram.BigramDrafter(kind="half")
        return (
            tape.write_tape(folder / "target", TAPE),
            bigram.write_bigram_drafter(folder / "drafter", TAPE.table(), drafter),
        )

    return build_once("serve-tape", build)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The user's folders of every server of this run."""
    folder = tmp_path_factory.mktemp("server-user")
    return {name: str(folder / part) for name, part in USER_FOLDERS.items()} | DEAD_SERVERS


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server-trace") / "all.spark.jsonl"


@pytest.fixture(scope="session")
def server(pair: tuple[Path, Path], environment: dict[str, str], trace_file: Path) -> Iterator[Served]:
    target, drafter = pair
    options = ("--temperature", "0", "--context", str(CONTEXT), "--concurrency", "4", "--max-waiting", "64")
    served = Served(target, "--drafter", drafter, "--trace", trace_file, *options, environment=environment)
    try:
        yield served.ready()
    finally:
        served.close()


@pytest.fixture
def start(pair: tuple[Path, Path], environment: dict[str, str]) -> Iterator[Callable[..., Served]]:
    """``start(*options, port=0, variables={...})``: another server on the same pair; it may still be loading."""
    opened: list[Served] = []

    def launch(*options: str | Path, port: int = 0, variables: dict[str, str] | None = None) -> Served:
        target, drafter = pair
        common = (target, "--drafter", drafter, "--temperature", "0", "--context", str(CONTEXT))
        opened.append(Served(*common, *options, port=port, environment=environment | (variables or {})))
        return opened[-1]

    yield launch
    for served in opened:
        served.close()
