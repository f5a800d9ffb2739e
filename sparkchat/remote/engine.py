"""Another engine with the face of :class:`sparkchat.client.EngineClient`, for the front ends.

Every answer has a thread of its own that reads its stream; a second one looks at the server's counters once a second
while it runs. Events reach the front end through one queue.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

from sparkchat.errors import EngineCrash, SparkchatError, UsageError
from sparkchat.params import GenerateRequest, Mode, SamplingParams
from sparkchat.remote.answer import RemoteAnswer
from sparkchat.remote.ask import build_body, refuse_sampling
from sparkchat.remote.connection import Opened, Server
from sparkchat.remote.figures import figures_between, has_counters, read_samples
from sparkchat.remote.kinds import Kind, kind_of

Event = dict[str, Any]

WATCH_SECONDS = 1.0
_END_SECONDS = 5.0
NO_SPECULATION = "the server reports none"


class RemoteEngine:
    """The engine at a URL. Restarting it means asking the server again who it is."""

    def __init__(
        self, server: Server, model: str | None, sampling: SamplingParams, *, may_differ: bool = False
    ) -> None:
        """``model`` None takes the server's only one; with ``may_differ`` the only one is taken under any name."""
        self._server = server
        self._wanted = model
        self._may_differ = may_differ
        self._sampling = sampling
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._running: dict[str, Opened] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_open = False
        self._kind: Kind = kind_of(None)
        self._model = ""
        self._reason_off: str | None = None
        self._has_metrics = False

    @property
    def is_running(self) -> bool:
        return self._is_open

    def start(self) -> None:
        self._is_open = True
        self._spawn(self._load)

    def poll(self, timeout: float | None = 0.0) -> list[Event]:
        found: list[Event] = []
        try:
            # Never for ever: an engine that is closed meanwhile must be noticed.
            found.append(
                self._events.get(timeout=max(0.0, min(_END_SECONDS if timeout is None else timeout, _END_SECONDS)))
            )
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def generate(self, request: GenerateRequest) -> None:
        if not self._is_open:
            raise EngineCrash("the connection is closed; send the message again")
        opened = self._server.prepare()
        with self._lock:
            self._running[request.id] = opened
        self._spawn(self._answer, request, opened)

    def set_mode(self, mode: Mode) -> None:
        raise UsageError(self._mode_refusal(mode))

    def cancel(self, request_id: str) -> None:
        with self._lock:
            opened = self._running.get(request_id)
        if opened is not None:
            opened.cut()

    def close(self) -> None:
        self._is_open = False
        with self._lock:
            running = list(self._running.values())
        for opened in running:
            opened.cut()
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self._threads.clear()

    def _spawn(self, work: Any, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=arguments, name="remote-engine", daemon=True)
        self._threads.append(thread)
        thread.start()

    # Loading

    def _load(self) -> None:
        self._put(
            {
                "event": "loading",
                "stage": "server",
                "message": f"asking {self._server.url}",
                "done": None,
                "total": None,
            }
        )
        try:
            info = self._introduce()
        except SparkchatError as error:
            self._put({"event": "error", "error": type(error).__name__, "message": error.message})
            self._is_open = False
            return
        self._put({"event": "ready", "info": info})

    def _introduce(self) -> dict[str, Any]:
        """Who serves what. Raises SparkchatError."""
        listed = self._server.get_json("/v1/models")
        cards = (
            [card for card in (listed.get("data") or ()) if isinstance(card, dict)] if isinstance(listed, dict) else []
        )
        card = self._chosen_card(cards)
        self._model, self._kind = str(card["id"]), kind_of(card.get("owned_by"))
        refuse_sampling(self._sampling, self._kind)
        self._reason_off = self._why_off()
        context = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx")
        return {
            "model": self._model,
            "drafter": None,
            "block_size": None,
            "mode": "server",
            "mode_fixed": self._mode_sentence(),
            "reason_off": None,
            "engine": self._kind.label,
            "url": self._server.url,
            "device": f"{self._kind.label} at {self._server.url}",
            "dtype": "",
            "context": context if type(context) is int else None,
            "load_ms": None,
            "cost_table": None,
            "notices": self._notices(),
        }

    def _chosen_card(self, cards: list[dict[str, Any]]) -> dict[str, Any]:
        names = [str(card.get("id")) for card in cards]
        if not cards:
            raise SparkchatError(f"{self._server.url} lists no model; is it an OpenAI-compatible server?")
        if self._wanted in names:
            return cards[names.index(self._wanted)]  # type: ignore[arg-type]
        if len(cards) == 1 and (self._wanted is None or self._may_differ):
            return cards[0]
        asked = "no MODEL was given" if self._wanted is None else f"MODEL {self._wanted!r} is not served there"
        raise UsageError(f"{asked}; {self._server.url} has {', '.join(names[:10])}")

    def _notices(self) -> list[str]:
        if self._wanted not in (None, self._model):
            return [f"{self._server.url} serves {self._model}; it is asked in place of {self._wanted}"]
        return []

    def _why_off(self) -> str | None:
        """Known only where the counters are shown: vLLM exports those of speculation only when it speculates."""
        samples = self._samples()
        self._has_metrics = bool(samples)
        if samples is None or self._kind.counters is None:
            return None
        return None if has_counters(samples, self._kind) else NO_SPECULATION

    def _samples(self) -> dict[str, float] | None:
        """The server's speculation figures now; None when it shows no metrics."""
        prefix = self._kind.counters or self._kind.gauges
        if prefix is None:
            return None
        try:
            return read_samples(self._server.get_text("/metrics"), prefix)
        except SparkchatError:
            return None  # --metrics was not given there: a dash, and no reason to fail

    def _mode_sentence(self) -> str:
        who = f"{self._kind.label} at {self._server.url} decides how drafts are verified"
        if self._reason_off:
            return f"{who}; no speculation: {self._reason_off}"
        return f"{who}; figures are what it reports, a dash is nothing reported"

    def _mode_refusal(self, mode: str) -> str:
        return (
            f"mode {mode} cannot be chosen here: {self._kind.label} at {self._server.url} was started with its own; "
            "start it with another, or run the model without --engine"
        )

    # Answering

    def _answer(self, request: GenerateRequest, opened: Opened) -> None:
        answer = RemoteAnswer(request, self._model, self._kind)
        error: SparkchatError | None = None
        done = threading.Event()
        try:
            path, body = build_body(request, self._model, self._kind)
            before = self._samples() if self._has_metrics else None
            if before is not None:
                self._spawn(self._watch, answer, before, done)
            opened.send("POST", self._server.full_path(path), body)
            for chunk in opened.events():
                self._put(*answer.take(chunk))
            if before is not None:
                self._count(answer, before)
        except SparkchatError as found:
            error = None if opened.was_cut else found
        finally:
            done.set()
            opened.close()
            with self._lock:
                self._running.pop(request.id, None)
        self._put(*answer.end(self._reason_off, cancelled=opened.was_cut, error=error))

    def _watch(self, answer: RemoteAnswer, before: Mapping[str, float], done: threading.Event) -> None:
        """Look at the counters while the answer runs."""
        while not done.wait(WATCH_SECONDS):
            self._count(answer, before)
            if not done.is_set() and answer.figures.is_known:
                self._put(answer.progress())

    def _count(self, answer: RemoteAnswer, before: Mapping[str, float]) -> None:
        after = self._samples()
        if after is not None:
            answer.counted = figures_between(before, after, self._kind) or answer.counted

    def _put(self, *events: Event) -> None:
        for event in events:
            self._events.put(event)
