"""Slash commands, shared by the TUI and the line REPL: what they are called, and what each one does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparkchat.errors import UsageError
from sparkchat.options import unknown
from sparkchat.params import MODES, Mode, SamplingParams
from sparkchat.paths import typed_path
from sparkchat.ui.clipboard import code_blocks, is_too_long
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.export import OF_TRACE, export_chat, export_wish
from sparkchat.ui.safe_text import in_columns
from sparkchat.ui.trace_sink import TraceSink


class ChatFront(Protocol):
    """What a command may do to the screen and the engine."""

    conversation: Conversation
    trace: TraceSink

    def say(self, text: str) -> None: ...
    def help_text(self) -> str: ...
    def stats_text(self) -> str: ...
    def change_mode(self, mode: Mode) -> None: ...
    def mode_text(self) -> str: ...
    def sampling_changed(self, before: SamplingParams) -> str:
        """The sampling options are others now; returns from when on they hold, as the rest of a sentence."""
        ...

    def think_changed(self) -> str: ...
    def set_stats(self, shown: bool) -> None: ...
    def show_thinking(self, shown: bool) -> None: ...
    def new_chat(self) -> None: ...
    def regenerate(self) -> None: ...
    def edit(self, number: int | None) -> None: ...
    def fork(self, number: int | None) -> None: ...
    def branch(self, number: int | None) -> None: ...
    def load(self, word: str) -> None: ...
    def list_chats(self, words: str) -> None: ...
    def keep_chats(self, kept: bool) -> None: ...
    def copy(self, text: str) -> None: ...
    def export_trace(self, path: Path, name: str | None) -> None:
        """Make a file from the trace, in the format of that name or of the ending."""
        ...

    def compare(self) -> None: ...
    def inspect(self) -> None: ...
    def on_screen(self, action: str) -> None:
        """Do what a key of the full screen does. Raises UsageError where there is no screen."""
        ...

    def search_history(self, words: str) -> None: ...
    def restart_engine(self) -> None: ...
    def quit(self) -> None: ...


@dataclass(frozen=True)
class Command:
    """One slash command."""

    name: str
    usage: str
    help: str
    run: Callable[[ChatFront, str], None]
    aliases: tuple[str, ...] = ()


_LONG_COMMAND = re.compile(r"/system\s", re.IGNORECASE)
_ADVICE = "; /help lists all, and // begins a message that starts with a slash"

STATS_DEFINITIONS = (
    "tok/s: tokens after the first over the time since the first (now: over the last second)\n"
    "speed-up: tokens a second over those of plain decoding, one token per plain step of the cost table\n"
    "acceptance length: tokens kept per step, the target's own bonus token included; 1.0 = no draft was accepted\n"
    "verify length: drafts handed to the target in a step; rows = verify length + 1\n"
    "survival (bar): chance that a position and all before it are accepted; confidence (tick): the position alone\n"
    "step ms: measured / predicted from the cost table (- = not measured)\n"
    "idle: share of the last second in which no step ran; on a GPU, in which it had nothing to do between steps\n"
    "spared: rows of the block that compact did not hand over, and the cache bytes they would have taken\n"
    "lost: drafts that the cut threw away although the target agreed; only cap-accept can know\n"
    "calibration: mean survival -> the share of drafts really reached, and the mean gap over 20 bins (ECE)"
)


def is_command(text: str) -> bool:
    """One line that starts with a slash, or a system text of several; ``//`` begins a text that starts with one."""
    if "\n" in text.strip():
        return _LONG_COMMAND.match(text) is not None
    return text.startswith("/") and not text.startswith("//")


def is_known_command(text: str) -> bool:
    """A line that runs a command: ``/tmp/notes`` runs none."""
    return is_command(text) and _words(text)[0] in _BY_WORD


def without_escape(text: str) -> str:
    """What a text that is no command says. In several lines, such as code, a slash needs no second one."""
    is_escaped = text.startswith("//") and ("\n" not in text.strip() or is_command(text[1:]))
    return text[1:] if is_escaped else text


def as_typed(message: str) -> str:
    """The text that says ``message`` when it is sent."""
    needs_escape = message.startswith("/") and ("\n" not in message.strip() or is_command(message))
    return f"/{message}" if needs_escape else message


def _words(line: str) -> tuple[str, str]:
    """The command's name in small letters, and what follows it."""
    name, *rest = line.strip()[1:].strip().split(maxsplit=1) or [""]
    return name.lower(), rest[0] if rest else ""


def run_command(line: str, front: ChatFront) -> None:
    """Run a command. Raises UsageError for an unknown command or argument."""
    word, argument = _words(line)
    command = _BY_WORD.get(word)
    if command is None:
        raise UsageError(unknown("command", f"/{word}", [f"/{name}" for name in _BY_WORD]) + _ADVICE)
    command.run(front, argument)


def completions(text: str) -> list[str]:
    """Commands that begin with what was typed."""
    return [f"/{command.name}" for command in COMMANDS if f"/{command.name}".startswith(text)]


