"""The full-screen chat in a real terminal: how it draws, how it reacts, and how it leaves."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
import unicodedata
from pathlib import Path

import pytest
import wcwidth

from ui.pty_program import PtyProgram

SLOW = {"tokens_per_second": 60}


def started(program: PtyProgram, prompt: str = "prose") -> None:
    program.shows("ready")
    program.send(f"{prompt}\r")
    program.shows("answering")
    program.shows("A draft is a guess" if prompt == "prose" else "")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGABRT, 134)],
    ids=str,
)
def test_a_signal_in_mid_answer_leaves_the_terminal_as_it_was(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    trace = tmp_path / "t.spark.jsonl"
    with PtyProgram(options=SLOW, config={"trace_path": str(trace)}) as program:
        started(program)
        program.signal(number)
        assert program.ended() == code
        program.assert_restored()
    kinds = [json.loads(line)["type"] for line in trace.read_text().splitlines()]
    assert kinds[0] == "header" and "step" in kinds


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=str)
def test_even_a_sudden_death_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    with PtyProgram(options=SLOW) as program:
        started(program)
        program.signal(number)
        assert program.ended() == -number
        program.until(lambda: program.mode_is_on(1049) is False)
        program.read(0.3)
        program.assert_restored()


def test_nothing_watches_over_the_terminal_when_the_program_is_gone() -> None:
    with PtyProgram() as program:
        program.shows("ready")
        terminal = os.ttyname(program.slave)
        assert is_watched(terminal)
        program.send("\x11")
        assert program.ended() == 0
        program.until(lambda: not is_watched(terminal), 10.0)


def is_watched(terminal: str) -> bool:
    """Whether a shell waits for the end of the program on this terminal."""
    for path in Path("/proc").glob("[0-9]*/fd/4"):
        try:
            if os.readlink(path) == terminal and b"stty" in (path.parent.parent / "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def test_quitting_leaves_the_terminal_as_it_was() -> None:
    with PtyProgram() as program:
        program.shows("ready")
        program.send("\x11")
        assert program.ended() == 0
        program.assert_restored()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_stop_and_going_on_leave_one_screen_to_restore(number: signal.Signals) -> None:
    with PtyProgram(options={"tokens_per_second": 100}) as program:
        program.shows("ready")
        program.send("prose\r")
        program.shows("answering")
        for _ in range(2):
            program.signal(number)
            program.read(0.4)
            program.signal(signal.SIGCONT)
            program.read(0.4)
        program.shows("answering")
        program.send("written after it")
        program.shows("written after it")
        program.send("\x03")
        program.shows("stopped")
        program.send("\x11")
        assert program.ended() == 0
        program.assert_restored()


def test_a_crash_of_the_engine_is_survived_and_decides_the_exit_code() -> None:
    with PtyProgram(options=SLOW, fault="crash") as program:
        program.shows("ready")
        program.send("prose\r")
        program.shows("the chat is kept")
        assert "A draft is a guess" in program.text
        program.send("half a message")
        program.shows("half a message")
        program.send("\x11")
        assert program.ended() == 70
        program.assert_restored()
        assert program.raw.rstrip().endswith(b"the engine was ended by SIGABRT")


def test_a_fault_of_the_screen_itself_leaves_the_terminal_as_it_was() -> None:
    with PtyProgram(options=SLOW, fault="explode") as program:
        program.shows("ready")
        program.send("prose\r")
        assert program.ended() == 1
        program.assert_restored()
        assert b"forced by the test [/]" in program.raw


def test_a_screen_that_hangs_is_still_ended_by_a_signal() -> None:
    with PtyProgram(options=SLOW, fault="hang") as program:
        program.shows("ready")
        program.send("prose\r")
        program.read(0.5)
        program.signal(signal.SIGTERM)
        assert program.ended(10) == 143
        program.assert_restored()


def test_a_terminal_that_goes_away_ends_the_program() -> None:
    with PtyProgram(options=SLOW) as program:
        started(program)
        program.hang_up()
        assert program.process.wait(30) == 129


def test_ctrl_c_stops_the_answer_at_once_and_then_leaves() -> None:
    with PtyProgram(options=SLOW) as program:
        started(program)
        before = time.monotonic()
        program.send("\x03")
        program.shows("stopped")
        assert time.monotonic() - before < 2.0
        program.send("zebra")
        program.shows("zebra")  # a word that no answer has: it has been typed
        program.send("\x03")
        program.until(lambda: "cleared" in program.text)
        program.send("\x03")
        program.shows("ctrl+c again to leave")
        program.send("\x03")
        assert program.ended() == 0


@pytest.mark.parametrize("key", ["\x1b[Z", "\x1b[17~"], ids=["shift+tab", "f6"])
def test_the_mode_key_works_in_mid_answer(key: str) -> None:
    with PtyProgram(size=(120, 30), options=SLOW) as program:
        started(program)
        program.send(key)
        program.until(lambda: "compact" in program.rows[-1] and "->" not in program.rows[-1])
        program.shows("  compact")
        program.send("\x1b")
        program.shows("stopped")


def test_a_pasted_text_is_not_sent() -> None:
    with PtyProgram() as program:
        program.shows("ready")
        program.send("\x1b[200~one\rtwo\r\x1b[201~")
        program.shows("two")
        program.read(0.3)
        assert "answering" not in program.text
        program.send("\r")
        program.shows("short answer")


WIDE = (
    "שלום `code` 123 עולם\n- مرحبا\n- بالعالم\n👨‍👩‍👧 family and 1️⃣ keycap 👋🏽 🇫🇷 flag\n"
    "ภาษาไทย ที่นี่\nＦＵＬＬ ｗｉｄｔｈ 你好世界\ne\u0301\u0302 a\u0323\u0308 z\u0351\u0352 marks\n"
)


def test_wide_and_right_to_left_text_moves_no_border() -> None:
    text = (WIDE * 3).strip()
    with PtyProgram(size=(110, 40), options={"text": text, "tokens_per_second": 500}) as program:
        program.shows("ready")
        program.send(WIDE.split("\n")[3] + "\r")
        program.shows("complete")
        program.send("\x1bOR")
        program.shows("corrections bold")
        program.read(0.2)
        rows = [program.screen.buffer[y] for y in range(40)]
        backgrounds = [[row[x].bg for x in (0, 68, 69, 70, 71, 109)] for row in rows[1:37]]
        assert all(each == backgrounds[0] for each in backgrounds), "the panel's edge moved"
        for words in ("keycap", "flag", "marks", "FULL".translate({c: c + 0xFEE0 for c in range(33, 127)})):
            assert words in program.text


INDIAN = "हिन्दी भाषा में कुछ शब्द यहाँ हैं और यह पंक्ति लंबी है ताकि वह टूटे "


def test_signs_that_take_a_cell_on_some_terminals_move_no_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator gives vowel signs the cell that tmux and xterm give them."""

    def cells(character: str) -> int:
        return 1 if unicodedata.category(character) == "Mc" else wcwidth.wcwidth(character)

    monkeypatch.setattr("ui.pty_program.wcwidth", cells)
    monkeypatch.setattr("pyte.screens.wcwidth", cells)
    with PtyProgram((110, 30), options={"text": f"{INDIAN}\n" * 4 + INDIAN * 3, "tokens_per_second": 500}) as program:
        program.shows("ready")
        program.send("question\r")
        program.shows("complete")
        program.send("\x1bOP")
        program.shows("this help")
        program.send("\x1b")
        program.until(lambda: "this help" not in program.text and "complete" in program.text)
        program.read(0.3)
        rows = [program.screen.buffer[y] for y in range(1, 27)]
        assert len({tuple(row[x].bg for x in (69, 70, 71, 109)) for row in rows}) == 1, "the panel's edge moved"
        shown = "".join("".join(row[x].data for x in range(68)).rstrip() for row in rows)
        assert shown.count("टूटे") == 7, "the ends of rows are covered by the panel"


