"""The small parts behind both chats: conversation, history, clipboard, code blocks, commands."""

from __future__ import annotations

import base64
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparkchat.errors import UsageError
from sparkchat.ui.clipboard import MAX_BYTES, code_blocks, copied_message, is_too_long, osc52
from sparkchat.ui.commands import COMMANDS, as_typed, completions, is_command, run_command, without_escape
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.graphemes import next_boundary, previous_boundary
from sparkchat.ui.history import History
from sparkchat.ui.keymap import load_keymap
from sparkchat.ui.prompt_text import decoded, encoded, shown_line
from sparkchat.ui.safe_text import text_width
from ui.chat import make_config


def test_a_failed_question_is_not_part_of_what_was_said() -> None:
    talk = Conversation(make_config())
    turn = talk.ask("too long")
    turn.answer.result = {"finish_reason": "error", "error": "does not fit"}
    talk.ask("short")
    assert talk.messages == ({"role": "user", "content": "short"},)


def test_raw_text_is_sent_as_it_is() -> None:
    talk = Conversation(make_config(raw=True, system="ignored"))
    request = talk.request(talk.ask("  exact \n"))
    assert (request.prompt, request.raw, request.messages, request.system) == ("  exact \n", True, None, None)


def test_settings_apply_to_the_next_request_and_wrong_ones_change_nothing() -> None:
    talk = Conversation(make_config(system="one", think=False))
    talk.set_option("top-k", "7")
    talk.set_option("stop", "END")
    talk.set_option("max_tokens", "none")
    for name, value in (("top_k", "-1"), ("nonsense", "1"), ("temperature", "hot"), ("top_p", "none")):
        with pytest.raises(UsageError):
            talk.set_option(name, value)
    request = talk.request(talk.ask("x"))
    assert (request.sampling.top_k, request.sampling.stop, request.sampling.max_tokens) == (7, ("END",), None)
    assert (request.system, request.think) == ("one", False)


def test_history_is_private_and_survives_damage(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    past = History(path)
    for text in ("one", "two\nlines", "two\nlines", "   "):
        past.add(text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n{"a": 1}\n"half')
    assert History(path).entries == ["one", "two\nlines"]
    assert History(tmp_path / "state").entries == []


def test_history_walks_back_and_forth() -> None:
    past = History(None)
    past.add("a")
    past.add("b")
    assert [past.older("draft"), past.older("b"), past.older("a")] == ["b", "a", None]
    assert [past.newer(), past.newer(), past.newer()] == ["b", "draft", None]
    assert past.search("A") == 0 and past.search("zz") is None


def test_osc52_carries_the_bytes_and_is_wrapped_for_tmux() -> None:
    plain, wrapped = osc52("ü\x1b", {}), osc52("ü\x1b", {"TMUX": "/tmp/t,1,0"})
    assert base64.b64decode(plain.removeprefix("\x1b]52;c;").removesuffix("\x07")).decode() == "ü\x1b"
    assert wrapped == f"\x1bPtmux;\x1b{plain}\x1b\\"
    assert is_too_long("x" * (MAX_BYTES + 1)) and not is_too_long("x")


def test_code_blocks_are_found_also_when_cut() -> None:
    assert code_blocks("a\n```py\nx\n\ny\n```\n~~~~\n```\n~~~~\n```\ncut") == ["x\n\ny", "```", "cut"]


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 20_000, ".".join("a" * 5_000) + " = 'f7'", "x = 1 " + "#" * 40_000, f"x = {'1' * 5000}", "="],
)
def test_a_keymap_that_cannot_be_read_is_left_out_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keymap.toml"
    path.write_text(text)
    keymap, said = load_keymap(path, ["mode.cycle"])
    assert keymap == {} and len(said) == 1 and said[0].startswith(f"{path} is not used: ")


@pytest.mark.parametrize("environment", [{}, {"TMUX": "/tmp/x,1,0"}, {"STY": "1.pts"}], ids=str)
def test_what_is_said_of_a_copy_fits_80_columns(environment: dict[str, str]) -> None:
    for in_tmux in (False, True):
        said = copied_message("x" * 99999, environment, in_tmux=in_tmux)
        assert said.startswith("99999 characters") and len(said) <= 78, said


def test_commands_complete_and_are_described() -> None:
    assert completions("/reg") == ["/regen"] and len(completions("/")) == len(COMMANDS)
    assert all(command.help and command.usage.startswith("/") for command in COMMANDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("//usr/bin", "/usr/bin"),
        ("///x", "//x"),
        ("// a remark\nint main();\n", "// a remark\nint main();\n"),
        ("/usr/bin/env\nand more", "/usr/bin/env\nand more"),
        ("// system\nrest", "// system\nrest"),
        ("//system a\nb", "/system a\nb"),
        ("plain", "plain"),
    ],
)
def test_what_is_no_command_is_said_as_it_was_written(text: str, message: str) -> None:
    assert not is_command(text) and without_escape(text) == message
    assert as_typed(message) == text


@pytest.mark.parametrize(
    "text", ["/system be brief", "/system be brief\nand kind", "/system\n\nbe brief\n", "/SYSTEM\ta\nb"]
)
def test_a_system_text_may_have_several_lines(text: str) -> None:
    said: list[str] = []
    front = SimpleNamespace(conversation=Conversation(make_config()), say=said.append)
    assert is_command(text)
    run_command(text, front)
    assert front.conversation.system == text.split(maxsplit=1)[1].strip() and said


@pytest.mark.parametrize(
    "text", ["a\x1b[31m\x00\x7f\x85\u202e\u2028b", "👨‍👩‍👧 1️⃣ 🇫🇷 👋🏽", "e\u0301 ก็ 好", "\u200d\ufe0f"]
)
def test_the_prompt_keeps_every_character_and_its_width(text: str) -> None:
    from rich.cells import cell_len

    kept = encoded(text)
    assert decoded(kept) == text and len(kept) == len(text)
    shown = shown_line(kept)
    assert len(shown) == len(kept)
    visible = shown.replace("\u034f", "")
    assert text_width(visible) == cell_len(kept)
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in shown)


def test_visible_characters_are_walked_the_same_both_ways() -> None:
    seen = ["a", "👨‍👩‍👧", "1️⃣", "🇫🇷", "🇩🇪", "👋🏽", "e\u0301\u0302", "ก็", "好", "\n"]
    text, forward, at = "".join(seen), [], 0
    while at < len(text):
        end = next_boundary(text, at)
        forward.append(text[at:end])
        at = end
    assert forward == seen
    backward = []
    while at > 0:
        start = previous_boundary(text, at)
        backward.append(text[start:at])
        at = start
    assert backward[::-1] == seen