def command_rows() -> list[tuple[str, str]]:
    return [(command.usage, command.help) for command in COMMANDS]


def command_table(width: int) -> str:
    return in_columns(command_rows(), width)


def _help(front: ChatFront, argument: str) -> None:
    front.say(STATS_DEFINITIONS if argument == "stats" else front.help_text())


def _mode(front: ChatFront, argument: str) -> None:
    if not argument:
        front.say(f"{front.mode_text()}; /mode NAME sets it: {', '.join(MODES)}")
        return
    if argument not in MODES:
        raise UsageError(unknown("mode", argument, MODES))
    front.change_mode(argument)


def _stats(front: ChatFront, argument: str) -> None:
    if argument in ("on", "off"):
        front.set_stats(argument == "on")
    elif argument:
        raise UsageError(f"/stats {argument} is unknown; give on, off or nothing")
    else:
        front.say(front.stats_text())


_SWITCHES: dict[str, Callable[[ChatFront], None]] = {
    "history": lambda front: front.keep_chats(True),
    "nohistory": lambda front: front.keep_chats(False),
    "verbose": lambda front: front.set_stats(True),
    "quiet": lambda front: front.set_stats(False),
    "think": lambda front: _think(front, "on"),
    "nothink": lambda front: _think(front, "off"),
}
"""Words of ``/set`` that take no value, as users of ollama know them."""


