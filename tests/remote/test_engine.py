"""Answers of every engine as our events: the same text, its figures under our names, null where it says nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from remote.conftest import ask, until
from remote.engines import (
    LLAMA_CPP,
    LLAMA_CPP_PYTHON,
    SGLANG,
    SGLANG_GAUGES,
    VLLM,
    VLLM_CHUNKS,
    VLLM_OLD,
    VLLM_PLAIN,
    vllm_page,
)
from remote.played import CHAT, DONE, TEXT, Part, Played, chunk
from sparkchat.errors import UsageError
from sparkchat.params import SamplingParams
from sparkchat.remote import engine as engine_module
from sparkchat.remote.connection import Server
from sparkchat.remote.engine import RemoteEngine

Play = Callable[[Part], Played]
Connect = Callable[..., RemoteEngine]


def answered(play: Play, connect: Connect, part: Part, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(INFO, events of one answer)."""
    engine = connect(play(part))
    info = until(engine, "ready", "error")[-1]["info"]
    engine.generate(ask(**fields))
    return info, until(engine, "end")


@pytest.mark.parametrize(
    "part",
    [VLLM, VLLM_OLD, VLLM_PLAIN, SGLANG, SGLANG_GAUGES, LLAMA_CPP, LLAMA_CPP_PYTHON],
    ids=["vllm", "vllm-old", "vllm-plain", "sglang", "sglang-gauges", "llama.cpp", "llama-cpp-python"],
)
def test_every_engine_gives_the_same_transcript(play: Play, connect: Connect, part: Part) -> None:
    _, events = answered(play, connect, part)
    assert next(e["event"] for e in events if e["event"] != "figures") == "start"
    said = "".join(e["text"] for e in events if e["event"] == "delta" and e["channel"] == "answer")
    result = events[-1]["result"]
    assert said == result["text"] == "Hello world!"
    assert (result["model"], result["mode"], result["error"]) == ("the-model", "server", None)
    assert [e["event"] for e in events].count("end") == 1
    json.dumps(events, allow_nan=False)


def test_vllm_s_record_of_the_answer(play: Play, connect: Connect) -> None:
    info, events = answered(play, connect, VLLM)
    result = events[-1]["result"]
    assert (info["engine"], info["context"]) == ("vLLM", 4096)
    assert result["token_ids"] == [10, 11, 12, 13, 2]
    assert result["prompt_token_ids"] == events[0]["prompt_token_ids"] == [1, 2, 3]
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}
    found = result["speculation"]
    assert (found["num_steps"], found["num_verified_draft_tokens"], found["num_accepted_draft_tokens"]) == (2, 6, 3)
    assert (found["mean_acceptance_length"], found["acceptance_histogram"]) == (2.5, [0, 1, 1, 0])
    assert found["num_proposed_draft_tokens"] is None  # vLLM does not say
    assert result["finish_reason"] == "stop"


def test_vllm_s_counters_where_it_keeps_no_record(play: Play, connect: Connect) -> None:
    _, events = answered(play, connect, VLLM_OLD)
    found = events[-1]["result"]["speculation"]
    assert (found["num_steps"], found["num_verified_draft_tokens"], found["num_accepted_draft_tokens"]) == (4, 12, 6)
    assert found["mean_acceptance_length"] == 2.5
    assert found["acceptance_histogram"] is None


def test_a_server_that_does_not_speculate_is_said_to(play: Play, connect: Connect) -> None:
    info, events = answered(play, connect, VLLM_PLAIN)
    assert "no speculation" in info["mode_fixed"]
    found = events[-1]["result"]["speculation"]
    assert found["reason_off"] == "the server reports none"
    assert found["num_steps"] is found["mean_acceptance_length"] is None


