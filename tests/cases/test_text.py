"""Text comes out byte for byte, whole characters only, and thinking goes where the tokenizer's tokens put it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cases.harness import Outcome, Runner, open_runner
from fixtures import bigram, tape
from fixtures.tokenizer import CHATML, CHATML_OPEN_THINKING, END_THINK, THINK

OpenRunner = Callable[..., Runner]
MOST_HELD_BACK = 8

TEXTS = {
    "family emoji": "a 👨‍👩‍👧‍👦 b",
    "flags": "🇮🇱🇯🇵x",
    "chinese": "你好，世界。",
    "hangul": "안녕하세요",
    "devanagari": "नमस्ते",
    "combining": "e\u0301o\u0308\u0323 שׁ",
    "replacement character": "a\ufffdb",
    "one space first": " x",
    "two spaces first": "  x",
    "tabs and line ends": "\ta\r\n\tb\r\n",
    "newlines": "\n\n\n\n",
    "right to left": "שלום abc 12",
    "keycap": "1\ufe0f\u20e3!",
    "markup": "[/] [bold red]x <div>&lt;",
}


def cut_everywhere(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[i : i + 1] for i in range(len(data)))


def open_tape(folder: Path, played: tape.Tape, kind: Any = "oracle", **options: Any) -> Runner:
    """Load a tape with its drafter: whole blocks at a time (oracle), or one token a step (anti)."""
    target = tape.write_tape(folder / "target", played, **options)
    drafter = bigram.write_bigram_drafter(folder / "drafter", played.table(), bigram.BigramDrafter(kind=kind))
    return open_runner(target, drafter)


def play(opened: Runner, count: int = 1, **options: Any) -> list[Outcome]:
    """Play the first scripts of the tape, all in one batch."""
    return opened.watch({"prompt_ids": [65, n], "mode": "static", "max_tokens": 400, **options} for n in range(count))


def check_stream(outcome: Outcome, data: bytes) -> None:
    """The stream adds up to the text, nothing was taken back, and finished characters were shown soon."""
    expected = data.decode("utf-8", "replace")
    assert outcome.result["text"] == outcome.streamed() == expected
    shown, num_tokens = "", 0
    lengths = piece_lengths(outcome, data)
    for delta in outcome.of_kind("delta"):
        shown += delta["text"]
        num_tokens += len(delta["token_ids"])
        assert expected.startswith(shown)
        due = data[: sum(lengths[: max(0, num_tokens - MOST_HELD_BACK)])].decode("utf-8", "ignore")
        assert len(shown) >= len(due), f"{due[len(shown) :]!r} is held back for more than {MOST_HELD_BACK} tokens"


def piece_lengths(outcome: Outcome, data: bytes) -> list[int]:
    """Bytes of each delivered token: one each where the text was cut everywhere, else not known before the end."""
    count = len(outcome.ids)
    return [1] * count if count == len(data) else [0] * (count - 1) + [len(data)]


@pytest.mark.parametrize("kind", ["oracle", "anti"])
def test_texts_cut_at_every_byte(kind: str, tmp_path: Path) -> None:
    texts = [text.encode() for text in TEXTS.values()]
    opened = open_tape(tmp_path, tape.Tape(tuple(map(cut_everywhere, texts))), kind)
    for outcome, data in zip(play(opened, len(texts)), texts, strict=True):
        assert len(outcome.ids) == len(data)
        check_stream(outcome, data)


def test_texts_cut_once_at_each_byte(tmp_path: Path) -> None:
    chosen = [TEXTS[n].encode() for n in ("family emoji", "devanagari", "replacement character", "two spaces first")]
    cuts = [(data[:at], data[at:]) for data in chosen for at in range(1, len(data))]
    opened = open_tape(tmp_path, tape.Tape(tuple(cuts)))
    for outcome, (before, after) in zip(play(opened, len(cuts)), cuts, strict=True):
        check_stream(outcome, before + after)


@pytest.mark.parametrize("kind", ["oracle", "anti"])
def test_three_hundred_newlines_in_a_cycle(kind: str, tmp_path: Path) -> None:
    opened = open_tape(tmp_path, tape.one_tape(b"\n", b"\n", b"\n", cycle=True), kind)
    outcome = play(opened, max_tokens=300)[0]
    assert outcome.result["text"] == outcome.streamed() == "\n" * 300


@pytest.mark.parametrize("kind", ["oracle", "anti"])
def test_lone_bytes_followed_by_a_space(kind: str, tmp_path: Path) -> None:
    played = tape.one_tape(*(piece for b in range(128, 254) for piece in (bytes([b]), b" ")))
    opened = open_tape(tmp_path, played, kind)
    outcome, tokenizer = play(opened)[0], AutoTokenizer.from_pretrained(tmp_path / "target")
    assert len(outcome.ids) == 252
    assert outcome.result["text"] == outcome.streamed() == tokenizer.decode(outcome.ids) == played.text()


def test_answer_cut_inside_a_character_shows_one_replacement_at_the_end(tmp_path: Path) -> None:
    data = "ok 👍🏽".encode()
    opened = open_tape(tmp_path, tape.one_tape(*cut_everywhere(data)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    for count in range(1, len(data) + 1):
        outcome = play(opened, max_tokens=count)[0]
        text = outcome.result["text"]
        assert text == outcome.streamed() == tokenizer.decode(outcome.ids)
        whole = data[:count].decode("utf-8", "ignore")
        assert text == (whole if len(whole.encode()) == count else whole + "\ufffd")


def test_ids_without_a_text_add_nothing(tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(tiny_pair.target, tiny_pair.drafter)
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    outcome = opened.watch(
        [{"prompt_ids": [1], "max_tokens": 6, "logit_bias": [[507, 1000.0]], "repetition_penalty": 1.0}]
    )[0]
    assert outcome.ids == [507] * 6
    assert outcome.result["text"] == outcome.streamed() == tokenizer.decode(outcome.ids)


def test_random_tokens_decode_as_a_whole(tiny_pair: Any, runner: OpenRunner) -> None:
    opened = runner(tiny_pair.target, tiny_pair.drafter)
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    options = {"mode": "static", "temperature": 5.0, "max_tokens": 150, "ignore_eos": True}
    no_tags = [[THINK, -1e4], [END_THINK, -1e4]]
    lines = [{"prompt_ids": [n], "seed": n, "logit_bias": no_tags, **options} for n in range(8)]
    for outcome in opened.watch(lines):
        whole = tokenizer.decode(outcome.ids, skip_special_tokens=True)
        assert outcome.result["text"] == outcome.streamed() == whole


CODE = "```\n<think> and </think> are tags\n```"
THINKING: dict[str, tuple[tuple[tape.Piece, ...], str, str]] = {
    # name: script, thinking, answer
    "opener in the answer": (("<think>", b"hm", b"m\n", "</think>", b"\nyes"), "hmm\n", "\nyes"),
    "empty block": (("<think>", "</think>", b"yes"), "", "yes"),
    "plain text that spells the tags": ((b"so <thi", b"nk>", b" or </think", b">."), "", "so <think> or </think>."),
    "tags in a code fence": (tuple(CODE[i : i + 5].encode() for i in range(0, len(CODE), 5)), "", CODE),
    "tag text inside the thinking": (
        ("<think>", b"a `</thi", b"nk>` tag", "</think>", b"done"),
        "a `</think>` tag",
        "done",
    ),
    "no closing": (("<think>", b"still ", b"thinking"), "still thinking", ""),
}


@pytest.mark.parametrize(("kind", "is_special"), [("oracle", False), ("anti", True)])
@pytest.mark.parametrize("name", THINKING)
def test_thinking_and_answer_are_told_apart(name: str, kind: str, is_special: bool, tmp_path: Path) -> None:
    script, thinking, answer = THINKING[name]
    played = tape.one_tape(*script)
    outcome = play(open_tape(tmp_path, played, kind, think_is_special=is_special))[0]
    check_channels(outcome, played.ids[0], thinking, answer)


def check_channels(outcome: Outcome, ids: Sequence[int], thinking: str, answer: str) -> None:
    """White space next to the tags may go to neither side; all else is verbatim."""
    assert outcome.ids == list(ids)
    assert outcome.result["text"].strip() == outcome.streamed().strip() == answer.strip()
    assert outcome.thinking.strip() == outcome.streamed("thinking").strip() == thinking.strip()
    assert [i for e in outcome.of_kind("delta") for i in e["token_ids"]] == outcome.ids


@pytest.mark.parametrize("kind", ["oracle", "anti"])
def test_template_that_opens_the_thinking_needs_no_opener_in_the_answer(kind: str, tmp_path: Path) -> None:
    played = tape.one_tape(b"let me", b" see", "</think>", b"\n\n", b"42")
    opened = open_tape(tmp_path, played, kind, chat_template=CHATML_OPEN_THINKING)
    line = {"messages": [{"role": "user", "content": "go"}], "mode": "static"}
    whole, cut = opened.watch([line, {**line, "max_tokens": 2}])
    check_channels(whole, played.ids[0], "let me see", "42")
    check_channels(cut, played.ids[0][:2], "let me see", "")
    assert cut.result["finish_reason"] == "length"


def test_thinking_switched_off_leaves_a_tag_in_prose_alone(tmp_path: Path) -> None:
    played = tape.one_tape(b"<think", b"> is a ", b"tag")
    opened = open_tape(tmp_path, played, chat_template=CHATML)
    line = {"messages": [{"role": "user", "content": "go"}], "think": False, "mode": "static"}
    outcome = opened.watch([line])[0]
    check_channels(outcome, played.ids[0], "", "<think> is a tag")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "target").decode(outcome.result["prompt_token_ids"])
    assert prompt.endswith("<think>\n\n</think>\n\n")
