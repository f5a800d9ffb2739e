"""Chats on disk and their branches: what is kept, what survives damage, and how it comes back."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.paths import user_paths
from sparkchat.ui.chat_file import SUFFIX, ChatFile, read_chat
from sparkchat.ui.chats import ChatKeeper, ChatStore, ago
from sparkchat.ui.conversation import Conversation, Turn
from sparkchat.ui.scripted import HOSTILE, ScriptedOptions
from ui.chat import make_config

Open = Callable[..., Any]
RESULT = {
    "finish_reason": "stop",
    "usage": {"completion_tokens": 3},
    "speculation": {"mean_acceptance_length": 2.0},
    "timing": {"tokens_per_second": 9.0},
    "prompt_token_ids": [1, 2],
}


def keeper(folder: Path, **changes: Any) -> tuple[ChatKeeper, Conversation]:
    talk = Conversation(make_config(**changes))
    return ChatKeeper(ChatStore(folder), talk, "scripted"), talk


def say(kept: ChatKeeper, talk: Conversation, prompt: str, text: str) -> Turn:
    turn = talk.ask(prompt)
    kept.question(turn)
    turn.answer.text, turn.answer.result, turn.seed = text, {**RESULT, "text": text}, 7
    kept.answer(turn)
    return turn


def texts(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(turn.prompt, turn.answer.text) for turn in turns]


# The file


@pytest.mark.parametrize("text", [HOSTILE, "x" * 1_000_000, "\ud800 \u2028 \x85 \x00", ""])
def test_a_chat_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    kept, talk = keeper(tmp_path / "chats", system=f"sys {HOSTILE}")
    say(kept, talk, text or "q", text)
    assert kept.id is not None
    path = kept.store.path(kept.id)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept.close()
    back, again = keeper(tmp_path / "chats")
    back.open(back.store.find("last"))
    wanted = text.replace("\ud800", "\ufffd")
    assert texts(again.turns) == [(wanted or "q", wanted)] and again.system == f"sys {HOSTILE}"
    turn = again.turns[0]
    assert turn.seed == 7 and turn.answer.result is not None
    whole = turn.answer.whole_result()
    assert whole["text"] == wanted and "prompt_token_ids" not in whole
    assert not turn.answer.was_stopped


def test_a_killed_program_keeps_what_had_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, talk = keeper(tmp_path)
    monkeypatch.setattr("sparkchat.ui.chats.PART_SECONDS", 0.0)
    turn = talk.ask("q")
    kept.question(turn)
    kept.text(turn, "thinking", "hm")
    kept.text(turn, "answer", "half an ")
    kept.text(turn, "answer", "answer")
    assert kept.id is not None
    path = kept.store.path(kept.id)
    whole = path.read_bytes()
    # The kill comes at any byte: all whole lines stay.
    for cut in (len(whole), len(whole) - 1, len(whole) - 9):
        path.write_bytes(whole[:cut])
        chat = read_chat(path)
        assert chat.every_turn[0].answer.text == ("half an " if cut == len(whole) - 9 else "half an answer")
        assert chat.every_turn[0].answer.thinking == "hm" and chat.every_turn[0].answer.was_stopped
        assert chat.num_damaged == (cut == len(whole) - 9)


def test_what_follows_a_cut_line_is_read(tmp_path: Path) -> None:
    kept, talk = keeper(tmp_path)
    say(kept, talk, "one", "1")
    kept.close()
    path = kept.store.find("last")
    path.write_bytes(path.read_bytes() + b'{"type": "question", "tur')
    back, again = keeper(tmp_path)
    assert back.open(path).num_damaged == 1
    say(back, again, "two", "2")
    back.close()
    assert texts(read_chat(path).path) == [("one", "1"), ("two", "2")]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1]",
        b'"x"',
        b"[" * 100_000,
        b'{"type": "question"}',
        b'{"type": "question", "turn": 1, "parent": null, "text": "again"}',
        b'{"type": "question", "turn": 9, "parent": 77, "text": "no such parent"}',
        b'{"type": "question", "turn": true, "parent": null, "text": "x"}',
        b'{"type": "question", "turn": 9, "parent": [], "text": "x"}',
        b'{"type": "question", "turn": 9, "parent": {"a": 1}, "text": "x"}',
        b'{"type": "answer", "turn": 5, "text": "of nothing"}',
        b'{"type": "answer", "turn": [1], "text": "x"}',
        b'{"type": "part", "turn": 1, "text": 7}',
        b'{"type": "at", "turn": 1e400}',
        b'{"type": "at", "turn": {}}',
        b'{"type": "wonder"}',
    ],
)
def test_lines_that_make_no_sense_are_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    kept, talk = keeper(tmp_path)
    say(kept, talk, "one", "1")
    kept.close()
    path = kept.store.find("last")
    path.write_bytes(path.read_bytes() + line + b"\n")
    chat = read_chat(path)
    assert texts(chat.path) == [("one", "1")] and chat.num_damaged == 1


@pytest.mark.parametrize(
    "result",
    [
        None,
        [],
        {"finish_reason": 3},
        {**RESULT, "timing": None},
        {**RESULT, "usage": {"x": "y"}},
        {**RESULT, "timing": {"tokens_per_second": 10**400}},
    ],
)
def test_numbers_that_make_no_sense_are_not_believed(tmp_path: Path, result: Any) -> None:
    path = tmp_path / f"a{SUFFIX}"
    lines = [
        {"schema": "sparkchat.session/1", "type": "chat", "id": "a", "model": "m"},
        {"type": "question", "turn": 1, "parent": None, "text": "q"},
        {"type": "answer", "turn": 1, "text": "t", "result": result, "seed": -1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (turn,) = read_chat(path).path
    assert (turn.answer.text, turn.answer.result, turn.seed) == ("t", None, None)


def test_a_file_that_is_no_chat_is_refused_and_not_listed(tmp_path: Path) -> None:
    path = tmp_path / f"x{SUFFIX}"
    path.write_text("{}\nhello\n")
    with pytest.raises(DamagedFile):
        read_chat(path)
    with pytest.raises(UsageError, match="no kept chat"):
        ChatStore(tmp_path).find("last")


def test_one_chat_is_not_written_by_two_programs(tmp_path: Path) -> None:
    kept, talk = keeper(tmp_path)
    say(kept, talk, "one", "1")
    path = kept.store.find("last")
    with pytest.raises(UsageError, match="another window"):
        ChatFile(path)
    other, copy = keeper(tmp_path)
    other.open(path)
    assert "copy" in (other.problem or "")
    say(other, copy, "two", "2")
    assert other.id != kept.id and other.id is not None
    assert texts(read_chat(other.store.path(other.id)).path) == [("one", "1"), ("two", "2")]
    assert texts(read_chat(path).path) == [("one", "1")]


def test_a_disk_that_refuses_is_told_once_and_the_chat_goes_on(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept, talk = keeper(blocked)
    say(kept, talk, "one", "1")
    assert "not kept" in (kept.problem or "")
    kept.problem = None
    say(kept, talk, "two", "2")
    assert kept.problem is None and len(talk.turns) == 2


def test_nothing_is_kept_when_that_is_asked(tmp_path: Path) -> None:
    kept, talk = keeper(tmp_path / "chats")
    kept.set_on(False)
    say(kept, talk, "secret", "1")
    assert not (tmp_path / "chats").exists()
    kept.set_on(True)
    assert texts(read_chat(kept.store.find("last")).path) == [("secret", "1")]


# The list


def test_chats_are_found_by_place_id_and_words(tmp_path: Path) -> None:
    ids = []
    for number, text in enumerate(("apples", "pears", "plums")):
        kept, talk = keeper(tmp_path)
        say(kept, talk, f"about {text}\nplease", f"{text} are fruit")
        kept.close()
        assert kept.id is not None
        ids.append(kept.id)
        path = kept.store.path(kept.id)
        os.utime(path, (time.time() - 100 + number, time.time() - 100 + number))
    store = ChatStore(tmp_path)
    assert [entry.title for entry in store.entries()] == [f"about {x} please" for x in ("plums", "pears", "apples")]
    assert [entry.id for entry in store.entries("PEARS fruit")] == [ids[1]] and store.entries("pears stone") == []
    assert store.find("1") == store.find("last") == store.path(ids[2]) and store.find(ids[0]) == store.path(ids[0])
    for word in ("4", "0", "nonsense", "2"):
        if word != "2":
            with pytest.raises(UsageError):
                store.find(word)
    store.delete(ids[2])
    assert store.find("last") == store.path(ids[1])


def test_how_long_ago() -> None:
    assert [ago(s) for s in (3, 60, 7199, 90_000, 1e7)] == ["now", "1 min", "1 h", "1 d", "115 d"]


# Branches


def test_a_branch_keeps_what_was_said_before(tmp_path: Path) -> None:
    kept, talk = keeper(tmp_path)
    for prompt in ("a", "b", "c"):
        say(kept, talk, prompt, prompt.upper())
    talk.cut(1)
    kept.moved()
    say(kept, talk, "b2", "B2")
    assert talk.branch_text == "branch 2 of 2"
    talk.go_to(talk.branch_at(1))
    assert texts(talk.turns) == [("a", "A"), ("b", "B"), ("c", "C")]
    kept.moved()
    kept.close()
    back, again = keeper(tmp_path)
    back.open(back.store.find("last"))
    assert texts(again.turns) == [("a", "A"), ("b", "B"), ("c", "C")] and again.branch_text == "branch 1 of 2"
    again.go_to(again.branch_at(None))
    assert texts(again.turns) == [("a", "A"), ("b2", "B2")]
    for number in (0, 3):
        with pytest.raises(UsageError):
            again.branch_at(number)


def test_a_flag_wins_over_a_session_command_and_is_named() -> None:
    sources = {"temperature": "flag --temperature", "top_p": "environment SPARKCHAT_TOP_P", "top_k": "user profile"}
    talk = Conversation(make_config(sources=sources))
    with pytest.raises(UsageError, match="--temperature was typed"):
        talk.set_option("temperature", "1")
    with pytest.raises(UsageError, match="SPARKCHAT_TOP_P is set"):
        talk.set_option("top-p", "0.5")
    talk.set_option("top_k", "5")
    assert (talk.sampling.top_k, talk.sampling.top_p) == (5, 1.0)


# On the screen


async def test_an_edited_question_is_a_branch_and_the_old_one_comes_back(chat: Open) -> None:
    async with chat(size=(120, 40)) as c:
        await c.ready()
        await c.say("short one")
        await c.say("short two")
        await c.send("/edit 1")
        await c.until(lambda: c.app.prompt.value == "short one")
        assert "short two" not in c.screen
        c.app.prompt.clear()
        await c.say("short three")
        assert c.engine.requests[-1].messages == ({"role": "user", "content": "short three"},)
        assert "branch 2 of 2" in c.screen
        await c.send("/branch")
        await c.until(lambda: "short two" in c.screen)
        assert "short three" not in c.screen and "branch 1 of 2" in c.screen
        await c.send("/fork 1")
        await c.say("short four")
        assert [m["content"] for m in c.engine.requests[-1].messages if m["role"] == "user"] == [
            "short one",
            "short four",
        ]
        await c.send("/edit 9")
        await c.until(lambda: "/edit 9 is not possible; give 1 to 2" in c.said)


async def test_a_chat_is_gone_on_with(chat: Open) -> None:
    async with chat(
        size=(100, 40), options=ScriptedOptions(tokens_per_second=2000, text="kept [/] \x1b[31m **text**")
    ) as c:
        await c.ready()
        await c.say("first question [bold]")
        await c.say("think second")
    path = ChatStore(user_paths().sessions).find("last")
    with path.open("ab") as file:
        file.write(b"garbage\n")
    config = make_config(resume="last")
    async with chat(size=(100, 40), config=config) as c:
        await c.ready()
        assert "first question [bold]" in c.screen and c.screen.count("kept [/] ␛[31m text") == 2
        assert "1 lines of this chat could not be read" in c.said
        await c.say("third")
        assert [m["content"] for m in c.engine.requests[0].messages][::2] == [
            "first question [bold]",
            "think second",
            "third",
        ]
    assert [turn.prompt for turn in read_chat(path).path] == ["first question [bold]", "think second", "third"]


async def test_the_list_of_chats_is_searched_and_chosen_from(chat: Open) -> None:
    async with chat(size=(80, 24)) as c:
        await c.ready()
        for prompt in ("short apples [/]", "short pears"):
            await c.say(prompt)
            await c.send("/new")
        await c.pilot.press("f8")
        await c.until(lambda: "short apples [/]" in c.screen and "short pears" in c.screen)
        await c.pilot.press(*"apples")
        await c.until(lambda: "short pears" not in c.screen)
        await c.pilot.press("enter")
        await c.until(lambda: [turn.prompt for turn in c.app.chat.conversation.turns] == ["short apples [/]"])
        assert c.app.prompt.has_focus
        await c.pilot.press("f8")
        await c.until(lambda: "short pears" in c.screen)
        await c.pilot.press("ctrl+x", "ctrl+x")
        assert "present chat" in c.screen or "deleted" in c.screen
        await c.pilot.press("escape")
        await c.send("/load nonsense")
        await c.until(lambda: "is unknown" in c.said)


async def test_nothing_is_kept_after_nohistory(chat: Open) -> None:
    async with chat() as c:
        await c.ready()
        await c.send("/set nohistory")
        await c.say("short secret")
    assert not user_paths().sessions.exists() or not list(user_paths().sessions.iterdir())
    assert "secret" not in user_paths().history.read_text()
