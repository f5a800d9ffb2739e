"""Prompts that no drafter of ours was trained on: the held-out side of the training prompts."""

from __future__ import annotations

import random

from sparkchat.train.prompts import prompt_books

Chat = tuple[str | tuple[int, ...], str | None]
"""(prompt, or its exact token ids; system text or None)"""
SYSTEM_SHARE = 0.2
MEANINGLESS_TOKENS = 96


def held_out_chats(count: int, seed: int = 7) -> list[Chat]:
    """(prompt, system text or None) of ``count`` chats, the same for the same seed."""
    book, draw = prompt_books()[1], random.Random(seed)
    chats: list[Chat] = []
    for _ in range(count):
        system = draw.choice(book.system_prompts) if draw.random() < SYSTEM_SHARE else None
        chats.append((book.user_prompt(draw), system))
    return chats


def meaningless_chats(count: int, vocab_size: int) -> list[Chat]:
    """Token ids for models that have neither a tokenizer nor anything to say."""
    return [
        (tuple((7919 * i + 104729 * n + 13) % vocab_size for i in range(MEANINGLESS_TOKENS)), None)
        for n in range(count)
    ]
