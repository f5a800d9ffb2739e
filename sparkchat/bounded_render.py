"""Rendering a chat template, which is a program of the checkpoint's: bounded in time and in what it writes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2

SECONDS = 5.0
"""Most a template may take for one chat; published ones take milliseconds."""
_SPARE_CHARACTERS = 1_000_000
_TIMES = 16
"""A template may write so many characters of its own, and every message so many times."""


class TooMuch(jinja2.TemplateError):
    """The template does not come to its end, or writes without measure. No other chat would help it."""


def render_bounded(
    tokenizer: Any,
    source: str,
    chat: Sequence[Mapping[str, str]],
    switches: Mapping[str, Any],
    add_generation_prompt: bool,
) -> str:
    """The text of ``chat`` in transformers' sandbox. Raises TooMuch, and whatever the template raises."""
    try:
        with _within(SECONDS):
            text: str = tokenizer.apply_chat_template(
                list(chat),
                chat_template=source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **switches,
            )
    except MemoryError:
        raise TooMuch("it takes more memory than there is") from None
    given = sum(len(message["content"]) for message in chat)
    if len(text) > _SPARE_CHARACTERS + _TIMES * given:
        raise TooMuch(f"it writes {len(text)} characters for a chat of {given}")
    return text


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Interrupts what runs inside after so long; where signals cannot be had (in another thread) nothing does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooMuch(f"it takes more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