def test_model_text_never_reaches_the_terminal_as_control() -> None:
    hostile = "\x1b]0;owned\x07\x1b[?1049l\x1b[31m\x9b2J\x1bc done"
    with PtyProgram(options={"text": hostile}, config={"label": hostile}) as program:
        program.shows("ready")
        program.send("\x1b[200~" + hostile.replace("\x1b", "\x1b") + "\x1b[201~\r")
        program.shows("complete")
        assert b"owned\x07" not in program.raw and b"\x1bc" not in program.raw and b"\xc2\x9b" not in program.raw
        assert program.mode_is_on(1049)


@pytest.mark.parametrize(
    ("name", "value", "sequence"),
    [("TMUX", "/tmp/x,1,0", b"\x1bPtmux;\x1b\x1b]52;c;"), ("SSH_TTY", "/dev/pts/9", b"\x1b]52;c;")],
)
def test_copy_reaches_the_terminal(name: str, value: str, sequence: bytes) -> None:
    with PtyProgram(environment={name: value}, options={"tokens_per_second": 500}) as program:
        program.shows("ready")
        program.send("short\r")
        program.shows("complete")
        program.send("/copy\r")
        program.shows("OSC 52")
        assert sequence + b"SGVsbG8gdGhlcmU" in program.raw


def test_keys_are_quick_while_an_answer_streams() -> None:
    with PtyProgram(options={"tokens_per_second": 300}) as program:
        started(program)
        waits = []
        for number in range(30):
            letter = "abcdefghij"[number % 10]
            before = time.monotonic()
            shown = program.rows[-2].count(letter)
            program.send(letter)
            program.until(lambda shown=shown, letter=letter: program.rows[-2].count(letter) > shown, 20)
            waits.append(time.monotonic() - before)
            program.read(0.03)
        assert statistics.median(waits) < 0.25 and statistics.quantiles(waits, n=20)[-1] < 1.5, waits


def test_small_ascii_colourless_terminal() -> None:
    config = {"ascii": True, "color": "never"}
    with PtyProgram(size=(40, 12), config=config, options={"tokens_per_second": 500}) as program:
        program.shows("ready")
        program.send("short\r")
        program.shows("complete")
        assert all(row.isascii() for row in program.rows)
        assert b"38;2" not in program.raw and b"48;2" not in program.raw and b"38;5" not in program.raw


def test_no_color_in_the_environment_is_honoured() -> None:
    with PtyProgram(environment={"NO_COLOR": ""}, options={"tokens_per_second": 500}) as program:
        program.shows("ready")
        program.send("short\r")
        program.shows("complete")
        assert b"38;2" not in program.raw and b"48;2" not in program.raw


def test_resizing_in_mid_answer() -> None:
    import fcntl
    import struct
    import termios

    with PtyProgram(options={"tokens_per_second": 300}) as program:
        started(program)
        fcntl.ioctl(program.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
        program.screen.resize(12, 40)
        os.killpg(program.process.pid, signal.SIGWINCH)
        program.read(1.0)
        assert "static" in program.rows[11]
        program.send("\x1b")
        program.shows("stopped")
