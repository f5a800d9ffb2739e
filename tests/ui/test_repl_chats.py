"""Kept chats and branches in the line chat, in a terminal."""

from __future__ import annotations

from sparkchat.paths import user_paths
from sparkchat.ui.chat_file import read_chat
from sparkchat.ui.chats import ChatStore
from ui.pty_program import PtyProgram

QUICK = {"tokens_per_second": 2000}


def test_line_chats_are_kept_forked_and_gone_on_with() -> None:
    with PtyProgram(size=(100, 40), front="repl", options=QUICK) as program:
        program.shows(">>> ")
        for line, shown in (
            ("short one", "complete"),
            ("short two", "complete"),
            ("/fork 1", "goes on from here"),
            ("short three", "three"),
            ("/branch 1", ">>> short two"),
            ("/chats", "/load N goes on"),
            ("/set nohistory", "nothing more is kept"),
        ):
            before = program.raw.count(shown.encode())
            program.send(f"{line}\r")
            program.until(lambda shown=shown, before=before: program.raw.count(shown.encode()) > before)
            program.until(lambda: program.raw.rstrip(b" ").endswith(b">>>"))
        program.send("\x04")
        assert program.ended() == 0
    store = ChatStore(user_paths().sessions)
    chat = read_chat(store.find("last"))
    assert [turn.prompt for turn in chat.every_turn] == ["short one", "short two", "short three"]
    assert [turn.prompt for turn in chat.path] == ["short one", "short two"]
    with PtyProgram(size=(100, 40), front="repl", options=QUICK, config={"resume": "last"}) as program:
        program.shows(">>> short two")
        program.until(lambda: program.raw.rstrip(b" ").endswith(b">>>"))
        program.send("/load nonsense\r")
        program.shows("is unknown")
        program.send("/load\r")
        program.shows("short one")
        program.send("/edit 1\r")
        program.until(lambda: program.raw.rstrip().endswith(b"short one"))
        program.send(" more\r")
        program.until(lambda: program.raw.count(b"complete") > 0)
    assert read_chat(store.find("last")).path[0].prompt == "short one more"


def test_a_chat_that_is_not_there_ends_the_program_before_it_begins() -> None:
    for front in ("repl", "tui"):
        with PtyProgram(front=front, config={"resume": "last"}) as program:
            assert program.ended() == 2
            assert b"there is no kept chat yet" in program.raw and b"1049h" not in program.raw
