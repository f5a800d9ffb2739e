"""The engines that are known, and what each calls the same things.

Names are those of the published request and response schemas (vLLM 0.28, SGLang 0.5.23, llama.cpp of 2026-10,
llama-cpp-python 0.3.36). A kind is told from ``owned_by`` in the server's list of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OPENAI = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "stop",
        "seed",
    )
}
_SERVING = _OPENAI | {name: name for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos")}
_LLAMA = _OPENAI | {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty"}
_USAGE = {"stream_options": {"include_usage": True}}
_LIVE_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Kind:
    """One engine's dialect."""

    label: str
    fields: Mapping[str, str]
    """Our sampling option -> the field that carries it. What is missing here is refused."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that make it report more."""
    think_fields: tuple[str, ...] = ()
    """Template switches for thinking; none when it has no such field."""
    takes_ids: bool = True
    """Text completions take token ids as their prompt."""
    needs_max_tokens: bool = False
    """Text completions without a limit stop after 16 tokens, and no limit cannot be asked for."""
    no_top_k: int = -1
    """Its word for "no limit"."""
    counters: str | None = None
    """Prefix of the speculation counters in ``/metrics``."""
    gauges: str | None = None
    """Prefix of the speculation gauges in ``/metrics``, for engines that export no counters."""


_TEMPLATE = ("enable_thinking", "thinking")
VLLM = Kind("vLLM", _SERVING, {"return_token_ids": True, **_LIVE_USAGE}, _TEMPLATE, counters="vllm:spec_decode_")
SGLANG = Kind(
    "SGLang",
    _SERVING,
    {
        "return_spec_tokens_details": True,
        "return_token_ids": True,
        "return_output_ids_in_sglext": True,
        **_LIVE_USAGE,
    },
    _TEMPLATE,
    needs_max_tokens=True,
    gauges="sglang:spec_",
)
LLAMA_CPP = Kind(
    "llama.cpp",
    _LLAMA | {"ignore_eos": "ignore_eos"},
    # Penalties look at the last 64 tokens there unless told otherwise.
    {"timings_per_token": True, "repeat_last_n": -1, **_USAGE},
    ("enable_thinking",),
    no_top_k=0,
    counters="llamacpp:spec_decode_",
)
LLAMA_CPP_PYTHON = Kind("llama-cpp-python", _LLAMA | {"min_tokens": "min_tokens"}, takes_ids=False, no_top_k=0)
SPARKCHAT = Kind(
    "sparkchat", _SERVING, {"return_token_ids": True, **_LIVE_USAGE}, _TEMPLATE, counters="vllm:spec_decode_"
)
OTHER = Kind("this server", _OPENAI, _USAGE, takes_ids=False)

_BY_OWNER = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMA_CPP,
    "me": LLAMA_CPP_PYTHON,
    "sparkchat": SPARKCHAT,
}


def kind_of(owner: object) -> Kind:
    """The dialect of a server whose models are ``owned_by`` this."""
    return _BY_OWNER.get(str(owner).lower(), OTHER)
