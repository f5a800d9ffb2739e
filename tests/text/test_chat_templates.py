"""Chats reach the model whatever its template refuses, and nobody sees a traceback."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fixtures.tokenizer import (
    CHATML,
    CHATML_ALTERNATING,
    CHATML_NO_SYSTEM,
    CHATML_OPEN_THINKING,
    TokenizerSpec,
    byte_alphabet,
    write_tokenizer,
)
from sparkchat.chat import RenderedPrompt, encode_text, render_prompt, template_kind
from sparkchat.errors import UsageError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
STRICT = CHATML_NO_SYSTEM.replace(CHATML, CHATML_ALTERNATING)
BROKEN = {
    "syntax error": "{% if %}",
    "always raises": "{{ raise_exception('no chat today') }}",
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ weather.tomorrow.rain }}",
    "wrong type": "{{ messages + 1 }}",
    "endless range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no end": "{% for i in range(9999) %}{% for j in range(9999) %}{{ '' }}{% endfor %}{% endfor %}",
    "no measure": "{{ 'x' * 10 ** 8 }}",
    "more than there is": "{{ 'x' * 10 ** 14 }}",
    "nothing": "{% if false %}x{% endif %}",
    "escape from the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Any]:
    def build(template: str | None) -> Any:
        return write_tokenizer(tmp_path_factory.mktemp("t"), TokenizerSpec(chat_template=template))

    return build


def bare(added: tuple[str, ...] = (), bos: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes only, no template; ``bos`` is put in front by the tokenizer itself."""
    backend = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, clean_up_tokenization_spaces=False)


def check(tokenizer: Any, prompt: RenderedPrompt) -> None:
    """The shown text is the text of the ids."""
    assert tokenizer.decode(prompt.token_ids, clean_up_tokenization_spaces=False) == prompt.text


