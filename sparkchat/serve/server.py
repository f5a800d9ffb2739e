"""The server's life: load, listen, and end as it was asked to.

The port is taken before the model is loaded, so that a taken port is said at once, but nobody can connect before the
engine is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from sparkchat.client import take_crash_log
from sparkchat.config import RunConfig
from sparkchat.errors import Interrupted, SparkchatError, Terminated, UsageError
from sparkchat.serve.app import App
from sparkchat.serve.link import EngineLink
from sparkchat.serve.mailbox import Event
from sparkchat.serve.metrics import Metrics
from sparkchat.trace import TraceWriter

_CODES = {signal.SIGINT: Interrupted.exit_code, signal.SIGTERM: Terminated.exit_code, signal.SIGHUP: 129}
_LAST_WORDS_SECONDS = 2.0
"""How long clients may take to be told that their answer was stopped."""
_CROWDED_SECONDS = 60.0
"""How often it is said that no connection can be taken."""
_BACKLOG = 2048


@dataclass(frozen=True)
class ServeOptions:
    """What ``sparkchat serve`` knows beside the run's own options."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free one."""
    api_key: str | None = None
    max_waiting: int = 256
    """Requests that may wait while all places are taken; more are refused."""
    grace: float = 30.0
    """Seconds that running answers may take after SIGTERM, SIGHUP or ctrl+c."""


