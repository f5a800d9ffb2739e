"""Thinking and answer by token id: tags are structure only where the tokenizer added them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fixtures.tokenizer import CHATML, CHATML_OPEN_THINKING, END_THINK, THINK, TokenizerSpec, write_tokenizer
from sparkchat.chat import ThinkingSplitter, find_thinking_tags, prompt_opens_thinking, render_prompt
from sparkchat.detokenize import Detokenizer

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=[False, True], ids=["plain added tags", "special tags"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = TokenizerSpec(words=("hello",), think_is_special=request.param)
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), spec)


def split(tokenizer: Any, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> tuple[str, str, list[tuple[str, str]]]:
    """(thinking, answer, stream), the way the engine puts splitter and detokenizer together."""
    splitter = ThinkingSplitter(tokenizer, prompt_ids)
    channel, text, stream = splitter.channel, Detokenizer(tokenizer), []
    for token_id in ids:
        now, is_tag = splitter.push(token_id)
        if now != channel:
            stream.append((channel, text.flush()))
            channel, text = now, Detokenizer(tokenizer)
        stream.append((channel, "" if is_tag else text.push(token_id)))
    stream.append((channel, text.flush()))
    joined = {name: "".join(piece for at, piece in stream if at == name) for name in ("thinking", "answer")}
    return joined["thinking"], joined["answer"], stream


def spelled(text: str) -> list[int]:
    return list(text.encode())


def test_tag_pieces_spelled_in_ordinary_tokens_are_text(tokenizer: Any) -> None:
    explained = "`</think>` closes.\n```\n<think>x</think>\n```"
    thinking, answer, _ = split(tokenizer, [THINK, *spelled(explained), END_THINK, *spelled(explained)])
    assert thinking == explained and answer == explained


def test_template_that_opens_the_block(tokenizer: Any) -> None:
    prompt = render_prompt(tokenizer, CHAT, chat_template=CHATML_OPEN_THINKING)
    assert prompt.opens_thinking
    thinking, answer, _ = split(tokenizer, [*spelled("why"), END_THINK, *spelled("so")], prompt.token_ids)
    assert (thinking, answer) == ("why", "so")
    cut = split(tokenizer, spelled("why and"), prompt.token_ids)
    assert cut[:2] == ("why and", "")


def test_opener_without_a_close_is_all_thinking(tokenizer: Any) -> None:
    assert split(tokenizer, [THINK, *spelled("cut of")])[:2] == ("cut of", "")


def test_close_without_an_opener_is_dropped(tokenizer: Any) -> None:
    assert split(tokenizer, [*spelled("a"), END_THINK, *spelled("b")])[:2] == ("", "ab")


def test_empty_block_has_no_text(tokenizer: Any) -> None:
    assert split(tokenizer, [THINK, END_THINK, *spelled("b")])[:2] == ("", "b")


def test_prose_that_starts_with_an_opener_stays_an_answer(tokenizer: Any) -> None:
    prompt = render_prompt(tokenizer, CHAT, think=False)
    assert not prompt.opens_thinking
    text = "<think> is a tag"
    assert split(tokenizer, spelled(text), prompt.token_ids)[:2] == ("", text)


def test_character_cut_by_a_tag_ends_in_its_own_channel(tokenizer: Any) -> None:
    thinking, answer, stream = split(tokenizer, [THINK, 0xE6, 0x97, END_THINK, 0xA5, ord("x")])
    assert thinking == "\ufffd" and answer == "\ufffdx"
    assert [at for at, piece in stream if piece] == ["thinking", "answer", "answer"]


def test_second_block(tokenizer: Any) -> None:
    ids = [THINK, ord("a"), END_THINK, ord("b"), THINK, ord("c"), END_THINK, ord("d")]
    assert split(tokenizer, ids)[:2] == ("ac", "bd")


def test_tag_typed_by_the_user_does_not_open_thinking(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "what does <think> do"}]
    for template in (CHATML, "{{ messages[0]['content'] }}{% if add_generation_prompt %} -> {% endif %}"):
        prompt = render_prompt(tokenizer, chat, chat_template=template)
        assert THINK in prompt.token_ids and not prompt.opens_thinking
    prompt = render_prompt(tokenizer, chat, chat_template=CHATML_OPEN_THINKING)
    assert prompt.opens_thinking


def test_splitter_is_told_where_it_starts(tokenizer: Any) -> None:
    assert ThinkingSplitter(tokenizer, starts_open=True).channel == "thinking"
    assert ThinkingSplitter(tokenizer, [THINK], starts_open=False).channel == "answer"
    assert ThinkingSplitter(tokenizer, [THINK, 10]).channel == "thinking"
    assert not prompt_opens_thinking(tokenizer, [THINK, END_THINK])


def test_model_without_thinking_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"<think>": 0, "a": 1}, merges=[])))
    assert find_thinking_tags(plain) is None
    splitter = ThinkingSplitter(plain, [0], starts_open=True)
    assert splitter.push(0) == ("answer", False)
