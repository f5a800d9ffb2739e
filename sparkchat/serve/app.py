"""Which path does what, who may ask, and what becomes of everything that goes wrong."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.serve.choices import Choice
from sparkchat.serve.fields import Asked, read_chat, read_text
from sparkchat.serve.http import Exchange, Gone, Receive, Send
from sparkchat.serve.link import EngineLink
from sparkchat.serve.mailbox import Mailbox
from sparkchat.serve.metrics import Metrics
from sparkchat.serve.prefixes import Prefixes
from sparkchat.serve.problems import Problem
from sparkchat.serve.shapes import ChatShape, Shape, TextShape

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class App:
    """The ASGI application."""

    def __init__(
        self,
        config: RunConfig,
        link: EngineLink,
        metrics: Metrics,
        say: Callable[[str], None],
        api_key: str | None = None,
    ) -> None:
        self._config = config
        self._link = link
        self._metrics = metrics
        self._say = say
        self._api_key = api_key
        self._prefixes = Prefixes(config.spec.concurrency)
        self._created = int(time.time())
        self._routes: dict[str, dict[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._show_metrics},
            "/v1/models": {"GET": self._models},
            f"/v1/models/{config.spec.name}": {"GET": self._model},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._text},
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            try:
                await self._route(exchange)
            except Problem as problem:
                await exchange.send_problem(problem)
        except Gone:
            pass

    async def _route(self, exchange: Exchange) -> None:
        self._check_neighbour(exchange)
        methods = self._routes.get(exchange.path)
        if exchange.path != "/health":
            self._check_key(exchange)
        if methods is None and exchange.path.startswith("/v1/models/"):
            raise self._unknown_model(exchange.path.removeprefix("/v1/models/"))
        if methods is None:
            known = ", ".join(path for path in self._routes if not path.startswith("/v1/models/"))
            raise Problem(
                404, f"{exchange.method} {exchange.path[:80]} does not exist; known: {known}", code="not_found"
            )
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise Problem(405, f"{exchange.path} takes {allowed}, not {exchange.method}", headers={"allow": allowed})
        await handler(exchange)

    def _check_neighbour(self, exchange: Exchange) -> None:
        """Without a key only this machine's own programs are answered, and no web page that a browser here shows.

        A page may let its own name point here (DNS rebinding), which the host name tells, or post here blindly, which
        the origin tells.
        """
        if self._api_key is not None:
            return
        origin = exchange.headers.get("origin", "")
        for what, host in (("host name", exchange.headers.get("host", "")), ("origin", origin.rpartition("//")[2])):
            if host and not _is_own(host):
                raise Problem(403, f"the {what} {host[:80]} is not this machine's; ask 127.0.0.1, or serve with a key")

    def _check_key(self, exchange: Exchange) -> None:
        if self._api_key is None:
            return
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Problem(
                401,
                "a key is needed and none or a wrong one was given; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # What can be asked

    async def _health(self, exchange: Exchange) -> None:
        problem = self._link.problem()
        if problem is None:
            await exchange.send_json({"status": "ok"})
        else:
            await exchange.send_json({"status": "unavailable", **problem.body}, 503, problem.headers)

    async def _show_metrics(self, exchange: Exchange) -> None:
        text = self._metrics.text(self._config.spec.name, self._link.info.get("block_size"))
        await exchange.send_text(text, _METRICS_TYPE)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.send_json({"object": "list", "data": [self._card()]})

    async def _model(self, exchange: Exchange) -> None:
        await exchange.send_json(self._card())

    def _card(self) -> dict[str, Any]:
        info = self._link.info
        return {
            "id": self._config.spec.name,
            "object": "model",
            "created": self._created,
            "owned_by": "sparkchat",
            "max_model_len": info.get("context"),
            "drafter": info.get("drafter"),
            "block_size": info.get("block_size"),
            "mode": info.get("mode"),
        }

    def _unknown_model(self, name: object) -> Problem:
        return Problem(
            404,
            f"the model {str(name)[:80]!r} is not served here; ask for {self._config.spec.name!r}",
            param="model",
            code="model_not_found",
        )

    async def _chat(self, exchange: Exchange) -> None:
        body = await self._checked_body(exchange)
        asked = read_chat(body, self._config, self._link.info)
        (request, *others) = asked.requests
        goes_on = not others and request.session is None
        if goes_on:
            request = replace(request, session=self._prefixes.take(request))
            asked = replace(asked, requests=(request,))
        (choice, *_) = await self._answer(exchange, asked, ChatShape(asked, self._config.spec.name))
        if goes_on:
            self._prefixes.keep(request, choice.texts["answer"])

    async def _text(self, exchange: Exchange) -> None:
        body = await self._checked_body(exchange)
        asked = read_text(body, self._config, self._link.info)
        await self._answer(exchange, asked, TextShape(asked, self._config.spec.name))

    async def _checked_body(self, exchange: Exchange) -> dict[str, Any]:
        body = await exchange.json()
        if body.get("model") not in (None, self._config.spec.name):
            raise self._unknown_model(body["model"])
        return body

    # Answering

    async def _answer(self, exchange: Exchange, asked: Asked, shape: Shape) -> list[Choice]:
        """Answer, and cancel what runs when the client leaves or anything goes wrong."""
        choices = [Choice(index) for index in range(len(asked.requests))]
        mailbox = self._link.submit(asked.requests)
        answering = asyncio.create_task(self._write_answer(exchange, asked, shape, mailbox, choices))
        leaving = asyncio.create_task(exchange.left())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            # A connection whose response is complete counts as left, too.
            if not answering.done() and not exchange.is_complete:
                answering.cancel()
                raise Gone("the client left")
            await answering
            return choices
        except Gone as gone:
            self._report_cut(asked, self._link.cancel(mailbox), gone)
            raise
        finally:
            leaving.cancel()
            answering.cancel()
            self._link.cancel(mailbox)

    def _report_cut(self, asked: Asked, num_running: int, gone: Gone) -> None:
        if num_running:
            self._say(f"{asked.id}: {gone}; its answer was stopped")

    async def _write_answer(
        self, exchange: Exchange, asked: Asked, shape: Shape, mailbox: Mailbox, choices: list[Choice]
    ) -> None:
        if asked.stream:
            await self._stream(exchange, asked, shape, mailbox, choices)
            return
        while any(choice.result is None for choice in choices):
            index, event = await mailbox.take()
            choices[index].take(event)
        await exchange.send_json(shape.whole(choices))

    async def _stream(
        self, exchange: Exchange, asked: Asked, shape: Shape, mailbox: Mailbox, choices: list[Choice]
    ) -> None:
        """The status is sent when the first choice has started, so a request that cannot run still gets its 4xx."""
        while any(choice.result is None for choice in choices):
            index, event = await mailbox.take()
            choice = choices[index]
            choice.take(event)
            if not exchange.has_begun:
                await exchange.begin_events()
            if event["event"] == "start":
                chunks = shape.opening(choice)
            elif event["event"] == "end":
                chunks = [shape.closing(choice)]
            else:
                piece = shape.piece(choice, event)
                chunks = [] if piece is None else [piece]
            for chunk in chunks:
                await exchange.send_event(chunk)
        if asked.include_usage:
            await exchange.send_event(shape.usage_chunk(choices))
        await exchange.end_events()


def _is_own(host: str) -> bool:
    """Whether ``name`` or ``name:port`` stands for this machine alone."""
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
