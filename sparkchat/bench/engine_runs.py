"""Runs requests through an engine process and hands out their events; shared by ``tune`` and ``bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparkchat.client import EngineClient
from sparkchat.errors import EngineCrash, error_from_name
from sparkchat.params import GenerateRequest, LoadSpec

Event = dict[str, Any]
Take = Callable[[Event], None]


class EngineRun:
    """A ready engine. Raises the engine's own errors, and EngineCrash when it dies."""

    def __init__(self, client: EngineClient, info: dict[str, Any]) -> None:
        self.info = info
        self._client = client

    def answer(self, requests: Sequence[GenerateRequest], take: Take) -> list[dict[str, Any]]:
        """Send every request at once; events go to ``take``, results come back in the order of the requests."""
        results: dict[str, dict[str, Any]] = {}
        for request in requests:
            self._client.generate(request)
        while len(results) < len(requests):
            for event in self._events():
                take(event)
                if event["event"] == "end":
                    results[event["id"]] = event["result"]
        return [results[request.id] for request in requests]

    def ask(self, command: dict[str, Any], wanted: str, take: Take) -> Event:
        """Send a command of the engine's and wait for the event that answers it."""
        self._client.send(command)
        while True:
            for event in self._events():
                take(event)
                if event["event"] == wanted:
                    return event

    def num_graphs(self) -> int:
        """Captured steps that the engine has made; 0 where it makes none."""
        if self.info["graphs"] is not True:
            return 0
        event = self.ask({"op": "num_graphs"}, "num_graphs", lambda event: None)
        return int(event["count"])

    def capture_ahead(self, above: int, most: int, blocks: Sequence[tuple[int, bool]], draws: str) -> int:
        """Have the engine capture what steps of more than ``above`` and at most ``most`` requests replay, drawn greedy,
        sampled or filtered; ``blocks`` holds drafts verified of each request, and whether they share a budget.

        Returns how many that were; 0 where it captures none.
        """
        made = self.num_graphs()
        if self.info["graphs"] is not True:
            return 0
        command = {"op": "capture_ahead", "above": above, "most": most, "blocks": list(blocks), "draws": draws}
        return int(self.ask(command, "num_graphs", lambda event: None)["count"]) - made

    def _events(self) -> Iterator[Event]:
        events = self._client.poll(None)
        if not events and not self._client.is_running:
            raise EngineCrash("the engine ended before every request was answered")
        for event in events:
            yield checked(event)


@contextmanager
def engine_run(spec: LoadSpec, take: Take) -> Iterator[EngineRun]:
    """Start an engine, wait until it is ready, and stop it at the end. ``take`` gets what it says while it loads."""
    with EngineClient(spec) as client:
        for event in client.events():
            if checked(event)["event"] == "ready":
                yield EngineRun(client, event["info"])
                return
            take(event)
    raise EngineCrash("the engine ended while it was loading")


def checked(event: Event) -> Event:
    """Raises what ends the engine."""
    if event["event"] == "crashed":
        raise EngineCrash(event["message"])
    if event["event"] == "error":
        raise error_from_name(event["error"], event["message"])
    return event
