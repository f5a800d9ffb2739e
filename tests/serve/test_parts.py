"""Parts of the server by themselves: waiting text, a client that takes nothing, and the page of counters."""

from __future__ import annotations

import asyncio
import errno
import re
from dataclasses import replace
from typing import Any

import pytest

from sparkchat.params import GenerateRequest
from sparkchat.serve import http
from sparkchat.serve.choices import Choice
from sparkchat.serve.fields import Asked
from sparkchat.serve.http import Exchange, Gone
from sparkchat.serve.mailbox import Mailbox
from sparkchat.serve.metrics import Metrics
from sparkchat.serve.prefixes import Prefixes
from sparkchat.serve.server import _LoopErrors
from sparkchat.serve.shapes import ChatShape

Event = dict[str, Any]


def delta(request_id: str, text: str, *ids: int, channel: str = "answer", **more: Any) -> Event:
    event = {"event": "delta", "id": request_id, "text": text, "token_ids": list(ids), "channel": channel}
    return {**event, "origins": ["draft"] * len(ids), **more}


async def test_text_that_waits_is_joined_and_the_trace_s_own_events_stay() -> None:
    mailbox = Mailbox(["a", "b"])
    first = delta("a", "one", 1)
    for event in (first, delta("a", " two", 2, 3), delta("b", "x", 9), delta("a", " three", 4)):
        mailbox.put(event)
    mailbox.put(delta("a", "hm", 5, channel="thinking"))
    mailbox.put({"event": "end", "id": "a"})
    taken = [await mailbox.take() for _ in range(4)]
    assert [(choice, e.get("text"), e.get("token_ids")) for choice, e in taken] == [
        (0, "one two three", [1, 2, 3, 4]),
        (1, "x", [9]),
        (0, "hm", [5]),
        (0, None, None),
    ]
    assert (first["text"], first["token_ids"]) == ("one", [1])


async def test_text_after_a_taken_event_is_a_new_one() -> None:
    mailbox = Mailbox(["a"])
    mailbox.put(delta("a", "one", 1))
    _, taken = await mailbox.take()
    waiting = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(delta("a", "two", 2))
    assert (await waiting)[1]["text"] == "two"
    assert taken["text"] == "one"


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_SECONDS", 0.02)
    blocked = asyncio.Event()

    async def send(_message: Event) -> None:
        await blocked.wait()

    exchange = Exchange({"method": "GET", "path": "/", "headers": []}, blocked.wait, send)  # type: ignore[arg-type]
    with pytest.raises(Gone):
        await exchange.send_json({})


async def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.02)

    async def receive() -> Event:
        await asyncio.sleep(60)
        return {}

    exchange = Exchange({"method": "POST", "path": "/", "headers": []}, receive, None)  # type: ignore[arg-type]
    with pytest.raises(http.Problem) as caught:
        await exchange.body()
    assert caught.value.status == 408


def ended(choice: Choice) -> Choice:
    speculation = {"num_steps": 0, "num_verified_draft_tokens": 0, "num_accepted_draft_tokens": 0}
    speculation |= {"verify_len_histogram": [], "acceptance_histogram": []}
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "cached_tokens": 0}
    timing = {"ttft_ms": 1.0, "decode_ms": 2.0, "tokens_per_second": None}
    result = {"finish_reason": "length", "stop": None, "drafter": "d", "usage": usage, "timing": timing}
    choice.take({"event": "end", "result": {**result, "speculation": speculation}})
    return choice


def test_thinking_of_a_chat_has_a_field_of_its_own() -> None:
    shape = ChatShape(Asked((), "c"), "m")
    choice = Choice(0)
    choice.take({"event": "start", "prompt_token_ids": [1], "cached_tokens": 0})
    pieces = []
    for event in (delta("a", "Hm.", 1, 2, channel="thinking"), delta("a", "Yes.", 3)):
        choice.take(event)
        pieces.append(shape.piece(choice, event))
    assert [piece["choices"][0]["delta"] for piece in pieces if piece] == [
        {"reasoning_content": "Hm."},
        {"content": "Yes."},
    ]
    whole = shape.whole([ended(choice)])
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert whole["usage"]["speculative_decoding"]["mean_acceptance_length"] is None


