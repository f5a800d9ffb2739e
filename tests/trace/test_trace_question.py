"""The question stands in the trace as it was asked, whichever way it was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.trace_files import write_session
from fixtures.trace_sessions import Answer
from sparkchat.params import GenerateRequest
from sparkchat.trace import verify

CHAT = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
)


@pytest.mark.parametrize(
    ("request_", "question"),
    [
        (GenerateRequest("a", prompt="Why?\n"), "Why?\n"),
        (GenerateRequest("a", messages=CHAT), "three"),
        (GenerateRequest("a", prompt_ids=(1, 2)), None),
    ],
    ids=["prompt", "chat", "ids"],
)
def test_what_is_answered(request_: GenerateRequest, question: str | None) -> None:
    assert request_.question == question


def test_the_turn_line_has_it(tmp_path: Path) -> None:
    path = write_session(tmp_path / "a", Answer(question="Why?\u2028<b>"))
    turn = json.loads(path.read_bytes().split(b"\n")[1])
    assert turn["type"] == "turn" and turn["prompt_text"] == "Why?\u2028<b>" and verify(path).ok
