"""HTTP to the one server that the user named: JSON, text, and streams that another thread may cut.

Proxies of the environment are honoured. Nothing is followed: a redirect is an answer like any other.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sparkchat import strict_json
from sparkchat.errors import NoAccess, SparkchatError, Unreachable, UsageError

CONNECT_SECONDS = 10.0
ASK_SECONDS = 30.0
"""For answers that are no stream."""
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
MOST_LINE_BYTES = 16 << 20
MOST_PAGE_BYTES = 16 << 20


class Refused(SparkchatError):
    """The server understood and said no: status 4xx with its reason."""

    exit_code = 2


class Server:
    """Where requests go. ``url`` may end in ``/v1``."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:
            raise _no_address(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not _is_visible(url):
            raise _no_address(url)
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise UsageError("--engine takes an address alone; put a key into SPARKCHAT_ENGINE_KEY")
        if key is not None and not _is_visible(key):
            raise UsageError("SPARKCHAT_ENGINE_KEY holds what no header can; give visible ASCII without spaces")
        self._scheme, self._host = parts.scheme, parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        is_direct = self._host in _THIS_MACHINE or proxy_bypass(self._host)
        self._proxy = None if is_direct else getproxies().get(self._scheme)
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"

    def get_json(self, path: str) -> Any:
        """Raises Unreachable, NoAccess, Refused or SparkchatError."""
        return self._parsed(self.get_text(path), path)

    def get_text(self, path: str) -> str:
        with self.open("GET", path, timeout=ASK_SECONDS) as opened:
            return opened.page()

    def open(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Opened:
        """Send a request and wait for its status. Raises as ``get_json`` does; 4xx are Refused with their reason."""
        pending = self.prepare(timeout)
        pending.send(method, self.full_path(path), body)
        return pending

    def prepare(self, timeout: float | None = None) -> Opened:
        """A connection that is not made yet, so that another thread may cut it at any time."""
        return Opened(self, self._connection(), timeout)

    def full_path(self, path: str) -> str:
        """What stands in the request line: through a proxy of plain HTTP the whole address."""
        return f"{self.url}{path}" if self._proxy and self._scheme == "http" else self._path + path

    @property
    def headers(self) -> dict[str, str]:
        found = {"accept": "application/json, text/event-stream, text/plain", "connection": "close"}
        return found | ({"authorization": f"Bearer {self._key}"} if self._key else {})

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._host, self._port
        if self._proxy:
            through = urlsplit(self._proxy if "//" in self._proxy else f"//{self._proxy}")
            host, port = through.hostname or "", through.port
        if self._scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        secure = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=ssl.create_default_context())
        if self._proxy:
            secure.set_tunnel(self._host, self._port)
        return secure

    @staticmethod
    def _parsed(text: str, path: str) -> Any:
        try:
            return strict_json.loads(text)
        except ValueError:
            raise SparkchatError(f"the server's answer to {path} is no JSON; is it an OpenAI-compatible one?") from None


class Opened:
    """One exchange. ``cut`` may be called from another thread, and ends it at once."""

    def __init__(self, server: Server, connection: http.client.HTTPConnection, timeout: float | None) -> None:
        self._server = server
        self._connection = connection
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self.was_cut = False

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, method: str, full_path: str, body: Any) -> None:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = self._server.headers | ({} if data is None else {"content-type": "application/json"})
        try:
            self._connection.connect()
            with self._lock:
                self._socket = self._connection.sock
                self._socket.settimeout(self._timeout)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self.was_cut:
                self.cut()
            self._connection.request(method, full_path, data, headers)
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            self.close()
            raise self._unreachable(error) from None
        if self._response.status != 200:
            self._raise_status(self._response.status)

    def page(self) -> str:
        assert self._response is not None
        try:
            return self._response.read(MOST_PAGE_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def events(self) -> Iterator[Any]:
        """The objects of a stream of server-sent events, up to ``[DONE]`` or the end. Raises SparkchatError."""
        assert self._response is not None
        data: list[str] = []
        while True:
            line = self._line()
            if line is None:
                return
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                text, data = "\n".join(data), []
                if text == "[DONE]":
                    return
                try:
                    yield strict_json.loads(text)
                except ValueError:
                    raise SparkchatError("the server sent an event that is no JSON; the answer ends here") from None

    def cut(self) -> None:
        """End it: what reads from it gets an error at once."""
        with self._lock:
            self.was_cut = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _line(self) -> str | None:
        assert self._response is not None
        try:
            raw = self._response.readline(MOST_LINE_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        if not raw:
            return None
        if not raw.endswith(b"\n"):
            raise SparkchatError("the server closed the connection in the middle of an answer")
        return raw.decode("utf-8", "replace").rstrip("\r\n")

    def _raise_status(self, status: int) -> None:
        reason = _reason(self.page())
        self.close()
        where = self._server.url
        if status in (401, 403):
            raise NoAccess(f"{where} lets nobody in without its key ({reason}); set SPARKCHAT_ENGINE_KEY")
        if 400 <= status < 500:
            raise Refused(f"{where} refuses this ({status}): {reason}")
        raise Unreachable(f"{where} cannot answer now ({status}): {reason}")

    def _unreachable(self, error: Exception) -> SparkchatError:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Unreachable(f"{self._server.url} does not answer ({said}); start the server, or check --engine")


def _no_address(url: str) -> UsageError:
    return UsageError(f"--engine {url[:80]} is no address; give one like http://127.0.0.1:8000")


def _is_visible(text: str) -> bool:
    """ASCII that may stand in a request line or a header."""
    return text.isascii() and text.isprintable() and " " not in text


def _reason(text: str) -> str:
    """The message of an error body, of whatever form."""
    try:
        value = strict_json.loads(text)
    except ValueError:
        return text.strip()[:300] or "no reason given"
    found = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found)[:300]
