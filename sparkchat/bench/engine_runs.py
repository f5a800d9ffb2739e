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
        self.cost_table: dict[str, Any] | None = info.get("cost_table")
        """The last that plans were made by."""
        self._client = client

    def answer(
        self, requests: Sequence[GenerateRequest], take: Take, *, until_first: bool = False
    ) -> list[dict[str, Any]]:
        """Send every request at once; events go to ``take``, results come back in the order of the requests.

        ``until_first``: when the first of them has ended the others are cancelled.
        """
        results: dict[str, dict[str, Any]] = {}
        for request in requests:
            self._client.generate(request)
        while len(results) < len(requests):
            for event in self._events():
                take(event)
                if event["event"] == "end":
                    if until_first and not results:
                        for request in requests:
                            if request.id != event["id"]:
                                self.send({"op": "cancel", "id": request.id})
                    results[event["id"]] = event["result"]
        return [results[request.id] for request in requests]

    def send(self, command: dict[str, Any]) -> None:
        """A command of the engine's that nothing answers."""
        self._client.send(command)

    def ask(self, command: dict[str, Any], wanted: str, take: Take) -> Event:
        """Send a command of the engine's and wait for the event that answers it."""
        self._client.send(command)
        while True:
            for event in self._events():
                take(event)
                if event["event"] == wanted:
                    return event

    @property
    def captures(self) -> bool:
        """Whether steps are captured and replayed."""
        return self.info["graphs"] is True

    def num_graphs(self) -> int:
        """Captured steps that the engine has made; 0 where it makes none."""
        if not self.captures:
            return 0
        event = self.ask({"op": "num_graphs"}, "num_graphs", lambda event: None)
        return int(event["count"])

    def capture_ahead(self, above: int, most: int, blocks: Sequence[tuple[int, bool]], draws: str) -> int:
        """Have the engine capture what steps of more than ``above`` and at most ``most`` requests replay, drawn greedy,
        sampled or filtered; ``blocks`` holds drafts verified of each request, and whether they share a budget.

        Returns how many that were.
        """
        made = self.num_graphs()
        command = {"op": "capture_ahead", "above": above, "most": most, "blocks": list(blocks), "draws": draws}
        return int(self.ask(command, "num_graphs", lambda event: None)["count"]) - made

    def _events(self) -> Iterator[Event]:
        events = self._client.poll(None)
        if not events and not self._client.is_running:
            raise EngineCrash("the engine ended before every request was answered")
        for event in events:
            if event["event"] == "info":
                self.info = event["info"]
                self.cost_table = self.info.get("cost_table") or self.cost_table
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
