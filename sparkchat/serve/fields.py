"""From the body of a request to what the engine is asked.

Every field is checked, by the same table as flags and profiles where it is one of ours. A field that would change
nothing here is accepted with the values for which that is true; anything else is refused with its name, so nothing is
accepted and ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.finite import short
from sparkchat.options import RESOLVED, SAMPLING, check, unknown
from sparkchat.params import MOST_LOGPROBS, GenerateRequest, SamplingParams
from sparkchat.serve.messages import read_messages
from sparkchat.serve.problems import Problem, bad_request

MOST_CHOICES = 64
"""Answers that one request may ask for, over all its prompts."""
MOST_STOPS = 16
TEXT_MAX_TOKENS = 16
"""OpenAI's default for text completions; chats go on to the end of the context."""

Body = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One HTTP request, understood."""

    requests: tuple[GenerateRequest, ...]
    """One per choice: every prompt ``num_per_prompt`` times."""
    id: str
    num_per_prompt: int = 1
    stream: bool = False
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    wants_ids: bool = False
    wants_logprobs: bool = False


def read_chat(body: Body, config: RunConfig, info: Mapping[str, Any]) -> Asked:
    """``/v1/chat/completions``. Raises Problem."""
    _refuse_unknown(body, _CHAT)
    prompt = {"messages": read_messages(_given(body, "messages", "a list of messages"))}
    if not any(message["role"] == "system" for message in prompt["messages"]):
        prompt["system"] = config.system
    limit = _max_tokens(body, ("max_tokens", "max_completion_tokens"), config.sampling.max_tokens, info)
    count = _whole(body, "top_logprobs", 0, MOST_LOGPROBS)
    wants = _switch(body, "logprobs")
    if count is not None and not wants:
        raise bad_request(
            "top_logprobs needs logprobs; set logprobs to true, or leave top_logprobs out", "top_logprobs"
        )
    think = _think(body, config)
    prompt |= {"think": think, "reasoning_effort": _effort(body, think, config)}
    return _asked(body, config, "chatcmpl", [prompt], limit, (count or 0) if wants else None)


def read_text(body: Body, config: RunConfig, info: Mapping[str, Any]) -> Asked:
    """``/v1/completions``: the prompt is exact text or token ids. Raises Problem."""
    _refuse_unknown(body, _TEXT)
    prompts = _prompts(_given(body, "prompt", "a text, a list of texts, or token ids"))
    default = config.sampling.max_tokens or TEXT_MAX_TOKENS
    limit = _max_tokens(body, ("max_tokens",), default, info)
    return _asked(body, config, "cmpl", prompts, limit, _whole(body, "logprobs", 0, MOST_LOGPROBS))


def _asked(
    body: Body,
    config: RunConfig,
    prefix: str,
    prompts: list[dict[str, Any]],
    max_tokens: int | None,
    logprobs: int | None,
) -> Asked:
    per_prompt = _whole(body, "n", 1, MOST_CHOICES) or 1
    if body.get("best_of") not in (None, per_prompt):
        raise bad_request("best_of is not possible; leave it out, or give it the value of n", "best_of")
    if per_prompt * len(prompts) > MOST_CHOICES:
        raise bad_request(f"{len(prompts)} prompts with n {per_prompt}: at most {MOST_CHOICES} answers a request", "n")
    session = _text(body, "session")
    if session is not None and per_prompt * len(prompts) > 1:
        raise bad_request("a session has one answer at a time; leave session out, or ask for one answer", "session")
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    sampling = _sampling(body, replace(config.sampling, max_tokens=None), max_tokens)
    requests = []
    for prompt in prompts:
        for choice in range(per_prompt):
            try:
                request = GenerateRequest(
                    id=f"{request_id}-{len(requests)}",
                    **prompt,
                    **{name: _option(body, name) for name in _SPECULATION},
                    sampling=_seeded(sampling, choice),
                    session=session,
                    logprobs=logprobs,
                )
            except UsageError as error:
                raise bad_request(error.message, field_of(error.message)) from None
            requests.append(request)
    options = _stream_options(body)
    return Asked(
        tuple(requests),
        request_id,
        per_prompt,
        stream=_switch(body, "stream"),
        include_usage=options.get("include_usage", False),
        usage_in_every_chunk=options.get("continuous_usage_stats", False),
        wants_ids=_switch(body, "return_token_ids"),
        wants_logprobs=logprobs is not None,
    )


def _seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The choices of one prompt are drawn from seeds in a row: the first has the one that was given."""
    seed = sampling.seed
    return sampling if seed is None or not choice else replace(sampling, seed=(seed + choice) % 2**64)


def _sampling(body: Body, default: SamplingParams, max_tokens: int | None) -> SamplingParams:
    changes: dict[str, Any] = {"max_tokens": max_tokens}
    for name, option in SAMPLING.items():
        value = body.get(name)
        if value is None or name == "max_tokens":
            continue
        try:
            changes[name] = check(option, value, name)
        except UsageError as error:
            raise bad_request(error.message, name) from None
    if changes.get("top_k") == -1:
        changes["top_k"] = 0  # vLLM's and SGLang's word for "no limit"
    if len(changes.get("stop", ())) > MOST_STOPS:
        raise bad_request(f"stop has {len(changes['stop'])} texts; give at most {MOST_STOPS}", "stop")
    try:
        return replace(default, **changes)
    except UsageError as error:
        raise bad_request(error.message, field_of(error.message)) from None


