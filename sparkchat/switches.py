"""Switches of how the engine computes: in the environment alone, each with the words it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sparkchat.errors import UsageError
from sparkchat.options import nearest

WORDS = {
    "SPARKCHAT_CPU_KERNELS": ("0", "1"),
    "SPARKCHAT_DRAFT_TABLES": ("stored", "rounded"),
    "SPARKCHAT_SHARED_SUMS": ("0", "1", "torch", "push"),
}
"""Variable -> what it may say; what each word does is said where it is read."""


def word_of(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """What the switch says, or None where nothing is said. Raises UsageError for a word that it does not take."""
    word = environ.get(name) or None
    if word is not None and word not in WORDS[name]:
        near = nearest(word, WORDS[name])
        hint = f"did you mean {near}?" if near else f"give one of {', '.join(WORDS[name])}"
        raise UsageError(f"{name} is {word!r}; {hint}")
    return word


def refuse_unknown_words(environ: Mapping[str, str]) -> None:
    """Raises UsageError before anything is loaded, rather than in the engine's process."""
    for name in WORDS:
        word_of(name, environ)
