"""Templates that refuse a role, or are missing, never end a chat: the text is merged or a notice says what is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from cases.harness import Outcome, Runner
from fixtures.tiny import write_tiny
from fixtures.tokenizer import CHATML, CHATML_ALTERNATING, CHATML_NO_SYSTEM

OpenRunner = Callable[..., Runner]
TEMPLATES = {
    "plain": CHATML,
    "no-system": CHATML_NO_SYSTEM,
    "alternating": CHATML_ALTERNATING,
    "missing": None,
    "broken": "{{ messages[ }}",
}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one question": [message("user", "hello")],
    "system first": [message("system", "be brief"), message("user", "hello")],
    "two users in a row": [message("user", "hello"), message("user", "world")],
    "stopped answer": [message("user", "hello"), message("assistant", "wor"), message("user", "world")],
    "empty answer": [message("user", "hello"), message("assistant", ""), message("user", "world")],
    "answer first": [message("assistant", "hello"), message("user", "world")],
    "empty message": [message("user", "")],
    "tool message": [message("user", "hello"), message("assistant", "x"), message("tool", "42"), message("user", "so")],
    "two systems": [message("system", "be brief"), message("system", "be kind"), message("user", "hello")],
}


@pytest.fixture
def opened(request: Any, build_once: Callable[..., Any], runner: OpenRunner) -> Runner:
    pair = build_once(
        f"tiny-template-{request.param}", lambda folder: write_tiny(folder, chat_template=TEMPLATES[request.param])
    )
    return runner(pair.target, pair.drafter)


def ask(opened: Runner, messages: list[dict[str, str]], **options: Any) -> tuple[Outcome, str]:
    outcome = opened.watch([{"messages": messages, "max_tokens": 4, "ignore_eos": True, **options}])[0]
    tokenizer = AutoTokenizer.from_pretrained(opened.engine.spec.model_path)
    return outcome, tokenizer.decode(outcome.result["prompt_token_ids"])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("opened", [t for t in TEMPLATES if t != "broken"], indirect=True)
def test_every_conversation_gets_an_answer_and_loses_no_word(opened: Runner, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    outcome, prompt = ask(opened, messages)
    if conversation == "tool message" and outcome.result["error"] is not None:
        assert "'tool'" in outcome.result["error"], "a role that is not taken is refused by name"
        return
    assert outcome.result["error"] is None
    assert len(outcome.ids) == 4
    position = 0
    for content in (m["content"] for m in messages):
        # In order, except that system text may move into the first user message.
        position = prompt.find(content, position)
        assert position >= 0, f"{content!r} is not in the prompt {prompt!r}"


@pytest.mark.parametrize("opened", ["no-system"], indirect=True)
def test_refused_system_text_is_merged_and_the_user_is_told(opened: Runner) -> None:
    outcome, prompt = ask(opened, [message("user", "hello")], system="be brief")
    assert outcome.result["error"] is None
    assert "system" not in prompt
    assert prompt.index("be brief") < prompt.index("hello")
    assert any("system" in notice["message"].lower() for notice in outcome.of_kind("notice"))


@pytest.mark.parametrize("opened", ["alternating"], indirect=True)
def test_two_user_messages_become_one_where_roles_must_alternate(opened: Runner) -> None:
    outcome, prompt = ask(opened, CONVERSATIONS["two users in a row"])
    assert outcome.result["error"] is None
    assert prompt.count("<|im_start|>user") == 1
    assert prompt.index("hello") < prompt.index("world")


@pytest.mark.parametrize("opened", ["missing"], indirect=True)
def test_missing_template_is_said_and_a_fallback_used(opened: Runner) -> None:
    outcome, prompt = ask(opened, CONVERSATIONS["system first"])
    assert outcome.result["error"] is None
    assert opened.engine.info["chat_template"] == "fallback"
    told = [n["message"] for n in outcome.of_kind("notice")] + opened.engine.info["notices"]
    assert any("template" in text for text in told)
    assert "hello" in prompt


@pytest.mark.parametrize("opened", ["plain"], indirect=True)
def test_prompt_is_the_templates_own_rendering(opened: Runner) -> None:
    tokenizer = AutoTokenizer.from_pretrained(opened.engine.spec.model_path)
    for think in (None, True, False):
        messages = CONVERSATIONS["stopped answer"]
        options = {} if think is None else {"enable_thinking": think}
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
        outcome, _ = ask(opened, messages, think=think)
        assert outcome.result["prompt_token_ids"] == expected


@pytest.mark.parametrize("opened", ["broken"], indirect=True)
def test_broken_template_is_a_plain_error_or_a_fallback_with_notice(opened: Runner) -> None:
    outcome, _ = ask(opened, CONVERSATIONS["one question"])
    if outcome.result["error"] is not None:
        assert "template" in outcome.result["error"]
        assert "Traceback" not in outcome.result["error"]
    else:
        told = [n["message"] for n in outcome.of_kind("notice")] + opened.engine.info["notices"]
        assert any("template" in text for text in told)


@pytest.mark.parametrize("opened", ["plain"], indirect=True)
def test_raw_prompt_is_the_exact_text(opened: Runner) -> None:
    outcome = opened.watch([{"prompt": "  hello\n", "raw": True, "max_tokens": 1}])[0]
    tokenizer = AutoTokenizer.from_pretrained(opened.engine.spec.model_path)
    assert outcome.result["prompt_token_ids"] == tokenizer.encode("  hello\n", add_special_tokens=False)


@pytest.mark.parametrize("opened", ["plain"], indirect=True)
@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "king", "content": "x"}], ["x"]], ids=str)
def test_malformed_messages_are_a_plain_error(opened: Runner, messages: list[Any]) -> None:
    outcome = opened.watch([{"messages": messages, "max_tokens": 2}])[0]
    if outcome.result["error"] is None:
        # A role that the template renders is the template's business.
        assert messages[0]["role"] == "king"
    else:
        assert outcome.result["finish_reason"] == "error"
        assert "\n" not in outcome.result["error"]