def test_template_that_takes_everything_is_left_alone(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(CHATML)
    prompt = render_prompt(tokenizer, [USER, ANSWER, USER], system="be brief")
    chat = [{"role": "system", "content": "be brief"}, USER, ANSWER, USER]
    assert prompt.text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(prompt.token_ids) == list(ids)
    assert prompt.notices == () and prompt.template == "checkpoint" and not prompt.opens_thinking
    check(tokenizer, prompt)


def test_system_text_goes_into_the_first_user_message(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(CHATML_NO_SYSTEM)
    prompt = render_prompt(tokenizer, [USER], system="be brief")
    assert "<|im_start|>user\nbe brief\n\nhi<|im_end|>" in prompt.text and "system" not in prompt.text
    assert len(prompt.notices) == 1 and "system" in prompt.notices[0] and prompt.template == "checkpoint"
    check(tokenizer, prompt)
    assert render_prompt(tokenizer, [USER]).notices == ()


def test_template_that_silently_drops_the_system_text(make: Callable[[str | None], Any]) -> None:
    template = "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
    prompt = render_prompt(make(template), [USER], system="be brief")
    assert prompt.text == "[be brief\n\nhi]" and prompt.notices


def test_two_messages_of_one_role_are_joined(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(CHATML_ALTERNATING)
    prompt = render_prompt(tokenizer, [USER, ANSWER, USER, {"role": "user", "content": "still there?"}])
    assert "user\nhi\n\nstill there?<|im_end|>" in prompt.text
    assert len(prompt.notices) == 1 and "alternate" in prompt.notices[0]
    check(tokenizer, prompt)


def test_both_refusals_at_once(make: Callable[[str | None], Any]) -> None:
    prompt = render_prompt(make(STRICT), [USER, USER], system="be brief")
    assert prompt.text.startswith("<|im_start|>user\nbe brief\n\nhi\n\nhi<|im_end|>") and len(prompt.notices) == 2


def test_chat_that_begins_with_an_answer(make: Callable[[str | None], Any]) -> None:
    prompt = render_prompt(make(STRICT), [ANSWER, USER])
    assert prompt.text.startswith("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nhello") and prompt.notices


def test_no_chat_is_ever_stuck(make: Callable[[str | None], Any]) -> None:
    """Every order of roles and every template gives a prompt that holds every text."""
    roles = ("system", "user", "assistant")
    templates = [CHATML, CHATML_NO_SYSTEM, CHATML_ALTERNATING, STRICT, None, "{{ raise_exception('never') }}"]
    tokenizers = [make(template) for template in templates]
    for length in (1, 2, 3, 4):
        for order in itertools.product(roles, repeat=length):
            chat = [{"role": role, "content": f"text{n}"} for n, role in enumerate(order)]
            for tokenizer in tokenizers:
                if set(order) == {"system"}:
                    with pytest.raises(UsageError):
                        render_prompt(tokenizer, chat)
                    continue
                prompt = render_prompt(tokenizer, chat)
                assert all(message["content"] in prompt.text for message in chat), (order, prompt.text)


def test_empty_message_and_empty_system_text(make: Callable[[str | None], Any]) -> None:
    prompt = render_prompt(make(CHATML), [{"role": "user", "content": ""}])
    assert "<|im_start|>user\n<|im_end|>" in prompt.text
    # An empty system text counts: it replaces the one a template would add.
    built_in = "{% if messages[0].role != 'system' %}I am SmolLM.{% endif %}" + CHATML
    assert "SmolLM" in render_prompt(make(built_in), [USER]).text
    assert "SmolLM" not in render_prompt(make(built_in), [USER], system="").text


@pytest.mark.parametrize("name", BROKEN)
def test_broken_template_falls_back_with_a_notice(
    make: Callable[[str | None], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.bounded_render.SECONDS", 0.3)
    prompt = render_prompt(make(BROKEN[name]), [USER], system="be brief")
    assert prompt.template == "fallback" and "ChatML" in prompt.notices[0] and "template fails" in prompt.notices[0]
    assert prompt.text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(prompt.notices[0].splitlines()) == 1


def test_missing_template_uses_what_the_vocabulary_suggests(make: Callable[[str | None], Any]) -> None:
    chat = [USER, ANSWER, {"role": "user", "content": "bye"}]
    chatml = render_prompt(make(None), chat, system="s")
    assert chatml.template == "fallback" and "ChatML" in chatml.notices[0]
    assert chatml.text == make(CHATML).apply_chat_template(
        [{"role": "system", "content": "s"}, *chat], tokenize=False, add_generation_prompt=True
    )
    plain = render_prompt(bare(), chat, system="s")
    assert plain.text == "s\n\nUser: hi\nAssistant: hello\nUser: bye\nAssistant:" and "User:" in plain.notices[0]
    with_start = render_prompt(bare(("<s>",), "<s>"), [USER])
    assert with_start.text == "<s>User: hi\nAssistant:" and with_start.token_ids.count(256) == 1


def test_deepseek_layout_has_a_thinking_switch() -> None:
    marks = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
    tokenizer = bare(marks, marks[0])
    tokenizer.eos_token = marks[1]
    off = render_prompt(tokenizer, [USER, ANSWER, USER], system="s")
    start, end, user, answer = marks[:4]
    assert off.text == f"{start}s{user}hi{answer}</think>hello{end}{user}hi{answer}</think>" and not off.opens_thinking
    on = render_prompt(tokenizer, [USER], think=True)
    assert on.text == f"{start}{user}hi{answer}<think>" and on.opens_thinking and on.token_ids.count(256) == 1


def test_template_given_by_the_profile_wins(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(CHATML)
    prompt = render_prompt(tokenizer, [USER], chat_template="<{{ messages[0].content }}>")
    assert prompt.text == "<hi>" and prompt.template == "profile"
    assert template_kind(tokenizer) == "checkpoint" and template_kind(tokenizer, "x") == "profile"
    assert template_kind(bare()) == "fallback" and template_kind(None) == "none"


def test_named_templates_use_the_default_one(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(None)
    tokenizer.chat_template = {"default": "D{{ messages[0].content }}", "tool_use": "T"}
    assert render_prompt(tokenizer, [USER]).text == "Dhi"


def test_thinking_switch(make: Callable[[str | None], Any]) -> None:
    tokenizer = make(CHATML)
    assert render_prompt(tokenizer, [USER], think=False).text.endswith("<think>\n\n</think>\n\n")
    assert render_prompt(tokenizer, [USER], think=True).text.endswith("assistant\n")
    deepseek = make(CHATML + "{% if thinking %}<think>{% endif %}")
    assert render_prompt(deepseek, [USER], think=True).opens_thinking
    assert not render_prompt(deepseek, [USER], think=False).opens_thinking


@pytest.mark.parametrize("mention", ["", "{# enable_thinking #}", "{{ messages[0].thinking }}", "enable_thinking"])
def test_think_is_refused_where_the_template_has_none(make: Callable[[str | None], Any], mention: str) -> None:
    """A comment, an attribute or plain text that spells the name is no switch."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + mention
    with pytest.raises(UsageError, match="--think"):
        render_prompt(make(template), [USER], think=True)
    assert "hi" in render_prompt(make(template), [USER], think=False).text


def test_no_think_is_refused_where_the_template_always_thinks(make: Callable[[str | None], Any]) -> None:
    always = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}\n<think>\n{% endif %}"
    with pytest.raises(UsageError, match="--no-think"):
        render_prompt(make(always), [USER], think=False)
    assert render_prompt(make(always), [USER], think=True).opens_thinking
    assert render_prompt(make(CHATML_OPEN_THINKING), [USER]).opens_thinking


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "tool", "content": "42"}, "'tool'"),
        ({"role": "wizard", "content": "x"}, "'wizard'"),
        ({"content": "x"}, "None"),
        ({"role": "user"}, "no text"),
        ({"role": "user", "content": None}, "no text"),
        ({"role": "user", "content": [{"type": "image"}]}, "no text"),
    ],
)
def test_messages_that_are_refused_in_words(make: Callable[[str | None], Any], message: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        render_prompt(make(CHATML), [USER, message])
    assert "message 2" in str(caught.value)


def test_nothing_to_answer_and_no_tokenizer(make: Callable[[str | None], Any]) -> None:
    for chat, system in (([], None), ([], "s"), ([{"role": "system", "content": "s"}], None)):
        with pytest.raises(UsageError, match="no message"):
            render_prompt(make(CHATML), chat, system=system)
    with pytest.raises(UsageError, match="--prompt-ids"):
        render_prompt(None, [USER])
    with pytest.raises(UsageError, match="--prompt-ids"):
        encode_text(None, "x")


def test_both_system_texts_are_kept(make: Callable[[str | None], Any]) -> None:
    prompt = render_prompt(make(CHATML), [{"role": "developer", "content": "two"}, USER], system="one")
    assert prompt.text.startswith("<|im_start|>system\none\n\ntwo<|im_end|>")


def test_hostile_characters(make: Callable[[str | None], Any]) -> None:
    for text in (
        "\x00\x1b[31m",
        "\udce4bad",
        "\U0001f468\u200d\U0001f469",
        "{{ 7 * 7 }}{% raw %}",
        "\u202eabc",
        "a" * 50_000,
    ):
        prompt = render_prompt(make(CHATML), [{"role": "user", "content": text}], system=text)
        shown = text.replace("\udce4", "\ufffd\ufffd\ufffd")
        assert f"user\n{shown}<|im_end|>" in prompt.text and "49" not in prompt.text


def test_exact_text() -> None:
    tokenizer = bare(("<s>",), "<s>")
    assert encode_text(tokenizer, "ab") == (256, 97, 98) == encode_text(tokenizer, "<s>ab")
    assert encode_text(bare(), "ab\udce4") == (97, 98, *"\ufffd\ufffd\ufffd".encode())
    assert encode_text(bare(), "") == ()


def test_without_a_generation_prompt(make: Callable[[str | None], Any]) -> None:
    prompt = render_prompt(make(CHATML_OPEN_THINKING), [USER], add_generation_prompt=False)
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n" and not prompt.opens_thinking


def test_template_from_a_file_of_its_own(tmp_path: Path) -> None:
    from sparkchat.chat import load_tokenizer

    write_tokenizer(tmp_path, TokenizerSpec(chat_template=None))
    (tmp_path / "chat_template.jinja").write_text("J{{ messages[0].content }}")
    assert render_prompt(load_tokenizer(tmp_path).tokenizer, [USER]).text == "Jhi"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "K{{ messages[0].content }}"}')
    assert render_prompt(load_tokenizer(tmp_path).tokenizer, [USER]).text == "Khi"
