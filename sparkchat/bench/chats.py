"""Prompts that no drafter of ours was trained on: the held-out side of the training prompts."""

from __future__ import annotations

import random

from sparkchat.train.prompts import prompt_books

SYSTEM_SHARE = 0.2


def held_out_chats(count: int, seed: int = 7) -> list[tuple[str, str | None]]:
    """(prompt, system text or None) of ``count`` chats, the same for the same seed."""
    book, draw = prompt_books()[1], random.Random(seed)
    chats = []
    for _ in range(count):
        system = draw.choice(book.system_prompts) if draw.random() < SYSTEM_SHARE else None
        chats.append((book.user_prompt(draw), system))
    return chats
