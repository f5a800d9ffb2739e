"""Which models can be run, by the names that their own files give them; known before anything is fetched or loaded."""

from __future__ import annotations

from sparkchat.errors import UsageError
from sparkchat.headers import Headers

TARGETS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Dense decoders."""
DEEPSEEK_V4 = "DeepseekV4ForCausalLM"
GEMMA4 = tuple(f"Gemma4{kind}For{use}" for kind in ("", "Unified") for use in ("CausalLM", "ConditionalGeneration"))
GGUF = ("llama", "qwen3")
"""Names of GGUF files."""


def refuse_unknown(name: object, where: object, *, is_gguf: bool = False) -> None:
    """Raises UsageError for an architecture that is none of these."""
    known = GGUF if is_gguf else (*TARGETS, *GEMMA4, DEEPSEEK_V4)
    if name not in known:
        what = f"GGUF architecture {name!r}" if is_gguf else f"architecture {name}"
        raise UsageError(f"{where}: {what} is not supported; known: {', '.join(known)}")


def refuse_parts(count: object, where: object) -> None:
    """Raises UsageError for one of several files that a GGUF model was cut into."""
    if count not in (None, 0, 1):
        raise UsageError(f"{where} is one of {count} parts; join them with `llama-gguf-split --merge` first")


def refuse_unsupported(headers: Headers, where: str) -> None:
    """Raises UsageError for a model that its loader would refuse by its name; what the headers do not say is left to
    the loader."""
    if headers.is_gguf:
        refuse_unknown(headers.config["gguf"], where, is_gguf=True)
        refuse_parts(headers.config.get("num_parts"), where)
        return
    names = headers.config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        refuse_unknown(names[0], where)
