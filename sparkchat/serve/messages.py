"""The messages of a chat request, checked one by one."""

from __future__ import annotations

from typing import Any

from sparkchat.options import unknown
from sparkchat.serve.problems import bad_request

_ROLES = ("system", "developer", "user", "assistant")
_SAID_BY_US = (
    "reasoning",
    "reasoning_content",
    "refusal",
    "annotations",
    "audio",
    "tool_calls",
    "function_call",
    "name",
)
"""Fields of an answer that clients send back with it. Thinking of earlier turns is no part of a prompt; the others are
taken when they are empty."""
_THINKING = ("reasoning", "reasoning_content")


def read_messages(value: Any) -> tuple[dict[str, str], ...]:
    """``[{"role", "content"}, ...]`` as the engine takes them. Raises Problem."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list of at least one message", "messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role not in _ROLES:
        reason = "is missing" if role is None else f"{unknown('role', role, _ROLES)}"
        raise bad_request(f"{where}.role: {reason}", f"{where}.role")
    for name, extra in message.items():
        if name in ("role", "content"):
            continue
        if name not in _SAID_BY_US:
            raise bad_request(
                f"{where}: {unknown('field', name, ('role', 'content'))}", f"{where}.{name}", "unknown_parameter"
            )
        if extra and not (name in _THINKING and role == "assistant"):
            raise bad_request(f"{where}.{name} is not possible here; leave it out", f"{where}.{name}")
    return {"role": role, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise bad_request(f"{where} must be a text, or a list of text parts", where)
    return _sound(content, where)


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_request(f'{where} must be {{"type": "text", "text": ...}}; this model reads text alone', where)
    return _sound(part["text"], where)


def _sound(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{where} holds half of a surrogate pair; write the whole character", where) from None
    return text
