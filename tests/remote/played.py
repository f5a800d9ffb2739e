"""A server that plays responses written after the published schemas of other engines, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Part:
    """What comes of an engine: its list of models, its answer, its pages of ``/metrics`` one after the other."""

    owner: str
    chunks: Sequence[Any] = ()
    """Objects become events; bytes are sent as they are."""
    models: Sequence[str] = ("the-model",)
    card: Json = field(default_factory=dict)
    metrics: Sequence[str] = ()
    """The last page stays; none is a 404."""
    status: int = 200
    """Of the answer; other than 200 sends ``chunks[0]`` as its body."""
    hold: threading.Event | None = None
    """The answer stops before its last chunk until this is set."""
    key: str | None = None


class Played:
    """The server; ``bodies`` are the requests it got, ``cuts`` counts clients that left in mid-answer."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.bodies: list[tuple[str, Json]] = []
        self.proxied: list[str] = []
        """Whole addresses, of requests that came as to a proxy."""
        self.num_pages = 0
        self.cuts = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        if self.part.hold is not None:
            self.part.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self) -> str | None:
        pages = self.part.metrics
        if not pages:
            return None
        self.num_pages += 1
        return pages[min(self.num_pages, len(pages)) - 1]

    def _handler(played: Played) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def parse_request(self) -> bool:
                is_good = super().parse_request()
                if self.path.startswith("http://"):  # asked as a proxy
                    played.proxied.append(self.path)
                    self.path = "/" + self.path.split("/", 3)[3]
                return is_good

            def do_GET(self) -> None:
                part = played.part
                if part.key is not None and self.headers["authorization"] != f"Bearer {part.key}":
                    self._whole(401, json.dumps({"error": {"message": "no key", "type": "x"}}))
                elif self.path == "/v1/models":
                    cards = [
                        {"id": name, "object": "model", "owned_by": part.owner, **part.card} for name in part.models
                    ]
                    self._whole(200, json.dumps({"object": "list", "data": cards}))
                elif self.path == "/metrics" and (page := played.page()) is not None:
                    self._whole(200, page)
                else:
                    self._whole(404, json.dumps({"detail": "Not Found"}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                played.bodies.append((self.path, body))
                part = played.part
                if part.status != 200:
                    self._whole(part.status, json.dumps(part.chunks[0]))
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    for data in events(part.chunks, part.hold):
                        self.wfile.write(data)
                        self.wfile.flush()
                except OSError:
                    played.cuts += 1
                self.close_connection = True

            def _whole(self, status: int, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        return Handler


def events(chunks: Sequence[Any], hold: threading.Event | None) -> Iterator[bytes]:
    for number, chunk in enumerate(chunks):
        if hold is not None and number == len(chunks) - 1:
            while not hold.wait(0.02):
                yield b": still here\n\n"
        yield chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
    """A chat chunk of any engine."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more.pop("choice", {})}
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "the-model",
        "choices": [choice],
        **more,
    }


def usage(prompt: int, answer: int, cached: int | None = None) -> Json:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": details,
    }