def test_counters_are_looked_at_while_an_answer_runs(
    play: Play, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_SECONDS", 0.02)
    hold = threading.Event()
    pages = (vllm_page(0, 0, 0), vllm_page(0, 0, 0), vllm_page(2, 6, 4))
    engine = connect(play(replace(VLLM_OLD, metrics=pages, hold=hold)))
    until(engine, "ready")
    engine.generate(ask())
    live: dict[str, Any] = {}
    while live.get("num_steps") is None:
        live = until(engine, "figures")[-1]
    assert (live["num_steps"], live["num_verified"], live["num_accepted"]) == (2, 6, 4)
    assert (live["mean_acceptance_length"], live["source"]) == (3.0, "the server's counters")
    hold.set()
    assert until(engine, "end")[-1]["result"]["finish_reason"] == "stop"


def test_sglang_s_details_and_late_ids(play: Play, connect: Connect) -> None:
    info, events = answered(play, connect, SGLANG)
    result = events[-1]["result"]
    assert info["engine"] == "SGLang"
    assert result["token_ids"] == [20, 21, 10, 11, 12, 13]
    assert events[-1]["thinking"] == "Hm."
    found = result["speculation"]
    assert (found["num_steps"], found["num_proposed_draft_tokens"], found["num_accepted_draft_tokens"]) == (2, 8, 2)
    assert (found["mean_acceptance_length"], found["num_verified_draft_tokens"]) == (3.0, None)
    assert (result["finish_reason"], result["stop"]) == ("stop_string", "STOP")


def test_sglang_s_gauges_where_there_are_no_details(play: Play, connect: Connect) -> None:
    _, events = answered(play, connect, SGLANG_GAUGES)
    found = events[-1]["result"]["speculation"]
    assert (found["mean_acceptance_length"], found["num_steps"]) == (2.75, None)


def test_llama_cpp_s_timings_token_by_token(play: Play, connect: Connect) -> None:
    info, events = answered(play, connect, LLAMA_CPP)
    live = [e for e in events if e["event"] == "figures"]
    assert [e["num_tokens"] for e in live if e["num_tokens"]] == [1, 3, 4, 4]
    assert [e["num_verified"] for e in live][-1] == 8
    result = events[-1]["result"]
    assert (info["context"], result["token_ids"]) == (2048, None)
    assert result["usage"]["completion_tokens"] == 4
    assert result["timing"]["tokens_per_second"] == 80.0
    found = result["speculation"]
    assert (found["num_verified_draft_tokens"], found["num_accepted_draft_tokens"]) == (8, 1)
    assert found["mean_acceptance_length"] is None


def test_what_is_not_reported_stays_null(play: Play, connect: Connect) -> None:
    _, events = answered(play, connect, LLAMA_CPP_PYTHON)
    result = events[-1]["result"]
    assert set(result["usage"].values()) == {None}
    assert {v for k, v in result["speculation"].items()} == {None}
    assert result["finish_reason"] == "length"
    assert all(e["source"] is None for e in events if e["event"] == "figures")


# What is asked


def test_every_setting_is_sent_in_the_engine_s_own_words(play: Play, connect: Connect) -> None:
    sampling = {"temperature": 0.7, "seed": 3, "stop": ("x",), "logit_bias": ((5, -1.0),), "max_tokens": 9}
    bodies = {}
    for part in (VLLM, SGLANG, LLAMA_CPP, LLAMA_CPP_PYTHON):
        played = play(part)
        engine = connect(played)
        until(engine, "ready")
        engine.generate(ask(sampling={**sampling, "repetition_penalty": 1.2}, system="Be brief."))
        until(engine, "end")
        ((path, bodies[part.owner]),) = played.bodies
        assert path == CHAT
    for body in bodies.values():
        assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert (body["temperature"], body["seed"], body["stop"], body["max_tokens"]) == (0.7, 3, ["x"], 9)
        assert (body["top_p"], body["min_p"], body["logit_bias"], body["stream"]) == (1.0, 0.0, {"5": -1.0}, True)
    assert (bodies["vllm"]["top_k"], bodies["sglang"]["top_k"]) == (-1, -1)
    assert (bodies["llamacpp"]["top_k"], bodies["me"]["top_k"]) == (0, 0)
    assert bodies["vllm"]["repetition_penalty"] == bodies["llamacpp"]["repeat_penalty"] == 1.2
    assert bodies["vllm"]["return_token_ids"] and bodies["sglang"]["return_spec_tokens_details"]
    assert bodies["llamacpp"]["timings_per_token"]


def test_exact_prompts_go_to_text_completions(play: Play, connect: Connect) -> None:
    said = {"id": "c", "choices": [{"index": 0, "text": "ok", "finish_reason": "stop", "prompt_token_ids": [7, 8]}]}
    played = play(replace(VLLM, chunks=(said, DONE)))
    engine = connect(played)
    until(engine, "ready")
    for content in ({"prompt": "as it is", "raw": True}, {"prompt_ids": (7, 8)}):
        engine.generate(ask(**content))
        assert until(engine, "end")[-1]["result"]["text"] == "ok"
    assert [(path, body["prompt"]) for path, body in played.bodies] == [(TEXT, "as it is"), (TEXT, [7, 8])]
    assert all("max_tokens" in body and body["max_tokens"] is None for _, body in played.bodies)


def test_thinking_is_switched_by_the_template(play: Play, connect: Connect) -> None:
    played = play(VLLM)
    engine = connect(played)
    until(engine, "ready")
    engine.generate(ask(think=False))
    until(engine, "end")
    assert played.bodies[0][1]["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("part", "fields", "word"),
    [
        (LLAMA_CPP, {"sampling": {"min_tokens": 5}}, "--min-tokens"),
        (LLAMA_CPP_PYTHON, {"sampling": {"ignore_eos": True}}, "--ignore-eos"),
        (LLAMA_CPP_PYTHON, {"think": True}, "thinking"),
        (VLLM, {"reasoning_effort": "high"}, "--reasoning-effort"),
        (LLAMA_CPP_PYTHON, {"prompt_ids": (1,)}, "token ids"),
        (SGLANG, {"prompt": "x", "raw": True}, "--max-tokens"),
        (VLLM, {"mode": "compact"}, "decides how drafts are made"),
        (replace(VLLM, owner="somebody"), {"sampling": {"top_k": 5}}, "--top-k"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    play: Play, connect: Connect, part: Part, fields: dict[str, Any], word: str
) -> None:
    engine = connect(play(part))
    until(engine, "ready")
    engine.generate(ask(**fields))
    end = until(engine, "end")[-1]
    assert (end["result"]["finish_reason"], end["error"]) == ("error", "UsageError")
    assert word in end["result"]["error"]


def test_the_mode_is_the_server_s(play: Play, connect: Connect) -> None:
    engine = connect(play(VLLM))
    until(engine, "ready")
    with pytest.raises(UsageError, match="was started with its own"):
        engine.set_mode("compact")


# Which model


def test_the_model_is_found_by_name_or_is_the_only_one(play: Play, connect: Connect) -> None:
    two = play(replace(VLLM, models=("one", "two")))
    assert until(connect(two, "two"), "ready", "error")[-1]["info"]["model"] == "two"
    assert "one, two" in until(connect(two), "ready", "error")[-1]["message"]
    assert "not served there" in until(connect(play(VLLM), "other"), "ready", "error")[-1]["message"]
    taken = until(connect(play(VLLM), "qwen3-8b", may_differ=True), "ready", "error")[-1]["info"]
    assert taken["model"] == "the-model"
    assert "qwen3-8b" in taken["notices"][0]


def test_settings_that_it_has_no_field_for_are_refused_at_the_start(play: Play, connect: Connect) -> None:
    end = until(connect(play(LLAMA_CPP), sampling=SamplingParams(min_tokens=4)), "ready", "error")[-1]
    assert (end["error"], "--min-tokens" in end["message"]) == ("UsageError", True)


# What goes wrong


def test_cancelling_cuts_the_connection_and_keeps_what_came(play: Play, connect: Connect) -> None:
    played = play(replace(VLLM, hold=threading.Event()))
    engine = connect(played)
    until(engine, "ready")
    engine.generate(ask())
    until(engine, "delta")
    engine.cancel("a")
    result = until(engine, "end")[-1]["result"]
    assert result["finish_reason"] == "cancelled"
    assert result["text"].startswith("Hello")
    until_true(lambda: played.cuts == 1)


def until_true(condition: Callable[[], bool]) -> None:
    deadline = threading.Event()
    for _ in range(500):
        if condition():
            return
        deadline.wait(0.02)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        (VLLM_CHUNKS[:3], "closed the connection"),
        ((*VLLM_CHUNKS[:2], {"error": {"message": "out of pages", "code": 500}}, DONE), "out of pages"),
        ((*VLLM_CHUNKS[:2], b"data: {nonsense\n\n"), "no JSON"),
        ((*VLLM_CHUNKS[:2], [1, 2]), "no chunk"),
        ((*VLLM_CHUNKS[:2], b"data: {"), "middle of an answer"),
    ],
)
def test_an_answer_that_breaks_off_says_why_and_the_next_one_comes(
    play: Play, connect: Connect, chunks: tuple[Any, ...], words: str
) -> None:
    played = play(replace(VLLM, chunks=chunks))
    engine = connect(played)
    until(engine, "ready")
    engine.generate(ask())
    result = until(engine, "end")[-1]["result"]
    assert result["finish_reason"] == "error"
    assert words in result["error"]
    assert result["text"].startswith("Hello")
    played.part = VLLM
    engine.generate(ask())
    assert until(engine, "end")[-1]["result"]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "context is 4096"}}, "UsageError", "context is 4096"),
        (422, {"detail": [{"msg": "bad"}]}, "UsageError", "bad"),
        (401, {"error": {"message": "who are you"}}, "NoAccess", "SPARKCHAT_ENGINE_KEY"),
        (503, {"error": {"message": "loading"}}, "Unreachable", "loading"),
    ],
)
def test_a_refused_request_says_why(
    play: Play, connect: Connect, status: int, body: Any, kind: str, words: str
) -> None:
    engine = connect(play(replace(VLLM, status=status, chunks=(body,))))
    until(engine, "ready")
    engine.generate(ask())
    end = until(engine, "end")[-1]
    assert (end["error"], end["result"]["finish_reason"]) == (kind, "error")
    assert words in end["result"]["error"]


