"""From a request of ours to the path and body that another engine understands."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, SamplingParams
from sparkchat.remote.kinds import Kind

Body = dict[str, Any]
_NEUTRAL = SamplingParams()


def build_body(request: GenerateRequest, model: str, kind: Kind) -> tuple[str, Body]:
    """(path, body). Every setting is sent, also one that changes nothing: servers have defaults of their own.

    Raises UsageError for what this engine cannot be asked.
    """
    refuse_settings(request, kind)
    common = {"model": model, "stream": True, **kind.extra, **_sampling(request.sampling, kind)}
    if request.prompt_ids is not None or request.raw:
        return "/v1/completions", {**common, "prompt": _exact_prompt(request, kind), **_text_limit(request, kind)}
    return "/v1/chat/completions", {**common, "messages": _messages(request), **_thinking(request, kind)}


def refuse_settings(request: GenerateRequest, kind: Kind) -> None:
    """Raise UsageError for settings that this engine has no field for."""
    if any(getattr(request, name) is not None for name in ("mode", "block_size", "accept_cap", "draft_temperature")):
        raise UsageError(f"{kind.label} decides how drafts are made and verified; it cannot be asked for another way")
    if request.logprobs is not None:
        raise UsageError("log-probabilities are not asked of other engines; leave them out")
    refuse_sampling(request.sampling, kind)
    if request.think is not None and not kind.think_fields:
        raise UsageError(f"{kind.label} has no switch for thinking; leave --think and --no-think out")
    if request.reasoning_effort is not None:
        raise UsageError("levels of reasoning effort are not asked of other engines; leave --reasoning-effort out")


def refuse_sampling(sampling: SamplingParams, kind: Kind) -> None:
    for option in fields(sampling):
        value = getattr(sampling, option.name)
        if option.name not in kind.fields and value != getattr(_NEUTRAL, option.name):
            flag = "--" + option.name.replace("_", "-")
            raise UsageError(f"{kind.label} has no field for {flag}; leave it out, or run the model here")


def _sampling(sampling: SamplingParams, kind: Kind) -> Body:
    found: Body = {}
    for name, theirs in kind.fields.items():
        value = getattr(sampling, name)
        if name == "logit_bias":
            value = {str(token): bias for token, bias in value} or None
        elif name == "top_k" and not value:
            value = kind.no_top_k
        elif name == "stop":
            value = list(value) or None
        if value is not None:
            found[theirs] = value
    return found


def _messages(request: GenerateRequest) -> list[dict[str, str]]:
    said = list(request.messages or ())
    if request.prompt is not None:
        said = [{"role": "user", "content": request.prompt}]
    return said if request.system is None else [{"role": "system", "content": request.system}, *said]


def _thinking(request: GenerateRequest, kind: Kind) -> Body:
    if request.think is None:
        return {}
    return {"chat_template_kwargs": dict.fromkeys(kind.think_fields, request.think)}


def _exact_prompt(request: GenerateRequest, kind: Kind) -> str | list[int]:
    if request.prompt_ids is None:
        return request.prompt or ""
    if not kind.takes_ids:
        raise UsageError(f"{kind.label} takes no token ids as a prompt; give the text with --raw")
    return list(request.prompt_ids)


def _text_limit(request: GenerateRequest, kind: Kind) -> Body:
    """OpenAI's default for text completions is 16 tokens; null means no limit where it is understood."""
    if request.sampling.max_tokens is not None:
        return {}
    if kind.needs_max_tokens:
        raise UsageError(f"{kind.label} stops exact prompts after 16 tokens unless told otherwise; give --max-tokens N")
    return {"max_tokens": None}
