"""Text, channels and ends of one answer: the same whatever blocks its tokens come in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fixtures.tokenizer import END_THINK, IM_END, THINK, TokenizerSpec, build_tokenizer
from sparkchat.engine import output as output_module
from sparkchat.engine.output import DeltaPart, OutputStream, Spellings
from sparkchat.engine.stopping import StopRules
from sparkchat.thinking import ThinkingSplitter

A, B, C, D = (ord(letter) for letter in "abcd")


@cache
def tokenizer() -> Any:
    """Byte b is token b; <think> and </think> are tokens of their own."""
    backend = build_tokenizer(TokenizerSpec())
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def stream(
    stop: Sequence[str] = (), *, max_tokens: int | None = None, min_tokens: int = 0, thinks: bool = False
) -> OutputStream:
    rules = StopRules(frozenset({IM_END}), max_tokens, 1000, 10, min_tokens)
    return OutputStream(tokenizer(), rules, stop, ThinkingSplitter(tokenizer(), starts_open=thinks))


class Answer:
    """Pushes runs and keeps what was streamed."""

    def __init__(self, output: OutputStream) -> None:
        self.output, self.ids, self.parts = output, [], []
        self.ended: tuple[str | None, str | int | None] = (None, None)

    def push(self, run: Sequence[int]) -> bool:
        delta = self.output.push(run, len(self.ids))
        self.ids += run[: delta.num_delivered]
        self.parts += delta.parts
        assert [token for part in delta.parts for token in part.token_ids] == list(run[: delta.num_delivered])
        assert [i for part in delta.parts for i in part.indices] == list(range(delta.num_delivered))
        self.ended = (delta.finish_reason, delta.stop)
        return delta.finish_reason is not None

    def push_all(self, ids: Sequence[int], widths: Sequence[int]) -> Answer:
        at = 0
        for width in widths:
            if at >= len(ids) or self.push(ids[at : at + width]):
                break
            at += width
        return self

    def text(self, channel: str = "answer") -> str:
        return "".join(part.text for part in self.parts if part.channel == channel)

    @property
    def outcome(self) -> tuple[Any, ...]:
        return (tuple(self.ids), self.text(), self.text("thinking"), *self.ended)


def encoded(text: str) -> list[int]:
    return list(text.encode())


def test_an_end_token_inside_a_run_is_not_delivered_and_nothing_follows_it() -> None:
    answer = Answer(stream())
    assert answer.push([A, B, IM_END, C])
    assert answer.outcome == ((A, B), "ab", "", "stop", IM_END)
    assert answer.output.text == "ab"


def test_the_token_that_completes_a_stop_string_is_the_last_one_delivered() -> None:
    answer = Answer(stream(["bc"]))
    assert answer.push([A, B, C, D])
    assert answer.outcome == ((A, B, C), "a", "", "stop_string", "bc")
    # Over two runs, the text is held back until it is certain.
    answer = Answer(stream(["bcd"]))
    assert not answer.push([A, B, C])
    assert answer.text() == "a"
    assert answer.push([D, A])
    assert answer.outcome == ((A, B, C, D), "a", "", "stop_string", "bcd")


def test_held_text_is_shown_when_the_answer_ends_otherwise() -> None:
    answer = Answer(stream(["bcd"], max_tokens=3))
    assert answer.push([A, B, C, D])
    assert answer.outcome == ((A, B, C), "abc", "", "length", None)
    cancelled = Answer(stream(["bcd"]))
    cancelled.push([A, B, C])
    cancelled.parts += cancelled.output.flush()
    assert cancelled.text() == cancelled.output.text == "abc"


def test_a_stop_string_completed_by_the_last_allowed_token_wins() -> None:
    answer = Answer(stream(["bc"], max_tokens=3))
    assert answer.push([A, B, C, D])
    assert answer.ended == ("stop_string", "bc")


def test_thinking_and_answer_are_told_apart_and_tags_are_no_text() -> None:
    answer = Answer(stream(thinks=True))
    answer.push([A, END_THINK, B, THINK, C, END_THINK, D])
    assert (answer.text("thinking"), answer.text()) == ("ac", "bd")
    assert [(p.channel, p.token_ids) for p in answer.parts] == [
        ("thinking", [A]), ("answer", [END_THINK, B]), ("thinking", [THINK, C]), ("answer", [END_THINK, D]),
    ]  # fmt: skip
    assert (answer.output.thinking, answer.output.text) == ("ac", "bd")


def test_a_stop_string_does_not_reach_across_the_tag() -> None:
    answer = Answer(stream(["ab"], thinks=True))
    assert not answer.push([A, END_THINK, B])
    assert (answer.text("thinking"), answer.text()) == ("a", "b")


def test_an_unfinished_character_is_shown_once_at_its_end() -> None:
    smile = list("😀".encode())
    answer = Answer(stream(max_tokens=5))
    assert not answer.push([A, *smile[:2]])
    assert answer.text() == "a"
    assert not answer.push(smile[2:3])
    assert answer.push(smile[3:])
    assert answer.text() == "a😀"
    cut = Answer(stream(max_tokens=3))
    assert cut.push([A, *smile])
    assert cut.text() == "a\ufffd"
    by_tag = Answer(stream(thinks=True))
    by_tag.push([A, *smile[:2], END_THINK, B])
    assert (by_tag.text("thinking"), by_tag.text()) == ("a\ufffd", "b")


def test_ids_and_text_agree_when_a_tag_completes_a_stop_string() -> None:
    """The stand-in of a character that the tag cut short is itself the stop string."""
    answer = Answer(stream(["\ufffd"], thinks=True))
    assert answer.push([A, 0xF0, END_THINK, B])
    assert answer.outcome == ((A, 0xF0, END_THINK), "", "a", "stop_string", "\ufffd")


def test_stop_strings_before_min_tokens_are_text() -> None:
    answer = Answer(stream(["b"], min_tokens=4))
    assert not answer.push([A, B, C])
    assert not answer.push([B])  # this token must have shown a character first
    assert answer.push([B, A])
    assert answer.outcome == ((A, B, C, B, B), "abcb", "", "stop_string", "b")


def test_an_end_token_before_min_tokens_is_ordinary() -> None:
    answer = Answer(stream(min_tokens=2))
    assert answer.push([IM_END, A, IM_END])
    assert (answer.ids, answer.ended) == ([IM_END, A], ("stop", IM_END))


def test_blocks_do_not_matter() -> None:
    rng = random.Random(11)
    pieces = [A, B, C, D, IM_END, THINK, END_THINK, *"é😀".encode()]
    for _ in range(400):
        ids = [rng.choice(pieces) for _ in range(30)]
        settings: dict[str, Any] = {
            "stop": ["".join(rng.choice("abcdé\ufffd") for _ in range(rng.randint(1, 3))) for _ in range(2)],
            "max_tokens": rng.choice([None, 7, 30]),
            "min_tokens": rng.choice([0, 5]),
            "thinks": rng.random() < 0.5,
        }
        outcomes = {
            Answer(stream(**settings)).push_all(ids, widths).outcome
            for widths in ([1] * 30, [6] * 5, [30], [rng.randint(1, 6) for _ in range(30)])
        }
        assert len(outcomes) == 1, (ids, settings, outcomes)


def test_a_model_without_a_tokenizer_delivers_ids() -> None:
    output = OutputStream(None, StopRules(frozenset({9}), None, 100, 1), (), None)
    delta = output.push([5, 6, 9, 7], 0)
    assert (delta.num_delivered, delta.finish_reason, delta.stop) == (2, "stop", 9)
    assert delta.parts == [DeltaPart("answer", "", [5, 6], [0, 1])]
    assert (output.text, output.text_of(5)) == ("", "")


@pytest.mark.parametrize(("token", "text"), [(A, "a"), (0xF0, "\ufffd"), (IM_END, "<|im_end|>"), (5000, "")])
def test_one_token_for_display(token: int, text: str) -> None:
    assert stream().text_of(token) == text


def test_single_tokens_are_spelled_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(output_module, "token_text", lambda tokenizer, token: asked.append(token) or f"<{token}>")
    known = Spellings(tokenizer())
    rules = StopRules(frozenset(), None, 100, 1)
    first, second = (OutputStream(tokenizer(), rules, (), None, known) for _ in range(2))
    assert [stream.text_of(token) for stream in (first, second) for token in (5, 6)] == ["<5>", "<6>"] * 2
    assert asked == [5, 6]
