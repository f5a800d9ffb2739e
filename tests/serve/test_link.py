"""The server's end of the engine pipe, with scripts in the engine's place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.test_client import PRELUDE, READY
from sparkchat import client as client_module
from sparkchat.errors import EngineCrash, NotEnoughMemory
from sparkchat.params import GenerateRequest, LoadSpec
from sparkchat.serve.link import EngineLink
from sparkchat.serve.metrics import Metrics
from sparkchat.serve.problems import Problem

OUT_OF_MEMORY = 'event({"event": "error", "error": "NotEnoughMemory", "message": "no room"})'
LOAD = "commands.readline()"
NEXT = "commands.readline()"


def play(monkeypatch: pytest.MonkeyPatch, *script: str) -> tuple[EngineLink, list[str]]:
    """A link whose engine process runs this script; what it said is in the list."""
    monkeypatch.setattr(client_module, "_PROGRAM", PRELUDE + "\n".join(script))
    said: list[str] = []
    spec = LoadSpec(name="x", model_path="/x", concurrency=1)
    link = EngineLink(spec, Metrics(), lambda event: None, said.append, max_waiting=1)
    link.start()
    return link, said


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(id=name, prompt="x", raw=True)


async def within(thing: Any, seconds: float = 20) -> Any:
    return await asyncio.wait_for(thing, seconds)


async def test_an_engine_that_cannot_load_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    link, said = play(monkeypatch, LOAD, OUT_OF_MEMORY)
    assert isinstance(await within(link.failed), NotEnoughMemory)
    link.close()
    link, _ = play(monkeypatch, LOAD, "os.abort()")
    assert isinstance(await within(link.failed), EngineCrash)
    assert said == []
    link.close()


async def test_one_that_runs_out_of_memory_later_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = f"first = not os.path.exists({str(tmp_path / 'ran')!r}); open({str(tmp_path / 'ran')!r}, 'w').close()"
    link, said = play(monkeypatch, once, LOAD, READY, NEXT, NEXT, f"{OUT_OF_MEMORY} if first else time.sleep(60)")
    await within(link.is_ready.wait())
    mailbox = link.submit([ask("a"), ask("b")])
    with pytest.raises(Problem) as full:
        link.submit([ask("c")])
    assert full.value.status == 429
    lost = [await within(mailbox.take()) for _ in range(2)]
    assert [(choice, event["event"], event["message"]) for choice, event in lost] == [
        (0, "lost", "no room"),
        (1, "lost", "no room"),
    ]
    assert said == ["no room; 2 requests were lost, the engine is started again"]
    assert link.problem() is not None and link.num_live == 0
    await within(link.is_ready.wait())
    assert link.problem() is None
    link.close()


async def test_one_that_dies_while_the_server_ends_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link, said = play(monkeypatch, LOAD, READY, NEXT, "os.abort()")
    await within(link.is_ready.wait())
    link.refuse_more("ending")
    assert link.problem() is not None
    with pytest.raises(Problem):
        link.submit([ask("a")])
    link._closing = None
    link.submit([ask("a")])
    link.refuse_more("ending")
    await within(link.is_idle.wait())
    assert len(said) == 1 and "started again" not in said[0]
    assert not link._client.is_running
    link.close()
