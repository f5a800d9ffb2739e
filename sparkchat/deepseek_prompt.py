"""The prompt of DeepSeek V4 checkpoints, which define it in code instead of a chat template.

Layout: BOS, the effort text, then the turns without anything between them. A system text stands bare; a user turn is
``<｜User｜>`` and its text; an answer follows ``<｜Assistant｜>``, its thinking (between tags, or just the closing tag
where there is none) and ends with EOS. Thinking of answers before the last question is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from sparkchat.errors import UsageError

MODEL_TYPE = "deepseek_v4"
"""config.json's model_type of the checkpoints this is for."""
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

Release = Literal["preview", "0731"]
RELEASES: tuple[Release, ...] = get_args(Release)
"""Which texts the effort levels stand for; ``preview`` also serves the release that added the drafter."""

# What the model was trained to meet, byte for byte; other words would be other settings.
_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORTS: dict[Release, dict[str, str]] = {
    "preview": {"high": "", "max": _ABSOLUTE},
    "0731": {"low": "", "high": _ABSOLUTE, "max": _BEYOND},
}
"""Level -> the text it puts first. Without a level nothing is put there."""
_ENCODER = "encoding/encoding_dsv4.py"
_MARK_OF_0731 = "Reasoning Effort: Beyond maximum"


def release_of(folder: Path) -> Release | None:
    """Which levels the publisher's encoder in a checkpoint folder knows; it is looked at, never run. None without it,
    as in folders that sparkchat fetches.
    """
    try:
        text = (folder / _ENCODER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return "0731" if _MARK_OF_0731 in text else "preview"


def write_chat(
    messages: Sequence[Mapping[str, str]],
    *,
    think: bool,
    effort: str | None = None,
    release: Release = "0731",
    keep_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The exact prompt text, BOS included.

    ``messages`` have role (system, user, assistant) and content; answers may have reasoning_content.
    ``keep_thinking`` keeps the thinking of earlier answers as well. Raises UsageError for a level that the release
    does not have, or one without thinking.
    """
    chat = _join_questions(messages)
    last_question = max((i for i, m in enumerate(chat) if m["role"] == "user"), default=-1)
    text = BOS + _effort_text(think, effort, release)
    for index, message in enumerate(chat):
        thinks = think and (keep_thinking or index >= last_question)
        is_last = index == len(chat) - 1
        if message["role"] == "system":
            text += message["content"]
        elif message["role"] == "user":
            text += USER + message["content"]
            if not is_last and chat[index + 1]["role"] == "assistant":
                text += ASSISTANT + (THINK if thinks else END_THINK)
        else:
            text += (message.get("reasoning_content", "") + END_THINK if thinks else "") + message["content"] + EOS
    return text + (ASSISTANT + (THINK if think else END_THINK) if add_generation_prompt else "")


def _join_questions(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Questions that follow each other are one turn."""
    chat: list[dict[str, str]] = []
    for message in messages:
        if chat and message["role"] == "user" == chat[-1]["role"]:
            chat[-1]["content"] += "\n\n" + message["content"]
        else:
            chat.append(dict(message))
    return chat


def _effort_text(think: bool, effort: str | None, release: Release) -> str:
    if effort is None:
        return ""
    known = EFFORTS[release]
    if effort not in known:
        raise UsageError(f"reasoning effort {effort!r} is unknown to this release; give one of {', '.join(known)}")
    if not think:
        raise UsageError(f"reasoning effort {effort} needs thinking; drop --no-think, or leave the effort out")
    return known[effort]
