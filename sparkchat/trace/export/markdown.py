"""Markdown: questions and answers as they were received, with the numbers of each answer below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparkchat.trace.export.answers import RecordedAnswer, answers
from sparkchat.trace.export.words import answer_numbers, without_text
from sparkchat.trace.reader import Damage


def write_markdown(trace: Path, write: Callable[[str], object], damage: Damage) -> list[str]:
    for number, answer in enumerate(answers(trace, damage)):
        write(("\n" if number else "") + _answer(answer))
    return []


def _answer(answer: RecordedAnswer) -> str:
    thinking = answer.text("thinking")
    folded = f"<details><summary>thinking</summary>\n\n{thinking}\n\n</details>\n\n" if thinking else ""
    numbers = f"*{answer_numbers(answer)}*"
    question = answer.start.get("prompt_text") or f"*{without_text(answer)}*"
    return f"## User\n\n{question}\n\n## Assistant\n\n{folded}{answer.text('answer')}\n\n{numbers}\n"
