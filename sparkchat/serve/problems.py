"""What a client is told when its request cannot be answered: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Problem(Exception):
    """Ends a request with ``status`` and an error object, or with an error event once a stream has begun."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> Problem:
    return Problem(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int | None = None) -> Problem:
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    return Problem(503, message, code="engine_unavailable", headers=headers)