def _set(front: ChatFront, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name in _SWITCHES and not value.strip():
        _SWITCHES[name](front)
        if name.endswith("history"):
            front.say("prompts and chats are kept" if name == "history" else "nothing more is kept of this chat")
        return
    options = front.conversation.options()
    if not name:
        front.say("\n".join(f"{key} = {_value(each)}" for key, each in options.items()))
        return
    key = name.replace("-", "_")
    if value.strip():
        before = front.conversation.sampling
        front.conversation.set_option(name, value.strip())
        options = front.conversation.options()
        when = front.sampling_changed(before)
        front.say(f"{key} = {_value(options[key])}{when}")
        return
    if key not in options:
        raise UsageError(unknown("option", name, [*options, *_SWITCHES]))
    front.say(f"{key} = {_value(options[key])}")


def _value(value: object) -> str:
    return "none" if value is None else str(value)


def _system(front: ChatFront, argument: str) -> None:
    if argument:
        front.conversation.refuse_fixed("system", "/system")
        front.conversation.system = None if argument.lower() == "none" else argument
    system = front.conversation.system
    front.say(f"system text: {system if system else 'none'}; /system TEXT sets it, /system none takes it away")


def _think(front: ChatFront, argument: str) -> None:
    if argument in ("show", "hide"):
        front.show_thinking(argument == "show")
        return
    choices: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
    conversation, levels = front.conversation, front.conversation.efforts
    if argument and argument not in (*choices, *levels):
        raise UsageError(f"/think {argument} is unknown; give {', '.join((*choices, *levels))}, show or hide")
    when = ""
    if argument:
        conversation.refuse_fixed("think", "/think")
        if argument not in ("on", "off"):
            conversation.refuse_fixed("reasoning_effort", f"/think {argument}")
            conversation.reasoning_effort = argument if argument in levels else None
        conversation.think = choices.get(argument, True)
        when = front.think_changed()
    now = {True: "on", False: "off", None: "auto (the model's template decides)"}[conversation.think]
    effort = conversation.reasoning_effort if conversation.think is not False else None
    front.say(f"thinking: {now}{f', effort {effort}' if effort else ''}{when}")


def _copy(front: ChatFront, argument: str) -> None:
    answers = [turn.answer.text for turn in front.conversation.turns if turn.answer.text]
    if not answers:
        raise UsageError("/copy has nothing to copy: there is no answer yet")
    word, _, number = argument.partition(" ")
    if word == "code":
        text = _code(answers[-1], number.strip())
    elif argument:
        if not argument.isdigit() or not 1 <= int(argument) <= len(answers):
            raise UsageError(f"/copy {argument} is not possible; give 1 (the last answer) to {len(answers)}, or code")
        text = answers[-int(argument)]
    else:
        text = answers[-1]
    if is_too_long(text):
        raise UsageError(f"{len(text)} characters are too many for a terminal's clipboard; use /export FILE")
    front.copy(text)


def _code(answer: str, number: str) -> str:
    """A code block of the answer: the one of that number, or the last."""
    blocks = code_blocks(answer)
    if not blocks:
        raise UsageError("/copy code found no code block in the last answer; /copy takes the whole answer")
    if not number:
        return blocks[-1]
    if not number.isdecimal() or not 1 <= int(number) <= len(blocks):
        raise UsageError(f"/copy code {number} is not possible; give 1 to {len(blocks)}, or nothing for the last")
    return blocks[int(number) - 1]


def _numbered(
    action: Callable[[ChatFront], Callable[[int | None], None]], name: str
) -> Callable[[ChatFront, str], None]:
    """A command that takes a number or nothing."""

    def run(front: ChatFront, argument: str) -> None:
        if argument and not (argument.isdecimal() and len(argument) < 9):
            raise UsageError(f"/{name} {argument} is not possible; give a number, or nothing")
        action(front)(int(argument) if argument else None)

    return run


def _trace(front: ChatFront, argument: str) -> None:
    if argument == "off":
        path = front.trace.close()
        front.say(f"trace closed: {path}" if path else "no trace is being written")
    elif argument:
        front.trace.open(typed_path(argument))
        front.say(f"trace: {front.trace.path}")
    else:
        path = front.trace.path
        front.say(f"trace: {path}; /trace off ends it" if path else "no trace is being written; /trace FILE starts one")


def _export(front: ChatFront, argument: str) -> None:
    path, name = export_wish(argument)
    if name is not None or path.suffix.lower() in OF_TRACE:
        front.export_trace(path, name)
    else:
        front.say(export_chat(front.conversation, path))


def _chats(front: ChatFront, argument: str) -> None:
    front.list_chats(argument)


def _history(front: ChatFront, argument: str) -> None:
    front.search_history(argument)


def _load(front: ChatFront, argument: str) -> None:
    front.load(argument)


def _no_argument(action: Callable[[ChatFront], None], name: str) -> Callable[[ChatFront, str], None]:
    def run(front: ChatFront, argument: str) -> None:
        if argument:
            raise UsageError(f"/{name} takes nothing after it; got {argument!r}")
        action(front)

    return run


def _on_screen(action: str, name: str) -> Callable[[ChatFront, str], None]:
    return _no_argument(lambda front: front.on_screen(action), name)


COMMANDS: Sequence[Command] = (
    Command("help", "/help, /?", "keys and commands; /? stats explains the numbers", _help, ("?",)),
    Command("mode", "/mode [NAME]", "verify mode: off, static, compact or cap-accept, from the next step on", _mode),
    Command("stats", "/stats [on|off]", "numbers of the session; on or off shows or hides them", _stats),
    Command(
        "set", "/set [OPTION [VALUE]]", "sampling options, from the next step on; or nohistory, verbose, quiet", _set
    ),
    Command("system", "/system [TEXT|none]", "system text for the next answers", _system),
    Command(
        "think",
        "/think [on|off|auto|LEVEL|show|hide]",
        "let the model think, as much as a level says where it has levels; show or hide what it thought",
        _think,
    ),
    Command("new", "/new", "start a new chat", _no_argument(lambda front: front.new_chat(), "new"), ("clear",)),
    Command(
        "regen", "/regen", "answer the last question again", _no_argument(lambda front: front.regenerate(), "regen")
    ),
    Command(
        "edit",
        "/edit [N]",
        "change the last question, or question N, and ask again; the old branch stays",
        _numbered(lambda front: front.edit, "edit"),
    ),
    Command(
        "fork",
        "/fork [N]",
        "go on from behind answer N on a branch of its own",
        _numbered(lambda front: front.fork, "fork"),
    ),
    Command(
        "branch",
        "/branch [N]",
        "go to the next branch of this chat, or to branch N",
        _numbered(lambda front: front.branch, "branch"),
    ),
    Command("copy", "/copy [N|code [K]]", "copy the N-th last answer, or its last or K-th code block", _copy),
    Command("trace", "/trace [FILE|off]", "record every step from here on into a new file", _trace),
    Command(
        "export",
        "/export [FORMAT] FILE",
        "save the chat as .md or .json, or its trace as .html, .csv, .svg or in a format of trace convert",
        _export,
    ),
    Command(
        "compare",
        "/compare",
        "the last question again under every mode, same seed, side by side",
        _no_argument(lambda front: front.compare(), "compare"),
    ),
    Command("tokens", "/tokens", "token colours on or off", _on_screen("toggle_origins", "tokens")),
    Command("stop", "/stop", "stop the answer", _on_screen("stop", "stop")),
    Command("history", "/history [WORDS]", "the newest message that holds these words, to send it again", _history),
    Command("editor", "/editor", "write in $VISUAL or $EDITOR", _on_screen("editor", "editor")),
    Command(
        "inspect", "/inspect", "the steps of the last answer", _no_argument(lambda each: each.inspect(), "inspect")
    ),
    Command("chats", "/chats [WORDS]", "kept chats, newest first, or those with these words", _chats, ("list",)),
    Command("load", "/load [N|ID]", "go on with a kept chat; with the engine stopped: start it", _load),
    Command(
        "restart",
        "/restart",
        "start the engine again",
        _no_argument(lambda front: front.restart_engine(), "restart"),
    ),
    Command("quit", "/quit", "leave", _no_argument(lambda front: front.quit(), "quit"), ("exit", "bye", "q")),
)

_BY_WORD = {word: command for command in COMMANDS for word in (command.name, *command.aliases)}
