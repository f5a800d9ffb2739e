"""Where the engine's events wait for the client that they are for.

The engine never waits for a client: text that a slow reader has not taken yet is joined into one event, so what waits
is at most the rest of the answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

_LISTS = ("token_ids", "origins", "logprobs")


class Mailbox:
    """Events of the engine requests that one HTTP request became, in order; choice i is request i."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self._choice = {request_id: choice for choice, request_id in enumerate(request_ids)}
        self._waiting: deque[tuple[int, Event]] = deque()
        self._open: dict[int, Event] = {}
        """The waiting delta of a choice that more text may be joined to."""
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        choice = self._choice[event["id"]]
        last = self._open.get(choice)
        if event["event"] == "delta" and last is not None and last["channel"] == event["channel"]:
            last["text"] += event["text"]
            for name in _LISTS:
                if name in event:
                    last[name] += event[name]
            return
        self._open.pop(choice, None)
        if event["event"] == "delta":
            # A copy: the lists of the original are the trace's.
            event = {name: list(value) if name in _LISTS else value for name, value in event.items()}
            self._open[choice] = event
        self._waiting.append((choice, event))
        self._arrived.set()

    async def take(self) -> tuple[int, Event]:
        """(choice, event), waiting for one if need be."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        choice, event = self._waiting.popleft()
        if self._open.get(choice) is event:
            del self._open[choice]
        return choice, event
