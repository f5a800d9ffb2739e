"""Input that never ends, is far too long or begins with a mark; and words in the environment that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Cli
from sparkchat import switches
from sparkchat.cli.lines import Lines
from sparkchat.errors import UsageError
from sparkchat.requests import BadLine, parse_line


def test_lines_come_whole_from_any_pieces() -> None:
    text = b"one\n\ntwo\r\nthree"
    for size in range(1, len(text) + 1):
        lines = Lines(100)
        found = [line for at in range(0, len(text), size) for line in lines.take(text[at : at + size])]
        assert found + lines.end() == [b"one", b"", b"two\r", b"three"]


def test_a_line_too_long_is_told_at_once_and_the_next_one_read() -> None:
    lines = Lines(10)
    assert lines.take(b"0123456789") == []
    assert lines.take(b"0") == [None]
    assert lines.take(b"0" * 100) == []
    assert lines.take(b"0\nnext\n0123456789") == [b"next"]
    assert lines.end() == [b"0123456789"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a device that never ends")
def test_stdin_that_never_ends_is_not_read_for_ever(
    main: Cli, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/zero").open(encoding="utf-8") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        done = main("run", model_folder)
    assert done.code == 2 and "piped in" in done.error


@pytest.mark.parametrize("name", sorted(switches.WORDS))
def test_a_switch_takes_its_own_words_alone(main: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for word in (*switches.WORDS[name], ""):
        assert switches.word_of(name, {name: word}) == (word or None)
    with pytest.raises(UsageError, match=name):
        switches.word_of(name, {name: "sometimes"})
    monkeypatch.setenv(name, "sometimes")
    done = main("paths")
    assert (done.code, done.error.startswith(f"{name} is 'sometimes'; give one of")) == (2, True)


def test_debug_is_a_switch_too(main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, code in (("1", 0), ("off", 0), ("", 0), ("sometimes", 2)):
        monkeypatch.setenv("SPARKCHAT_DEBUG", word)
        assert main("paths").code == code


@pytest.mark.parametrize(("word", "is_asked"), [("", False), ("1", True), ("0", True)])
def test_an_empty_no_color_asks_for_nothing(
    main: Cli, monkeypatch: pytest.MonkeyPatch, word: str, is_asked: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", word)
    assert main("doctor", "--json", "--offline").json["terminal"]["no_color"] is is_asked


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (b'{"id": 1, "seed": ' + b"9" * 5000 + b"}", {"id": 1}),
        (b'{"seed": ' + b"9" * 5000 + b', "id": [2]}', {"id": [2]}),
        (b'{"id": ' + b"9" * 5000 + b"}", {}),
        (b' {"id": 3, "prompt": "x"} extra', {"id": 3}),
        (b'{"id": 4, "prompt": "x"', {}),
    ],
)
def test_a_bad_line_keeps_its_id_where_that_can_be_read(line: bytes, fields: dict[str, object]) -> None:
    bad = parse_line(line)
    assert isinstance(bad, BadLine) and bad.fields == fields
    assert "sys." not in bad.error
