"""Which delivered tokens are thinking and which are the answer.

Only tokens that the tokenizer itself added as ``<think>`` and ``</think>`` (or another known pair) are structure: they
switch the channel and give no text. The same characters spelled with ordinary tokens are text, so a model may write
about the tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparkchat.detokenize import special_token_ids

Channel = Literal["answer", "thinking"]

TAG_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>", "<channel|>"),
)
"""Opening and closing tags that published checkpoints add to their tokenizers."""


@dataclass(frozen=True)
class ThinkingTags:
    """The pair of ids that opens and closes a thinking block."""

    open_id: int
    close_id: int


def find_thinking_tags(tokenizer: Any) -> ThinkingTags | None:
    """The pair among the tokenizer's added tokens, or None when the model has no thinking tokens."""
    added = tokenizer.get_added_vocab()
    for opening, closing in TAG_PAIRS:
        if opening in added and closing in added:
            return ThinkingTags(added[opening], added[closing])
    return None


def prompt_opens_thinking(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends inside a thinking block.

    Looks back as far as the last turn marker (a special token that is no thinking tag), so that a tag in an earlier
    message does not count.
    """
    tags = find_thinking_tags(tokenizer)
    if tags is None:
        return False
    turn_markers = special_token_ids(tokenizer) - {tags.open_id, tags.close_id}
    for token_id in reversed(prompt_ids):
        if token_id in (tags.open_id, tags.close_id):
            return token_id == tags.open_id
        if token_id in turn_markers:
            return False
    return False


class ThinkingSplitter:
    """Gives each delivered token its channel.

    ``starts_open`` says whether the prompt opened the block (``RenderedPrompt.opens_thinking``); None finds out from
    ``prompt_ids``. An answer cut before the closing tag is all thinking. A closing tag outside a block is dropped.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = (), *, starts_open: bool | None = None) -> None:
        self._tags = find_thinking_tags(tokenizer)
        if starts_open is None:
            starts_open = prompt_opens_thinking(tokenizer, prompt_ids)
        self.channel: Channel = "thinking" if starts_open and self._tags is not None else "answer"

    def push(self, token_id: int) -> tuple[Channel, bool]:
        """(channel after this token, whether it is a tag). A tag has no text."""
        if self._tags is not None and token_id in (self._tags.open_id, self._tags.close_id):
            self.channel = "thinking" if token_id == self._tags.open_id else "answer"
            return self.channel, True
        return self.channel, False
