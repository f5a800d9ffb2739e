"""DeepSeek V4's prompt: byte for byte what the publisher's encoder writes, and its token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fixtures.tokenizer import byte_alphabet
from sparkchat.chat import render_prompt
from sparkchat.deepseek_prompt import ASSISTANT, BOS, EFFORTS, END_THINK, EOS, THINK, USER, write_chat
from sparkchat.engine.text_model import TextModel
from sparkchat.errors import UsageError
from sparkchat.params import GenerateRequest, LoadSpec

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "deepseek_v4_prompts.json").read_text(encoding="utf-8"))
SPECIAL_IDS = {BOS: 0, EOS: 1, USER: 128803, ASSISTANT: 128804, THINK: 128821, END_THINK: 128822}
NEWER_MAX_SHA256 = "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_the_text_is_what_the_publishers_encoder_writes(case: dict[str, Any]) -> None:
    text = write_chat(
        case["messages"],
        think=case["think"],
        effort=case.get("effort"),
        release=GOLDEN["release"],
        keep_thinking=case.get("keep_thinking", False),
        add_generation_prompt=case["messages"][-1]["role"] == "user",
    )
    assert text == case["text"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_markers_have_the_ids_of_the_published_vocabulary(case: dict[str, Any]) -> None:
    for marker, token_id in SPECIAL_IDS.items():
        assert case["token_ids"].count(token_id) == case["text"].count(marker), marker
    assert case["token_ids"][0] == 0


def test_effort_levels_of_the_newer_release_are_one_step_lower() -> None:
    def newer(effort: str | None) -> str:
        return write_chat(HELLO, think=True, effort=effort, release="0731")

    assert newer("high") == write_chat(HELLO, think=True, effort="max", release="preview")
    assert newer("low") == newer(None) == f"{BOS}{USER}Hello{ASSISTANT}{THINK}"
    assert newer("max").startswith(f"{BOS}Reasoning Effort: Beyond maximum — exhaustive")
    assert newer("max").endswith(f"\n\n{USER}Hello{ASSISTANT}{THINK}")
    assert all(not text or text.endswith("\n\n") for texts in EFFORTS.values() for text in texts.values())
    # No encoder of that release is at hand here; its text was compared with copies of it in other engines.
    assert hashlib.sha256(EFFORTS["0731"]["max"].encode()).hexdigest() == NEWER_MAX_SHA256


def test_a_level_that_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'low'.*give one of high, max"):
        write_chat(HELLO, think=True, effort="low", release="preview")
    with pytest.raises(UsageError, match="needs thinking"):
        write_chat(HELLO, think=False, effort="high")


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases"] if "effort" in c], ids=lambda case: case["name"])
def test_a_request_for_a_level_gets_the_publishers_text(case: dict[str, Any], tmp_path: Path) -> None:
    v4_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4", "eos_token_id": 1}')
    text = TextModel.load(LoadSpec("v4", str(tmp_path), prompt_release=GOLDEN["release"]))
    messages = tuple(case["messages"])
    # A level asks for thinking, unless that is refused.
    for think in (None, True):
        prompt = text.prompt_of(GenerateRequest("a", messages=messages, think=think, reasoning_effort=case["effort"]))
        if messages[-1]["role"] == "user":
            assert text.tokenizer.decode(prompt.token_ids) == case["text"]  # type: ignore[union-attr]
        assert prompt.opens_thinking
    with pytest.raises(UsageError, match="needs thinking"):
        text.prompt_of(GenerateRequest("a", prompt="Hi", think=False, reasoning_effort=case["effort"]))


@pytest.mark.parametrize(
    "encoder, known", [(None, None), ("max = ABSOLUTE", "preview"), (EFFORTS["0731"]["max"], "0731")]
)
def test_the_release_is_found_in_the_encoder_beside_the_weights(
    encoder: str | None, known: str | None, tmp_path: Path
) -> None:
    v4_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4", "eos_token_id": 1}')
    if encoder is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(f"raise SystemExit\n{encoder}", encoding="utf-8")
    text = TextModel.load(LoadSpec("v4", str(tmp_path)))
    assert text.prompt_release == known
    asked = GenerateRequest("a", prompt="Hi", reasoning_effort="low")
    if known == "0731":
        assert text.prompt_of(asked).opens_thinking
    else:
        wanted = "give one of high, max" if known else "does not say which release"
        with pytest.raises(UsageError, match=wanted):
            text.prompt_of(asked)


def test_templates_that_ask_for_a_level_get_it_and_others_refuse() -> None:
    levels = render_prompt(
        v4_tokenizer("{{ messages[0]['content'] }} ({{ reasoning_effort }})"), HELLO, reasoning_effort="medium"
    )
    assert levels.text == "Hello (medium)"
    for template in ("{{ messages[0]['content'] }}", "{{ broken", None):
        with pytest.raises(UsageError, match=r"reasoning effort medium was asked for, but .* has no levels"):
            render_prompt(v4_tokenizer(template), HELLO, reasoning_effort="medium")


def test_an_answer_can_be_asked_for_after_any_turn() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "Hi."}]
    assert write_chat(chat, think=True) == f"{BOS}{USER}Hello{ASSISTANT}{THINK}{END_THINK}Hi.{EOS}{ASSISTANT}{THINK}"
    assert write_chat([{"role": "system", "content": "Speak."}], think=False) == f"{BOS}Speak.{ASSISTANT}{END_THINK}"


def test_messages_are_left_as_they_were() -> None:
    chat = [*HELLO, {"role": "user", "content": "Again"}]
    write_chat(chat, think=False)
    assert chat == [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Again"}]


ADDED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)


def v4_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes, and the markers of the published vocabulary in the order of ``ADDED``."""
    backend = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("think", [None, False, True])
def test_a_checkpoint_without_template_gets_the_prompt_of_its_architecture(think: bool | None) -> None:
    prompt = render_prompt(v4_tokenizer(), HELLO, system="Be brief.", think=think, model_type="deepseek_v4")
    tag = THINK if think else END_THINK
    assert prompt.text == f"{BOS}Be brief.{USER}Hello{ASSISTANT}{tag}"
    assert prompt.token_ids[0] == 256 and prompt.token_ids[-1] == 256 + ADDED.index(tag)
    assert (prompt.template, prompt.notices, prompt.opens_thinking) == ("checkpoint", (), bool(think))


def test_a_template_of_the_checkpoint_or_the_profile_wins() -> None:
    template = "{{ messages[0]['content'] }}!"
    own = render_prompt(v4_tokenizer(template), HELLO, model_type="deepseek_v4")
    given = render_prompt(v4_tokenizer(), HELLO, chat_template=template, model_type="deepseek_v4")
    assert (own.text, own.template) == ("Hello!", "checkpoint")
    assert (given.text, given.template) == ("Hello!", "profile")
    assert render_prompt(v4_tokenizer(), HELLO, model_type="llama").template == "fallback"


def test_the_engine_finds_the_architecture_in_the_folder(tmp_path: Path) -> None:
    v4_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4", "eos_token_id": 1}')
    text = TextModel.load(LoadSpec(name="v4", model_path=str(tmp_path)))
    assert text.template_source == "checkpoint"
    prompt = text.prompt_of(GenerateRequest(id="a", prompt="Hello", think=True))
    assert prompt.opens_thinking
    assert text.splitter(prompt).channel == "thinking"  # type: ignore[union-attr]