def test_a_key_is_sent_and_its_lack_is_explained(play: Play, connect: Connect) -> None:
    played = play(replace(VLLM, key="s3cret"))
    assert "SPARKCHAT_ENGINE_KEY" in until(connect(played), "error", "ready")[-1]["message"]
    assert until(connect(played, key="s3cret"), "error", "ready")[-1]["event"] == "ready"


@pytest.mark.parametrize(
    "url", ["ftp://x", "x:8000", "http://", "http://a b", "http://x:99999", "http://ä", "http://x?a"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--engine"):
        Server(url)


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="SPARKCHAT_ENGINE_KEY"):
        Server("http://x", "a\nb")


def test_a_proxy_of_the_environment_is_used(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(VLLM)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", played.url)
    engine = RemoteEngine(Server("http://cluster.invalid:8000/prefix/v1"), None, SamplingParams())
    engine.start()
    assert until(engine, "ready", "error")[-1]["event"] == "error"  # the played server knows no /prefix
    assert played.proxied == ["http://cluster.invalid:8000/prefix/v1/models"]
    engine.close()
    # This machine is reached directly, whatever the environment says.
    direct = RemoteEngine(Server(played.url), None, SamplingParams())
    direct.start()
    assert until(direct, "ready", "error")[-1]["event"] == "ready"
    assert len(played.proxied) == 1
    direct.close()


def test_garbage_in_places_that_hold_numbers_harms_nothing(play: Play, connect: Connect) -> None:
    wild = (
        chunk({"content": "Hello world!"}, usage={"completion_tokens": "many", "prompt_tokens": -1}),
        chunk({"content": 7, "reasoning": {}}, choice={"token_ids": ["x"], "stop_reason": []}),
        chunk({}, "stop", metrics={"speculative_decoding": {"num_spec_steps": "x", "acceptance_histogram": [-1]}}),
        chunk({}, metrics={"speculative_decoding": {"num_spec_steps": 10**400, "mean_acceptance_length": 10**400}}),
        {"choices": "none", "usage": [], "timings": {"predicted_n": None, "draft_n": float(10)}, "sglext": 3},
        DONE,
    )
    _, events = answered(play, connect, replace(VLLM_PLAIN, chunks=wild))
    result = events[-1]["result"]
    assert (result["text"], result["usage"]["completion_tokens"]) == ("Hello world!", None)
    json.dumps(result, allow_nan=False)
