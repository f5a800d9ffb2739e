"""Requests written as JSON lines: one object each, read into a GenerateRequest."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field, replace
from typing import Any

from sparkchat import strict_json
from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.options import RESOLVED, RUN, SAMPLING, check, unknown
from sparkchat.params import GenerateRequest, SamplingParams

_PROMPTS = ("prompt", "messages", "prompt_ids")
_OTHERS = ("id", "raw", "system", "think", "reasoning_effort", "mode", "block_size", "accept_cap", "draft_temperature")
_KNOWN = (*_PROMPTS, *_OTHERS, *SAMPLING)
_ROLES = ("system", "user", "assistant", "tool")
_THINKING = ("reasoning_content", "reasoning")
"""Fields that clients send back with an answer. Thinking of earlier turns is no part of a prompt."""
_WHERE = "this request's"


@dataclass(frozen=True)
class BadLine:
    """A line that is no request, and why."""

    error: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Its ``id``, where that could be read."""


def parse_line(line: bytes) -> dict[str, Any] | BadLine:
    """One line as an object; never raises."""
    # Editors and shells of Windows begin a file with this mark.
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        value = strict_json.loads(line, unique_keys=True)
    except UnicodeDecodeError as error:
        reason = f"the line is not UTF-8 (byte {error.start}); write JSON in UTF-8"
        return BadLine(reason, strict_json.read_member(line, "id"))
    except ValueError as error:
        reason = f"the line is not JSON ({error}); write one object a line"
        return BadLine(reason, strict_json.read_member(line, "id"))
    if not isinstance(value, dict):
        return BadLine(f'the line holds {type(value).__name__}, not an object; write {{"prompt": ...}}')
    return value


def build_request(line: dict[str, Any], request_id: str, config: RunConfig) -> GenerateRequest:
    """The request of one line, with the run's options where the line gives none. Raises UsageError."""
    for key in line:
        if key not in _KNOWN:
            raise UsageError(unknown("request key", key, _KNOWN))
    given = [name for name in _PROMPTS if name in line]
    if len(given) != 1:
        raise UsageError(f"a request needs exactly one of prompt, messages, prompt_ids; got {given or 'none'}")
    raw = _raw(line, given[0], config)
    is_exact = raw or given[0] == "prompt_ids"
    _refuse_pointless(line, is_exact)
    think = None if is_exact else _option(line, "think", config.think)
    # Where a line asks for no thinking, the run's level has no meaning; its own is refused with the reason.
    effort = None if is_exact or line.get("think") is False else config.reasoning_effort
    return GenerateRequest(
        id=request_id,
        **{given[0]: _PROMPT_CHECKS[given[0]](line[given[0]])},
        raw=raw,
        system=None if is_exact or _has_system(line) else _option(line, "system", config.system),
        think=think,
        reasoning_effort=_option(line, "reasoning_effort", effort),
        mode=_option(line, "mode", None),
        block_size=_option(line, "block_size", None),
        accept_cap=_option(line, "accept_cap", None),
        draft_temperature=_option(line, "draft_temperature", None),
        sampling=_sampling(line, config.sampling),
    )


def _raw(line: dict[str, Any], kind: str, config: RunConfig) -> bool:
    raw = line.get("raw", config.raw and kind == "prompt")
    if not isinstance(raw, bool):
        raise UsageError(f"{_WHERE} raw is {raw!r}; give true or false")
    if raw and kind != "prompt":
        raise UsageError(f"raw sends the exact text of prompt, and this request gives {kind}; drop raw")
    return raw


def _refuse_pointless(line: dict[str, Any], is_exact: bool) -> None:
    for name in ("system", "think", "reasoning_effort"):
        if is_exact and line.get(name) is not None:
            raise UsageError(f"{name} has no place in a request whose input is exact (raw, prompt_ids); drop it")
    if _has_system(line) and line.get("system") is not None:
        raise UsageError("both messages and system give a system text; give one of them")


def _has_system(line: dict[str, Any]) -> bool:
    messages = line.get("messages")
    return isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "system" for m in messages)


def _option(line: dict[str, Any], name: str, default: Any) -> Any:
    """A field of the line; null and absent mean the run's own."""
    value = line.get(name)
    return default if value is None else check(RUN.get(name, RESOLVED[name]), value, f"{_WHERE} {name}")


def _sampling(line: dict[str, Any], default: SamplingParams) -> SamplingParams:
    changes = {
        name: check(SAMPLING[name], line[name], f"{_WHERE} {name}") for name in SAMPLING if line.get(name) is not None
    }
    # A null takes the run's value, except where null is itself a value: no limit, a fresh seed.
    changes |= {name: None for name in ("max_tokens", "seed") if name in line and line[name] is None}
    return replace(default, **changes)


def _prompt(value: Any) -> str:
    return _text(value, f"{_WHERE} prompt")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} is {type(value).__name__}; give a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{where} holds half of a surrogate pair, which no text can; write the whole character"
        ) from None
    return value


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{_WHERE} messages must be a list of at least one {{role, content}}")
    for number, message in enumerate(value, 1):
        thinking = _THINKING if isinstance(message, dict) and message.get("role") == "assistant" else ()
        if not isinstance(message, dict) or set(message) - set(thinking) != {"role", "content"}:
            raise UsageError(f"message {number} must have exactly role and content")
        for name in thinking:
            if message.get(name) is not None:
                _text(message[name], f"{name} of message {number}")
        if message["role"] not in _ROLES:
            raise UsageError(unknown(f"role of message {number}", message["role"], _ROLES))
        _text(message["content"], f"content of message {number}")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _prompt_ids(value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value)
    if not good or not value:
        raise UsageError(f"{_WHERE} prompt_ids must be a list of at least one token id, 0 or above")
    return tuple(value)


_PROMPT_CHECKS = {"prompt": _prompt, "messages": _messages, "prompt_ids": _prompt_ids}
