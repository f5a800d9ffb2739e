"""What well-behaved clients get: the official client, curl, and streams read by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serve.conftest import HELLO, SCRIPT, TAPE, THINKING
from serve.served import Served, events, recorded

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def openai_client(server: Served) -> Any:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_chats(openai_client: Any, server: Served) -> None:
    (model,) = openai_client.models.list().data
    answer = openai_client.chat.completions.create(model=model.id, **ASK, max_completion_tokens=50)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", HELLO, "stop")
    assert answer.usage.completion_tokens == len(SCRIPT)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(SCRIPT)


def test_the_official_client_streams(openai_client: Any) -> None:
    model = openai_client.models.list().data[0].id
    chunks = list(
        openai_client.chat.completions.create(model=model, **ASK, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == HELLO
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == len(SCRIPT)


def test_the_official_client_completes_text_with_log_probabilities(openai_client: Any) -> None:
    model = openai_client.models.list().data[0].id
    answer = openai_client.completions.create(model=model, prompt="go", max_tokens=3, logprobs=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello wö", "length")
    assert choice.logprobs.tokens == ["Hello", " w\ufffd", "\ufffd"]
    assert choice.logprobs.text_offset == [0, 5, 8]
    assert choice.logprobs.token_logprobs == pytest.approx([0.0] * 3, abs=1e-3)
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_the_official_client_understands_a_refusal(openai_client: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="not served here"):
        openai_client.chat.completions.create(model="gpt-9", **ASK)
    model = openai_client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        openai_client.chat.completions.create(model=model, **ASK, temperature=-1)
    assert caught.value.param == "temperature"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_sees_events_as_they_are_written(server: Served) -> None:
    body = json.dumps({**ASK, "stream": True})
    command = ["curl", "-sN", f"{server.url}{CHAT}", "-H", "Content-Type: application/json", "-d", body]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    found = list(events(raw))
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in found[:-1]) == HELLO


def test_streamed_text_joined_is_the_whole_text(server: Served) -> None:
    for path, ask in ((CHAT, ASK), (TEXT, {"prompt": "hello", "max_tokens": 30})):
        *chunks, last = server.stream(path, ask)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(c["text"] if path == TEXT else c["delta"].get("content", "") for c in choices)
        assert text == HELLO
        assert last == "[DONE]"
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        assert choices[-1]["finish_reason"] == "stop"
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("asked", [None, False, True])
def test_usage_is_one_last_chunk_and_only_when_asked(server: Served, asked: bool | None) -> None:
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    *chunks, _ = server.stream(CHAT, {**ASK, **options})
    empty = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(empty) == (1 if asked else 0)
    if asked:
        assert chunks[-1] is empty[0]
        assert chunks[-1]["usage"]["completion_tokens"] == len(SCRIPT)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_every_chunk_counts_up(server: Served) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _ = server.stream(TEXT, {"prompt": "hello", "max_tokens": 30, **options})
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert counted[-1] == len(SCRIPT)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}


def test_what_a_client_got_is_what_the_trace_says(server: Served, trace_file: Path) -> None:
    answer = server.text(prompt="hello", max_tokens=200, ignore_eos=True, return_token_ids=True)
    ((turn, *steps, end),) = recorded(trace_file, answer["id"]).values()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["text"]) == (end["token_ids"], end["text"])
    assert choice["prompt_token_ids"] == turn["prompt_token_ids"]
    figures, said = end["speculation"], answer["usage"]["speculative_decoding"]
    assert said == answer["metrics"]["speculative_decoding"]
    tested = [step for step in steps if step["verify_len"]]
    assert said["num_spec_steps"] == len(tested) > 0
    assert said["num_draft_tokens"] == figures["num_verified_draft_tokens"]
    assert said["num_accepted_draft_tokens"] == figures["num_accepted_draft_tokens"] > 0
    assert sum(said["acceptance_histogram"]) == len(tested)
    assert said["mean_acceptance_length"] == pytest.approx(1 + said["num_accepted_draft_tokens"] / len(tested))
    assert said["num_spec_tokens"] == 5


def test_streamed_ids_are_all_ids(server: Served) -> None:
    for path, ask in ((CHAT, ASK), (TEXT, {"prompt": "hello", "max_tokens": 30})):
        *chunks, _ = server.stream(path, {**ask, "return_token_ids": True})
        ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())]
        assert ids == list(TAPE.ids[0])
        prompts = [c.get("prompt_token_ids") or c["choices"][0].get("prompt_token_ids") for c in chunks]
        assert sum(prompt is not None for prompt in prompts) == 1


def test_log_probabilities_of_a_chat(server: Served) -> None:
    ask = {**ASK, "logprobs": True, "top_logprobs": 3}
    whole = server.chat(**ask)["choices"][0]["logprobs"]["content"]
    *chunks, _ = server.stream(CHAT, ask)
    streamed = [r for c in chunks for r in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(whole) == len(SCRIPT)
    assert [record["token"] for record in streamed] == [record["token"] for record in whole]
    assert b"".join(bytes(record["bytes"]) for record in whole).decode() == HELLO
    assert all(len(record["top_logprobs"]) == 3 for record in whole)
    assert all(record["logprob"] == pytest.approx(0.0, abs=1e-3) for record in whole)


def test_a_stop_string_ends_the_text_before_it(server: Served) -> None:
    answer = server.chat(stop=["two", "never"])
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello wörld, one ", "stop")
    assert choice["stop_reason"] == "two"


def test_several_answers_and_several_prompts(server: Served) -> None:
    answer = server.text(prompt=["a", "b\x01"], n=2, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["Hello wörld"] * 2 + [" so this is"] * 2
    assert answer["usage"]["prompt_tokens"] == 1 + 2
    assert answer["usage"]["completion_tokens"] == 16
    *chunks, _ = server.stream(TEXT, {"prompt": [[104], [104, 1]], "max_tokens": 4})
    by_choice = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == k) for k in (0, 1)]
    assert by_choice == ["Hello wörld", " so this is"]


def test_thinking_has_a_place_of_its_own(server: Served) -> None:
    # The whole text of a completion is what was said; its thinking counts as such in the usage.
    said = server.text(prompt="\x01", max_tokens=50)
    thought = b"".join(piece for piece in THINKING if isinstance(piece, bytes)).decode()
    assert said["choices"][0]["text"] == thought
    assert said["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_a_seed_repeats_an_answer(server: Served) -> None:
    ask = {"prompt": "x", "max_tokens": 12, "temperature": 5.0, "return_token_ids": True}

    def ids(**more: Any) -> list[list[int]]:
        return [choice["token_ids"] for choice in server.text(**ask, **more)["choices"]]

    (one,) = ids(seed=11)
    assert ids(seed=11) == [one]
    first, second = ids(seed=11, n=2)
    assert first == one
    assert [second] == ids(seed=12)


def test_a_mode_and_a_session_can_be_chosen(server: Served) -> None:
    assert server.text(mode="off", max_tokens=9)["usage"]["speculative_decoding"]["num_spec_steps"] == 0
    assert server.text(mode="static", max_tokens=9)["usage"]["speculative_decoding"]["num_spec_steps"] > 0
    long = "the same beginning of some length"
    server.text(prompt=long, session="s", max_tokens=2)
    again = server.text(prompt=long + " and more", session="s", max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 20


def test_a_chat_that_goes_on_computes_its_beginning_once(server: Served) -> None:
    asked = [{"role": "user", "content": "what the first turn of this chat asks"}]
    first = server.chat(messages=asked)
    answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = server.chat(messages=[*asked, answer, {"role": "user", "content": "and then"}])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    # Once continued, the old session is the new turn's: a branch from the same place begins afresh.
    branch = server.chat(messages=[*asked, answer, {"role": "user", "content": "or else"}])
    assert branch["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert branch["choices"] == second["choices"]
    other = server.chat(messages=[*asked, {"role": "assistant", "content": "no"}, {"role": "user", "content": "then"}])
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_connection_is_used_again(server: Served) -> None:
    connection = server.connection()
    for _ in range(2):
        connection.request("POST", CHAT, json.dumps(ASK), {"content-type": "application/json; charset=utf-8"})
        response = connection.getresponse()
        assert json.loads(response.read())["choices"][0]["message"]["content"] == HELLO
    connection.close()


def test_parts_of_a_message_are_joined(server: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = server.chat(messages=[{"role": "user", "content": parts}], return_token_ids=True)
    whole = server.chat(messages=ASK["messages"], return_token_ids=True)
    assert joined["prompt_token_ids"] == whole["prompt_token_ids"]


def test_an_answer_can_be_sent_back_as_it_came(server: Served) -> None:
    message = server.chat()["choices"][0]["message"]
    again = server.chat(messages=[*ASK["messages"], message, {"role": "user", "content": "more"}])
    assert again["choices"][0]["message"]["content"] == HELLO