def _max_tokens(body: Body, names: tuple[str, ...], default: int | None, info: Mapping[str, Any]) -> int | None:
    given = {name: body[name] for name in names if body.get(name) is not None}
    if len(set(map(repr, given.values()))) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    for name, value in given.items():
        context = info.get("context")
        if type(value) is not int or value < 1:
            raise bad_request(f"{name} is {short(value)}; give a whole number of 1 or more", name)
        if context is not None and value > context:
            raise bad_request(f"{name} {short(value)} is more than the context of {context} tokens; give less", name)
        return value
    return default


def _prompts(value: Any) -> list[dict[str, Any]]:
    many = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    return [_prompt(each) for each in many]


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"prompt": _sound(value, "prompt"), "raw": True}
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return {"prompt_ids": tuple(value)}
    raise bad_request("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")


def _think(body: Body, config: RunConfig) -> bool | None:
    extra = body.get("chat_template_kwargs")
    asked = [] if body.get("think") is None else [_switch(body, "think")]
    if extra is not None:
        known = ("enable_thinking", "thinking")
        if not isinstance(extra, dict) or any(k not in known or not isinstance(v, bool) for k, v in extra.items()):
            raise bad_request(f"chat_template_kwargs takes {' or '.join(known)}, true or false", "chat_template_kwargs")
        asked += extra.values()
    if len(set(asked)) > 1:
        raise bad_request("think and chat_template_kwargs differ; give one of them", "think")
    return asked[0] if asked else config.think


def _effort(body: Body, think: bool | None, config: RunConfig) -> str | None:
    """In a word of the model's; the server's own where the request thinks."""
    value = _text(body, "reasoning_effort")
    return value if value is not None else None if think is False else config.reasoning_effort


def _stream_options(body: Body) -> dict[str, bool]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not _switch(body, "stream"):
        raise bad_request("stream_options are for streams; set stream to true, or leave them out", "stream_options")
    known = ("include_usage", "continuous_usage_stats")
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object", "stream_options")
    for name, value in options.items():
        if name not in known:
            raise bad_request(unknown("stream option", name, known), f"stream_options.{name}", "unknown_parameter")
        if value is not None and not isinstance(value, bool):
            raise bad_request(f"{name} is {short(value)}; give true or false", f"stream_options.{name}")
    return {name: bool(value) for name, value in options.items()}


def _given(body: Body, name: str, want: str) -> Any:
    if body.get(name) is None:
        raise bad_request(f"{name} is missing; give {want}", name, "missing_required_parameter")
    return body[name]


def _option(body: Body, name: str) -> Any:
    try:
        return None if body.get(name) is None else check(RESOLVED[name], body[name], name)
    except UsageError as error:
        raise bad_request(error.message, name) from None


def _switch(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"{name} is {short(value)}; give true or false", name)
    return bool(value)


def _text(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise bad_request(f"{name} is {short(value)}; give a text", name)
    return None if value is None else _sound(value, name)


def _whole(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is not None and not (type(value) is int and low <= value <= high):
        raise bad_request(f"{name} is {short(value)}; give a whole number from {low} to {high}", name)
    return value


def _sound(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(f"{name} holds half of a surrogate pair; write the whole character", name) from None
    return text


def field_of(message: str) -> str | None:
    """The field that a refusal names first, as those of a request and of the engine do; None where it names none."""
    word = message.replace("block size", "block_size", 1).split(" ", 1)[0]
    return word if word in SAMPLING or word in (*_SPECULATION, "logprobs") else None


def _refuse_unknown(body: Body, known: Mapping[str, _NoEffect | None]) -> None:
    for name, value in body.items():
        if name not in known:
            raise Problem(400, unknown("field", name, known), param=name, code="unknown_parameter")
        harmless = known[name]
        if harmless is not None and value is not None and not harmless.holds(value):
            raise bad_request(f"{name} {short(value)} is not possible here; {harmless.want}", name, "unsupported_value")


@dataclass(frozen=True)
class _NoEffect:
    """Values of a field that change nothing here."""

    want: str
    holds: Callable[[Any], bool] = field(default=lambda value: False)


def _only(*values: Any) -> _NoEffect:
    shown = ", ".join(repr(value) for value in values)
    return _NoEffect(
        f"give {shown}, or leave it out", lambda value: any(value == v and type(value) is type(v) for v in values)
    )


def _a(kind: type, want: str) -> _NoEffect:
    return _NoEffect(f"give {want}", lambda value: isinstance(value, kind))


_LEAVE_OUT = _NoEffect("leave it out")
_SPECULATION = ("mode", "block_size", "accept_cap", "draft_temperature")
_OURS = dict.fromkeys((*SAMPLING, "model", "n", "stream", "stream_options", "session", *_SPECULATION))
_SHARED: dict[str, _NoEffect | None] = {
    **_OURS,
    "logprobs": None,
    "return_token_ids": None,
    # For the provider's own books; there are none here.
    "user": _a(str, "a text"),
    "safety_identifier": _a(str, "a text"),
    "prompt_cache_key": _a(str, "a text"),
    "metadata": _a(dict, "an object"),
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "skip_special_tokens": _only(True),
    "response_format": _only({"type": "text"}),
    "priority": _only(0),
}
_CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs", "think", "reasoning_effort", "chat_template_kwargs")
_CHAT = _SHARED | {
    **dict.fromkeys(_CHAT_ONLY),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "parallel_tool_calls": _a(bool, "true or false"),
    "modalities": _only(["text"]),
    "audio": _LEAVE_OUT,
    "prediction": _LEAVE_OUT,
    "web_search_options": _LEAVE_OUT,
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
}
_TEXT = _SHARED | {
    "prompt": None,
    "best_of": None,
    "echo": _only(False),
    "suffix": _only(""),
}
