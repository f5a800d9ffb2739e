"""One HTTP exchange over ASGI: a body with limits in, JSON or events out, and word of a client that left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sparkchat import strict_json
from sparkchat.serve.problems import Problem, bad_request

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_BODY_BYTES = 8 << 20
BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
STALL_SECONDS = 120.0
"""How long a client may take nothing of what is sent to it."""


class Gone(Exception):
    """The client has left, or takes nothing any more; there is nobody to answer."""


class Exchange:
    """A request and the way to its response."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive
        self._send = send
        self.has_begun = False
        """The status line is on its way."""
        self.is_stream = False
        self.is_complete = False
        """The end of the response is on its way."""

    async def body(self) -> bytes:
        """The whole body. Raises Problem (too large, too slow) or Gone."""
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > MOST_BODY_BYTES:
            raise _too_large()
        try:
            return await asyncio.wait_for(self._read_body(), BODY_SECONDS)
        except TimeoutError:
            raise Problem(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds; send it at once") from None

    async def _read_body(self) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone("the client left while sending")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MOST_BODY_BYTES:
                raise _too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    async def json(self) -> dict[str, Any]:
        """The body as an object. Raises Problem or Gone."""
        kind = self.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json":
            # Also what keeps a web page from posting here behind the user's back.
            raise Problem(415, f"the body is {kind or 'of no type'}; send JSON with Content-Type: application/json")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Problem(415, "the body is compressed; send it as it is")
        data = await self.body()
        try:
            value = strict_json.loads(data, unique_keys=True)
        except UnicodeDecodeError as error:
            raise bad_request(
                f"the body is not UTF-8 (byte {error.start}); write JSON in UTF-8", None, "invalid_json"
            ) from None
        except ValueError as error:
            raise bad_request(f"the body is not JSON ({error}); send one object", None, "invalid_json") from None
        if not isinstance(value, dict):
            raise bad_request(f"the body holds {type(value).__name__}, not an object", None, "invalid_json")
        return value

    async def left(self) -> None:
        """Returns when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.send_text(strict_json.dumps(value), "application/json", status, headers)

    async def send_text(
        self, text: str, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        data = b"" if self.method == "HEAD" else text.encode()
        await self._begin(
            status, {"content-type": content_type, "content-length": str(len(text.encode())), **(headers or {})}
        )
        await self._put({"type": "http.response.body", "body": data})

    async def send_problem(self, problem: Problem) -> None:
        """As a response of its own, or as the last event of a stream that has begun."""
        if not self.has_begun:
            await self.send_json(problem.body, problem.status, problem.headers)
        elif self.is_stream:
            await self.send_event(problem.body)
            await self.end_events()

    async def begin_events(self) -> None:
        self.is_stream = True
        await self._begin(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})

    async def send_event(self, value: Any) -> None:
        await self._put(_body(f"data: {strict_json.dumps(value)}\n\n"))

    async def end_events(self) -> None:
        await self._put(_body("data: [DONE]\n\n", more=False))

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": pairs})

    async def _put(self, message: Message) -> None:
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        try:
            async with asyncio.timeout(STALL_SECONDS):
                await self._send(message)
        except TimeoutError:
            raise Gone(f"the client took nothing for {STALL_SECONDS:.0f} seconds") from None


def _body(text: str, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def _too_large() -> Problem:
    return Problem(413, f"the body is larger than {MOST_BODY_BYTES >> 20} MiB; send less")
