"""Messages that spell a special token, as one about chat templates does: there it is text, as it is in an answer.

Structure comes from the template alone, or a message could end its own turn and begin another's. Each spelling is
broken by a mark while the template is rendered, so that the template's own tokens can be told from it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sparkchat.thinking import TAG_PAIRS

_PRIVATE_USE = range(0xE000, 0xF900)


class SpelledTokens:
    """How one tokenizer's special tokens are marked in messages and encoded as text."""

    def __init__(self, tokenizer: Any, texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Templates look for thinking tags in answers that come back, to leave them out.
        words = {str(token) for token in added if token.special} - {"", *itertools.chain(*TAG_PAIRS)}
        special = sorted(words, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, special))) if special else None
        self._mark: str | None = None
        """A character of no message, put behind the first one of each spelling; None where nothing is spelled."""
        everything = "\0".join(texts)
        if self._spelling is not None and self._spelling.search(everything):
            self._mark = next((chr(code) for code in _PRIVATE_USE if chr(code) not in everything), None)

    def mark(self, text: str) -> str:
        mark = self._mark
        if mark is None or self._spelling is None:
            return text
        return self._spelling.sub(lambda found: found[0][0] + mark + found[0][1:], text)

    def unmark(self, text: str) -> str:
        return text if self._mark is None else text.replace(self._mark, "")

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text; what lies between two tokens of the template and has a mark is encoded as text."""
        if self._mark is None or self._spelling is None or self._mark not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece, is_text in _pieces(re.split(f"({self._spelling.pattern})", text), self._mark):
            options = {"split_special_tokens": True} if is_text else {}
            ids += self._tokenizer.encode(self.unmark(piece), add_special_tokens=False, **options)
        return tuple(ids)


def _pieces(parts: Sequence[str], mark: str) -> list[tuple[str, bool]]:
    """(text, whether it has a mark), as long as can be: encoded apart, neighbours would not become the same ids."""
    pieces: list[tuple[str, bool]] = []
    for part in parts:
        is_text = mark in part
        if pieces and not is_text and not pieces[-1][1]:
            pieces[-1] = (pieces[-1][0] + part, False)
        else:
            pieces.append((part, is_text))
    return pieces