def test_as_many_chats_are_remembered_as_the_engine_keeps() -> None:
    prefixes = Prefixes(2)

    def chat(number: int, *more: str) -> GenerateRequest:
        words = (f"question {number}", *more)
        roles = ("user", "assistant", "user")
        said = tuple({"role": role, "content": text} for role, text in zip(roles, words, strict=False))
        return GenerateRequest(id="r", messages=said)

    sessions = []
    for number in range(3):
        request = chat(number)
        sessions.append(prefixes.take(request))
        prefixes.keep(replace(request, session=sessions[-1]), "answer")
    assert len(set(sessions)) == 3
    again = [prefixes.take(chat(number, "answer", "more")) for number in range(3)]
    assert [old == new for old, new in zip(sessions, again, strict=True)] == [False, True, True]
    thinking = replace(chat(1, "answer", "more"), think=True)
    prefixes.keep(replace(chat(1), session="s"), "answer")
    assert prefixes.take(thinking) != "s"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(request_id: str, proposed: int, verified: int, accepted: int, cap_trim: int | None) -> Event:
    return {
        "event": "step",
        "id": request_id,
        "draft_ids": list(range(proposed)),
        "verify_len": verified,
        "rows": verified + 1,
        "correct_drafts": accepted,
        "committed_ids": list(range(accepted + 1)),
        "cap_trim": cap_trim,
    }


def played(clock: Clock) -> Metrics:
    """One answer of two steps, one that was cut, one refused, one that waits."""
    metrics = Metrics(clock)
    metrics.submitted("r")
    clock.now += 2.0
    metrics.take({"event": "start", "id": "r", "prompt_token_ids": [1] * 7, "cached_tokens": 3})
    clock.now += 0.5
    metrics.take(delta("r", "a", 1))
    clock.now += 0.3
    metrics.take(delta("r", "bcd", 2, 3, 4))
    metrics.take(step("r", 4, 3, 2, None))
    metrics.take(step("r", 4, 0, 0, None))
    metrics.take({"event": "end", "id": "r", "result": {"finish_reason": "stop_string"}})
    metrics.submitted("cut")
    metrics.take({"event": "start", "id": "cut", "prompt_token_ids": [1], "cached_tokens": 0})
    metrics.take({"event": "end", "id": "cut", "result": {"finish_reason": "cancelled"}})
    metrics.submitted("bad")
    metrics.take({"event": "end", "id": "bad", "result": {"finish_reason": "error"}})
    metrics.submitted("waits")
    return metrics


