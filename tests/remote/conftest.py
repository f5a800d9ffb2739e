"""Played servers that end with their test, and answers taken from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remote.played import Part, Played
from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.remote.connection import Server
from sparkchat.remote.engine import RemoteEngine

Event = dict[str, Any]


@pytest.fixture
def play() -> Iterator[Callable[[Part], Played]]:
    opened: list[Played] = []

    def begin(part: Part) -> Played:
        opened.append(Played(part))
        return opened[-1]

    yield begin
    for played in opened:
        played.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., RemoteEngine]]:
    """``connect(played, model=None, sampling=..., key=None)``: a started engine."""
    opened: list[RemoteEngine] = []

    def begin(played: Played, model: str | None = None, **options: Any) -> RemoteEngine:
        server = Server(played.url, options.pop("key", None))
        engine = RemoteEngine(server, model, options.pop("sampling", SamplingParams()), **options)
        opened.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in opened:
        engine.close()


def until(engine: RemoteEngine, *kinds: str, seconds: float = 20) -> list[Event]:
    """Events up to and with the first of one of these kinds."""
    found: list[Event] = []
    deadline = time.monotonic() + seconds
    while not (found and found[-1]["event"] in kinds):
        assert time.monotonic() < deadline, f"no {kinds} in {found}"
        for event in engine.poll(0.05):
            found.append(event)
            if event["event"] in kinds:
                break
    return found


def ask(**fields: Any) -> GenerateRequest:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    content = {} if fields.keys() & {"prompt", "prompt_ids"} else {"messages": ({"role": "user", "content": "hi"},)}
    return GenerateRequest(id="a", sampling=sampling, **content, **fields)
