"""Whatever goes in, the JSON that comes out can be read by any strict reader, one record a line."""

from __future__ import annotations

import json
import math

import pytest

from sparkchat.strict_json import dumps, loads, without_nonfinite


def read(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text.encode("utf-8"), parse_constant=refuse)


def test_numbers_json_cannot_hold_become_null() -> None:
    value = {"a": math.nan, "b": [math.inf, {"c": (-math.inf, 1.5, 1e300)}], math.nan: True, "n": None, "t": True}
    assert read(dumps(value)) == {"a": None, "b": [None, {"c": [None, 1.5, 1e300]}], "nan": True, "n": None, "t": True}
    assert without_nonfinite((1, math.nan)) == [1, None]


def test_numbers_survive_a_round_trip() -> None:
    for number in (0.1, 1e-320, 2**63, -0.0, 1 / 3, 123456789.123456789):
        assert loads(dumps([number])) == [number]


@pytest.mark.parametrize("text", ["", "a\nb\r\n", "\x00\x1b", "\u2028\u2029\x85", "\U0001f600", "\ufffd", '"\\', "é日"])
def test_text_survives_and_stays_on_one_line(text: str) -> None:
    line = dumps({"text": text, text: 1})
    assert read(line) == {"text": text, text: 1} and len(line.splitlines()) == 1


def test_lone_surrogates_become_replacement_marks() -> None:
    assert read(dumps(["a\udce4b", "\ud83d"])) == ["a\ufffdb", "\ufffd"]


def test_indent_is_for_people() -> None:
    assert dumps({"a": math.nan, "b": []}, indent=2) == '{\n  "a": null,\n  "b": []\n}'


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", "1e999", "[" * 100_000, "{", "", b"\xff", "9" * 5000]
)
def test_reading_refuses_what_is_not_strict(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_what_has_no_json_form_is_an_error_of_ours() -> None:
    with pytest.raises(TypeError):
        dumps({1, 2})