def samples(page: str) -> dict[str, float]:
    """Every sample by name and labels, the page checked against the text format on the way."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in kinds
                kinds[name] = rest
            continue
        match = re.fullmatch(r'([a-z]+:[a-z_0-9]+)\{((?:[a-z_]+="[^"]*",?)+)\} (\S+)', line)
        assert match, line
        base = re.sub(r"_(bucket|sum|count)$", "", match[1])
        assert match[1] in kinds or kinds.get(base) == "histogram", line
        labels = match[2].replace('model_name="m"', "").replace(',engine="0"', "").strip(",")
        found[f"{match[1]}{{{labels}}}" if labels else match[1]] = float(match[3])
    return found


def test_counters_under_vllm_s_and_sglang_s_names() -> None:
    clock = Clock()
    found = samples(played(clock).text("m", 4))
    assert found["vllm:num_requests_running"] == found["sglang:num_running_reqs"] == 0
    assert found["vllm:num_requests_waiting"] == found["sglang:num_queue_reqs"] == 1
    assert found["vllm:prompt_tokens_total"] == found["sglang:prompt_tokens_total"] == 8
    assert found["vllm:generation_tokens_total"] == found["sglang:generation_tokens_total"] == 4
    assert found["vllm:prefix_cache_hits_total"] == found["sglang:cached_tokens_total"] == 3
    assert found['vllm:request_success_total{finished_reason="stop"}'] == 1
    assert (
        found['vllm:request_success_total{finished_reason="abort"}'] == found["sglang:num_aborted_requests_total"] == 1
    )
    assert found["sglang:num_requests_total"] == 2
    # One step handed drafts to the model; both proposed some.
    assert found["vllm:spec_decode_num_drafts_total"] == found["sglang:spec_verify_calls_total"] == 1
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 3
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 2
    per_position = [found[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}}'] for k in range(4)]
    assert per_position == [1, 1, 0, 0]
    assert found["sglang:spec_accept_length"] == (3 + 1) / 2
    assert found["sglang:spec_accept_rate"] == 2 / 8
    assert found["sglang:spec_cap_length"] == (4 + 1) / 2
    assert found["sglang:spec_num_draft_tokens"] == 5
    assert "sglang:spec_block_accept_length" not in found


def test_histograms_count_and_add_up() -> None:
    found = samples(played(Clock()).text("m", 4))
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_sum"] == pytest.approx(2.5)
    assert found['vllm:time_to_first_token_seconds_bucket{le="1.0"}'] == 0
    assert found['vllm:time_to_first_token_seconds_bucket{le="2.5"}'] == 1
    assert found['vllm:time_to_first_token_seconds_bucket{le="+Inf"}'] == 1
    # Three tokens came in one step of 0.3 s.
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(2.0)
    assert found["sglang:e2e_request_latency_seconds_count"] == 2


def test_gauges_have_no_sample_before_the_first_step_and_keep_to_the_newest_ones() -> None:
    assert not [name for name in samples(Metrics().text("m", 4)) if name.startswith("sglang:spec_accept")]
    clock = Clock()
    metrics = played(clock)
    clock.now += 60
    found = samples(metrics.text("m", 4))
    assert (found["sglang:spec_accept_length"], found["sglang:gen_throughput"]) == (2.0, 0)
    metrics.submitted("late")
    metrics.take(step("late", 4, 4, 4, 0))
    assert samples(metrics.text("m", 4))["sglang:spec_accept_length"] == 5


def test_who_is_set_aside_waits_and_is_counted() -> None:
    metrics = played(Clock())
    metrics.submitted("long")
    metrics.take({"event": "start", "id": "long", "prompt_token_ids": [1] * 7, "cached_tokens": 0})
    for _ in range(2):
        metrics.take({"event": "preempted", "id": "long", "t_ns": 1})
        found = samples(metrics.text("m", 4))
        assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (0, 2)
        metrics.take({"event": "resumed", "id": "long", "t_ns": 2})
    found = samples(metrics.text("m", 4))
    assert (found["vllm:num_requests_running"], found["vllm:num_preemptions_total"]) == (1, 2)


def test_a_cap_that_was_measured_is_reported() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    metrics.submitted("r")
    metrics.take(step("r", 4, 4, 1, 2))
    assert samples(metrics.text("m", 4))["sglang:spec_block_accept_length"] == 4


def test_without_a_drafter_there_is_no_speculation() -> None:
    found = samples(played(Clock()).text("m", None))
    assert not [name for name in found if "spec_" in name]


def test_names_are_quoted() -> None:
    assert r'model_name="a\"b\\c"' in Metrics().text('a"b\\c', None)


def test_a_process_without_a_file_left_says_so_once_a_minute() -> None:
    said, now = list[str](), [0.0]
    report = _LoopErrors(said.append, debug=False, clock=lambda: now[0])
    loop = asyncio.new_event_loop()
    for now[0] in (0.0, 0.1, 59.0, 61.0):
        for _ in range(100):
            error = OSError(errno.EMFILE, "Too many open files")
            report(loop, {"message": "socket.accept() out of system resource", "exception": error})
    assert said == ["further connections have to wait: Too many open files; see `ulimit -n`"] * 2
    report(loop, {"message": "Task exception was never retrieved", "exception": ValueError("x")})
    assert said[-1] == "internal error, Task exception was never retrieved, ValueError: x"
    loop.close()
