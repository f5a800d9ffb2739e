"""A model hub on loopback that can be told to misbehave: cut, busy, gated, renamed, without ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
GOOD_TOKEN = "hf_goodgoodgoodgoodgoodgoodgoodgood"


@dataclass
class Repo:
    """One repository and how it behaves."""

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    private: bool = False
    sizes_in_listing: bool = True
    ignores_range: bool = False
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """File -> for each coming request, after how many bytes the connection is cut."""
    busy: list[int] = field(default_factory=list)
    """Status codes to answer with before behaving."""
    retry_after: int | None = None
    """Seconds that a busy answer asks to wait."""
    busy_files: list[int] = field(default_factory=list)
    """As ``busy``, for files alone."""
    awaits_review: bool = False
    """The gate says that access was asked for."""
    forbidden: bool = False
    announced: dict[str, int] = field(default_factory=dict)
    """File -> the size that the listing tells, where it lies."""
    short: dict[str, int] = field(default_factory=dict)
    """File -> bytes that are left out at the end of every answer, below a right header."""
    shifted: bool = False
    """Ranges are answered with another range."""
    blobs_at: str | None = None
    """Another server that files are handed out by, as the hub does for large ones."""
    changes_to: dict[str, bytes] = field(default_factory=dict)
    """File -> the content that a resumed request finds."""
    wrong_bytes: set[str] = field(default_factory=set)
    """Files whose content is not what the listing says."""
    is_login_page: bool = False
    """A network that lets nobody out answers in its place."""
    slow: float = 0.0
    hold: threading.Event | None = None
    """Files are sent only once this is set."""


@dataclass
class Hub:
    url: str
    repos: dict[str, Repo]
    renamed: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, access token)."""

    def ranges(self, file: str) -> list[str | None]:
        return [r for method, path, r in self.requests if method == "GET" and path.endswith("/" + file)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def start_hub(repos: dict[str, Repo]) -> tuple[Hub, ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}", repos)
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return hub, server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.handle_request()

    def do_GET(self) -> None:
        self.handle_request()

    def handle_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.append((path, self.token))
        if path.startswith("/api/whoami"):
            self.reply(200 if self.token == GOOD_TOKEN else 401, {"name": "tester", "type": "user"})
        elif path.startswith("/api/models/"):
            parts = path.removeprefix("/api/models/").split("/")
            name = "/".join(parts[:2])
            if name in self.hub.renamed:
                self.redirect(self.path.replace(name, self.hub.renamed[name]))
            elif self.allowed(name) and self.has_revision(name, "/".join(parts[3:]) or "main"):
                self.reply(200, self.listing(name))
        elif "/resolve/" in path:
            name, rest = path.removeprefix("/").split("/resolve/", 1)
            revision, _, file = rest.partition("/")
            if self.allowed(name) and self.has_revision(name, revision):
                self.file(self.hub.repos[name], file)
        else:
            self.reply(404, {"error": "no such page"})

    @property
    def token(self) -> str | None:
        value = self.headers.get("Authorization", "")
        return value.removeprefix("Bearer ") or None

    def allowed(self, name: str) -> bool:
        repo = self.hub.repos.get(name)
        if repo is not None and repo.busy:
            self.busy(repo, repo.busy.pop(0))
            return False
        if repo is not None and repo.is_login_page:
            self.send_body(200, b"<html>log in</html>", {"Content-Type": "text/html"})
            return False
        if repo is not None and repo.forbidden:
            self.reply(403, {"error": "forbidden"})
            return False
        if self.token is not None and self.token != GOOD_TOKEN and not self.token.startswith("hf_known"):
            self.reply(401, {"error": "bad"}, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return False
        if repo is None or (repo.private and self.token != GOOD_TOKEN):
            # The hub does not tell those who are not logged in whether a repository exists.
            code = 404 if self.token else 401
            self.reply(code, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return False
        if repo.gated and self.token != GOOD_TOKEN:
            said = "Your request to access model is awaiting a review from the repo authors." * repo.awaits_review
            headers = {"X-Error-Code": "GatedRepo"} | ({"X-Error-Message": said} if said else {})
            self.reply(403 if self.token else 401, {"error": said or "gated"}, headers)
            return False
        return True

    def has_revision(self, name: str, revision: str) -> bool:
        if revision in ("main", self.hub.repos[name].commit):
            return True
        self.reply(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        return False

    def listing(self, name: str) -> dict[str, Any]:
        repo = self.hub.repos[name]
        siblings: list[dict[str, Any]] = []
        for path, content in repo.files.items():
            entry: dict[str, Any] = {"rfilename": path}
            if repo.sizes_in_listing:
                size = repo.announced.get(path, len(content))
                entry |= {"size": size, "blobId": "0" * 40}
                entry["lfs"] = {"sha256": sha256(content), "size": size, "pointerSize": 134}
            siblings.append(entry)
        return {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": [], "downloads": 0}

    def file(self, repo: Repo, path: str) -> None:
        content = repo.files.get(path)
        if content is None:
            self.reply(404, {"error": "no entry"}, {"X-Error-Code": "EntryNotFound"})
            return
        if repo.busy_files:
            self.busy(repo, repo.busy_files.pop(0))
            return
        if repo.blobs_at is not None:
            self.redirect(repo.blobs_at + self.path, 302)
            return
        asked = self.headers.get("Range")
        if asked and path in repo.changes_to:
            content = repo.files[path] = repo.changes_to.pop(path)
        headers = {"ETag": f'"{sha256(content)}"', "X-Repo-Commit": repo.commit}
        if path in repo.wrong_bytes:
            content = bytes(len(content))
        start, end, code = 0, len(content), 200
        if asked and not repo.ignores_range:
            first, last = asked.removeprefix("bytes=").split("-")
            start, end, code = int(first), min(len(content), int(last) + 1) if last else len(content), 206
            if start >= len(content):
                self.reply(416, {"error": "range"}, {"Content-Range": f"bytes */{len(content)}"})
                return
            start += repo.shifted
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        body = content[start:end]
        self.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if repo.hold is not None:
            repo.hold.wait(30)
        cuts, left_out = repo.cut_after.get(path), repo.short.get(path, 0)
        self.send_slowly(body[: cuts.pop(0)] if cuts else body[: len(body) - left_out], repo.slow)
        if (left_out or cuts is not None) and len(body) and not self.wfile.closed:
            self.close_connection = True

    def busy(self, repo: Repo, code: int) -> None:
        pause = {} if repo.retry_after is None else {"Retry-After": str(repo.retry_after)}
        self.reply(code, {"error": "busy"}, pause)

    def send_slowly(self, body: bytes, pause: float) -> None:
        step = 1 << 16 if pause else len(body) or 1
        try:
            for begin in range(0, len(body), step):
                self.wfile.write(body[begin : begin + step])
                self.wfile.flush()
                if pause:
                    threading.Event().wait(pause)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def reply(self, code: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.send_body(code, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def send_body(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, text in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def redirect(self, target: str, code: int = 307) -> None:
        self.send_response(code)
        self.send_header("Location", target)
        self.send_header("Content-Length", "0")
        self.end_headers()