class _Quiet(uvicorn.Server):
    """Signals are ours, and ``is_up`` says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Lines(logging.Handler):
    """What uvicorn has to report, one line each."""

    def __init__(self, say: Callable[[str], None], debug: bool) -> None:
        super().__init__(logging.ERROR)
        self._say = say
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        said = record.getMessage().splitlines()[0] if record.getMessage() else "error"
        self._say(said if error is None else f"internal error, {type(error).__name__}: {error}")
        if error is not None and self._debug:
            logging.lastResort.emit(record)  # type: ignore[union-attr]


class _LoopErrors:
    """What the event loop has to report, one line each instead of a traceback.

    Where the process has no file left for a connection the loop says so thousands of times a second.
    """

    def __init__(self, say: Callable[[str], None], debug: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._debug = debug
        self._clock = clock
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            if self._clock() >= self._quiet_until:
                self._say(f"further connections have to wait: {error.strerror}; see `ulimit -n`")
                self._quiet_until = self._clock() + _CROWDED_SECONDS
            return
        what = "" if error is None else f", {type(error).__name__}: {error}"
        self._say(f"internal error, {context.get('message')}{what}")
        if self._debug:
            loop.default_exception_handler(context)


def run_server(
    config: RunConfig, options: ServeOptions, say: Callable[[str], None], show_loading: Callable[[Event], None]
) -> int:
    """Serve until a signal; returns the exit code. Raises SparkchatError when the model cannot be loaded or served.

    ``say`` takes sentences for whoever runs the server, ``show_loading`` the engine's ``loading`` events.
    """
    listener = _bind(options.host, options.port)
    trace = None
    try:
        if config.trace_path is not None:
            trace = TraceWriter(config.trace_path, config.trace_force, argv=config.argv)
        with asyncio.Runner() as runner:
            return runner.run(_Service(config, options, say, show_loading, listener, trace).run())
    finally:
        listener.close()
        if trace is not None and (lost := trace.close()) is not None:
            say(lost)


class _Service:
    def __init__(
        self,
        config: RunConfig,
        options: ServeOptions,
        say: Callable[[str], None],
        show_loading: Callable[[Event], None],
        listener: socket.socket,
        trace: TraceWriter | None,
    ) -> None:
        self._config = config
        self._options = options
        self._say = say
        self._show_loading = show_loading
        self._listener = listener
        self._trace = trace
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()
        self._hurried = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_LoopErrors(self._say, self._config.debug))
        for number in _CODES:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: it shall outlive its terminal
            loop.add_signal_handler(number, self._note_signal, number)
        metrics = Metrics()
        link = EngineLink(self._config.spec, metrics, self._record, self._say, self._options.max_waiting)
        link.start()
        try:
            await _first(link.is_ready.wait(), self._signalled.wait(), link.failed)
            if link.failed.done():
                raise link.failed.result()
            if not self._signals:
                self._say_notices(link)
                await self._listen(link, App(self._config, link, metrics, self._say, self._options.api_key))
            if link.failed.done():
                raise link.failed.result()
            # Without a signal it was the HTTP server that ended by itself.
            return _CODES[self._signals[0]] if self._signals else SparkchatError.exit_code
        finally:
            link.close()

    async def _listen(self, link: EngineLink, app: App) -> None:
        logger = logging.getLogger("uvicorn.error")
        logger.handlers, logger.propagate = [_Lines(self._say, self._config.debug)], False
        server = _Quiet(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=65,
                timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS) + 1,
            )
        )
        self._open_port()
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        await _first(server.is_up.wait(), asyncio.shield(serving))
        self._say(f"{self._config.spec.name} is served at {self._url()}/v1 (ctrl+c ends it)")
        try:
            await _first(self._signalled.wait(), link.failed, asyncio.shield(serving))
            for open_port in server.servers:
                open_port.close()
            await self._finish(link)
        finally:
            server.should_exit = True
            await serving

    def _open_port(self) -> None:
        # Its connections inherit this, or a server that takes its place at once would find the port taken by them.
        _share(self._listener)
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise _taken(*self._listener.getsockname()[:2], error) from None

    async def _finish(self, link: EngineLink) -> None:
        """No new answers; those that run get the grace period, or less when a second signal hurries."""
        link.refuse_more("the server is ending; ask elsewhere, or later")
        if link.num_live and not link.failed.done():
            self._say(f"ending: {link.num_live} requests may take {self._options.grace:g} seconds; again to stop them")
            await _first(link.is_idle.wait(), self._hurried.wait(), asyncio.sleep(self._options.grace))
        if link.num_live:
            link.end_all("the server is ending; the answer was stopped")
            await _first(link.is_idle.wait(), asyncio.sleep(_LAST_WORDS_SECONDS))

    def _note_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        (self._signalled if len(self._signals) == 1 else self._hurried).set()

    def _record(self, event: Event) -> str | None:
        if event["event"] == "loading":
            self._show_loading(event)
        elif event["event"] == "notice" and self._config.verbose:
            self._say(event["message"])
        elif event["event"] == "crashed" and self._config.debug:
            # Now, since the server goes on; elsewhere it is shown at the program's end.
            for line in take_crash_log().splitlines():
                self._say(line)
        return self._trace.event(event) if self._trace is not None else None

    def _say_notices(self, link: EngineLink) -> None:
        for sentence in (*self._config.notices, *(link.info.get("notices") or ())):
            self._say(sentence)
        if link.info.get("reason_off"):
            self._say(f"no speculation: {link.info['reason_off']}")

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address but does not listen yet. Raises UsageError or SparkchatError."""
    # The name may stand for ::1 first, where clients that were told 127.0.0.1 do not look.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise UsageError(
            f"--host {host} is no address of this machine; give 127.0.0.1, or one of its addresses"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        try:
            # Alone: two servers that may share the address would both get it, as long as neither listens.
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # What an earlier server left behind is waited for by the system, and may be shared.
            _share(listener)
            listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    listener.setblocking(False)
    return listener


def _share(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _taken(host: str, port: int, error: OSError) -> SparkchatError:
    return SparkchatError(
        f"{host} port {port} cannot be served on: {error.strerror}; give another --port, or --port 0 for a free one"
    )


async def _first(*things: object) -> None:
    """Wait for the first of several awaitables; drop the others."""
    tasks = [asyncio.ensure_future(thing) for thing in things]  # type: ignore[arg-type]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, thing in zip(tasks, things, strict=True):
            if task is not thing:
                task.cancel()
