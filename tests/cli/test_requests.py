"""One JSON line becomes one request, or one sentence on what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sparkchat.config import RunConfig
from sparkchat.errors import UsageError
from sparkchat.params import LoadSpec, SamplingParams
from sparkchat.requests import BadLine, build_request, parse_line

CONFIG = RunConfig(
    LoadSpec("m", "/m"), SamplingParams(temperature=0.5, max_tokens=8, seed=3), system="be brief", think=True
)


HUGE = 10**400
"""A whole number that JSON can write and no float can hold."""


def request(**line: Any) -> Any:
    return build_request(line, "r1", CONFIG)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"[1]", "list, not an object"),
        (b"3", "int, not an object"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1e999}', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": "\n"}', "not JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' is given twice"),
    ],
)
def test_what_is_no_object_is_said(line: bytes, words: str) -> None:
    found = parse_line(line)
    assert isinstance(found, BadLine) and words in found.error


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (b'{"id": "x", "temperature": NaN}', {"id": "x"}),
        (b'{"seed": 1e400, "id": [7, null]}', {"id": [7, None]}),
        (b'{"id": "y", "prompt": "\xff"}', {"id": "y"}),
        (b'{"id": "\xff", "prompt": "z"}', {}),
        (b'{"id": NaN}', {}),
        (b'{"prompt": NaN}', {}),
        (b'{"id": 1,', {}),
        (b"[NaN]", {}),
    ],
)
def test_a_bad_line_keeps_an_id_that_can_be_read(line: bytes, fields: dict[str, Any]) -> None:
    found = parse_line(line)
    assert isinstance(found, BadLine) and found.fields == fields


def test_a_line_takes_the_runs_options_where_it_gives_none() -> None:
    capped = request(prompt="hi", mode="cap-accept", accept_cap=3, draft_temperature="adaptive")
    assert (capped.accept_cap, capped.draft_temperature) == (3, "adaptive")
    made = request(prompt="hi", top_k=4, stop="END", logit_bias={"5": -1.5}, mode="compact", block_size=2)
    assert (made.id, made.prompt, made.system, made.think) == ("r1", "hi", "be brief", True)
    assert (made.sampling.temperature, made.sampling.top_k, made.sampling.stop) == (0.5, 4, ("END",))
    assert made.sampling.logit_bias == ((5, -1.5),)
    assert (made.mode, made.block_size) == ("compact", 2)


def test_a_level_of_effort_is_the_lines_own_the_runs_or_none_without_thinking() -> None:
    config = replace(CONFIG, reasoning_effort="high")

    def effort(**line: Any) -> str | None:
        return build_request({"prompt": "hi", **line}, "r1", config).reasoning_effort

    assert [effort(), effort(reasoning_effort="max"), effort(think=False)] == ["high", "max", None]
    assert effort(think=False, reasoning_effort="max") == "max"  # which the engine refuses
    assert effort(raw=True) is None
    with pytest.raises(UsageError, match="reasoning_effort has no place in a request whose input is exact"):
        effort(raw=True, reasoning_effort="max")
    with pytest.raises(UsageError, match=r"reasoning_effort is 3; give a text"):
        effort(reasoning_effort=3)


def test_null_means_the_runs_own_except_where_null_is_a_value() -> None:
    made = request(prompt="hi", temperature=None, max_tokens=None, seed=None, mode=None)
    assert (made.sampling.temperature, made.sampling.max_tokens, made.sampling.seed) == (0.5, None, None)


def test_a_whole_number_where_json_could_write_a_fraction_is_the_same_setting() -> None:
    """``"temperature": 1`` reached kernels that are compiled for floats, and ended the engine."""
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    whole = request(prompt="a", **dict.fromkeys(names, 1))
    assert {type(getattr(whole.sampling, name)) for name in names} == {float}
    assert whole == request(prompt="a", **dict.fromkeys(names, 1.0))
    changed = whole.with_sampling(temperature=2)
    assert type(changed.sampling.temperature) is float
    data = changed.to_json()
    data["sampling"]["temperature"] = 2
    assert type(type(changed).from_json(data).sampling.temperature) is float


def test_messages_and_ids() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    made = request(messages=messages)
    assert made.messages == tuple(messages) and made.system is None
    thought = {"role": "assistant", "content": "a", "reasoning_content": "why", "reasoning": None}
    assert request(messages=[*messages, thought]).messages == (*messages, {"role": "assistant", "content": "a"})
    made = request(prompt_ids=[1, 2])
    assert made.prompt_ids == (1, 2) and made.system is None and made.think is None
    made = request(prompt="exact", raw=True)
    assert made.raw and made.system is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "prompt_ids": [1]}, "exactly one of"),
        ({"prompt": 3}, "prompt is int"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "a", "mode": "fast"}, "off, static, compact, cap-accept"),
        ({"prompt": "a", "block_size": 0}, "block_size 0"),
        ({"prompt": "a", "block_size": "3"}, "block_size"),
        ({"prompt": "a", "accept_cap": 0}, "accept_cap 0"),
        ({"prompt": "a", "accept_cap": 1.5}, "accept_cap"),
        ({"prompt": "a", "draft_temperature": "hot"}, "draft_temperature"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": [3]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[5.7, 1]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": HUGE}}, "logit_bias"),
        ({"prompt": "a", "temperature": HUGE}, "temperature is 1000"),
        ({"prompt": "a", "top_p": -HUGE}, "top_p is -1000"),
        ({"prompt": "a", "seed": HUGE}, "2^64-1"),
        ({"prompt": "a", "raw": "yes"}, "raw"),
        ({"prompt": "a", "raw": True, "system": "s"}, "system has no place"),
        ({"prompt_ids": [1], "think": False}, "think has no place"),
        (
            {
                "prompt_ids": [],
            },
            "at least one token id",
        ),
        ({"prompt_ids": [1, -1]}, "0 or above"),
        ({"prompt_ids": [1, True]}, "0 or above"),
        ({"prompt_ids": [1], "raw": True}, "raw sends the exact text"),
        ({"messages": []}, "at least one"),
        ({"messages": ["hi"]}, "exactly role and content"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "exactly role and content"),
        ({"messages": [{"role": "user", "content": "a", "reasoning": "x"}]}, "exactly role and content"),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": 3}]}, "reasoning of message 1 is int"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role of message 1"),
        ({"messages": [{"role": "user", "content": None}]}, "NoneType"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "one of them"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(line: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_request(line, "r1", CONFIG)
    assert words in str(caught.value)


def test_every_refusal_is_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        build_request({"prompt": "a", "x\ny": 1}, "r1", CONFIG)
    assert "\n" not in str(caught.value)


def test_a_mark_at_the_start_of_a_file_is_no_part_of_its_first_line() -> None:
    assert parse_line(b'\xef\xbb\xbf{"prompt": "a"}\r') == {"prompt": "a"}


def test_a_parsed_line_is_the_object() -> None:
    line = {"id": {"any": [1, None]}, "prompt": "\u00e9\u4e2d"}
    assert parse_line(json.dumps(line).encode()) == line
