"""The engine process as seen from the server's event loop: requests in, events out to whom they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sparkchat.client import EngineClient
from sparkchat.errors import EngineCrash, SparkchatError, error_from_name
from sparkchat.params import GenerateRequest, LoadSpec
from sparkchat.serve.mailbox import Event, Mailbox
from sparkchat.serve.metrics import Metrics
from sparkchat.serve.problems import Problem, bad_request, unavailable

_RELOAD_SECONDS = 5
"""When a client may ask again while the engine is loading."""


class EngineLink:
    """One engine process and every request that runs on it. Belongs to the event loop's thread.

    An engine that dies after it was ready is started again; its requests end with 503. One that cannot load sets
    ``failed``.
    """

    def __init__(
        self,
        spec: LoadSpec,
        metrics: Metrics,
        record: Callable[[Event], str | None],
        say: Callable[[str], None],
        max_waiting: int,
    ) -> None:
        self._client = EngineClient(spec)
        self._metrics = metrics
        self._record = record
        self._say = say
        self._limit = spec.concurrency + max_waiting
        self._mailboxes: dict[str, Mailbox] = {}
        self._reading = -1
        self._closing: str | None = None
        self.info: dict[str, Any] = {}
        self.is_ready = asyncio.Event()
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self.failed: asyncio.Future[SparkchatError] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self.is_ready.clear()
        self._client.start()
        self._reading = self._client.fileno()
        asyncio.get_running_loop().add_reader(self._reading, self._take_events)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def problem(self) -> Problem | None:
        """Why no request is taken now; None when requests are taken."""
        if self._closing is not None:
            return unavailable(self._closing)
        if not self.is_ready.is_set():
            return unavailable("the engine is loading; ask again in a few seconds", _RELOAD_SECONDS)
        return None

    def submit(self, requests: Sequence[GenerateRequest]) -> Mailbox:
        """Hand requests to the engine. Raises Problem when it takes none now, or not so many."""
        problem = self.problem()
        if problem is not None:
            raise problem
        if len(requests) > self._limit:
            raise bad_request(
                f"{len(requests)} answers are asked for, and this server takes {self._limit} at a time; ask for fewer",
                "n",
            )
        if self.num_live + len(requests) > self._limit:
            raise Problem(
                429,
                f"{self.num_live} requests are being answered or wait, and {self._limit} is the most; ask again later",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        mailbox = Mailbox([request.id for request in requests])
        try:
            for request in requests:
                self._mailboxes[request.id] = mailbox
                self._metrics.submitted(request.id)
                self._client.generate(request)
        except EngineCrash:
            for request in requests:
                self._metrics.lost(request.id)
                self._forget(request.id)
            raise unavailable("the engine has just ended; ask again in a few seconds", _RELOAD_SECONDS) from None
        self.is_idle.clear()
        return mailbox

    def cancel(self, mailbox: Mailbox) -> int:
        """End those requests of a mailbox that still run; returns how many there were."""
        running = [request_id for request_id in mailbox.request_ids if request_id in self._mailboxes]
        for request_id in running:
            # Its end event still comes, for the trace and the counters; nobody waits for it.
            self._mailboxes[request_id] = Mailbox([request_id])
            try:
                self._client.cancel(request_id)
            except EngineCrash:
                break  # the crashed event is on its way
        return len(running)

    def refuse_more(self, reason: str) -> None:
        """Take no further requests; those that run go on."""
        self._closing = reason

    def end_all(self, reason: str) -> None:
        """End everything that runs: its clients are told ``reason``."""
        self._tell_all(reason)
        for mailbox in set(self._mailboxes.values()):
            self.cancel(mailbox)

    def close(self) -> None:
        self._stop_reading()
        self._client.close()

    def _take_events(self) -> None:
        for event in self._client.poll(0):
            lost = self._record(event)
            if lost is not None:
                self._say(lost)
            self._take(event)
        if not self._client.is_running:
            self._stop_reading()

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "ready":
            self.info = event["info"]
            self.is_ready.set()
        elif kind == "info":
            self.info = event["info"]
        elif kind in ("crashed", "error"):
            error = EngineCrash(event["message"])
            self._ended(error if kind == "crashed" else error_from_name(event["error"], event["message"]))
        elif event.get("id") in self._mailboxes:
            self._metrics.take(event)
            if kind in ("start", "delta", "end"):
                self._mailboxes[event["id"]].put(event)
            if kind == "end":
                self._forget(event["id"])

    def _ended(self, error: SparkchatError) -> None:
        """The engine is gone: once it was ready it is started again, before that nothing would be different."""
        was_ready, num_lost = self.is_ready.is_set(), self.num_live
        self._stop_reading()
        self.is_ready.clear()
        self._tell_all(error.message)
        for request_id in list(self._mailboxes):
            self._metrics.lost(request_id)
            self._forget(request_id)
        if not was_ready:
            if not self.failed.done():
                self.failed.set_result(error)
        elif self._closing is None:
            self._say(f"{error.message}; {num_lost} requests were lost, the engine is started again")
            self.start()
        else:
            self._say(f"{error.message}; {num_lost} requests were lost")

    def _tell_all(self, reason: str) -> None:
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put({"event": "lost", "id": request_id, "message": reason})

    def _forget(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        if not self._mailboxes:
            self.is_idle.set()

    def _stop_reading(self) -> None:
        if self._reading >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            self._reading = -1
