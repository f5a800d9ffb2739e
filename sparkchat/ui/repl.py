"""The chat as lines: for terminals without a screen, for ``--plain``, and for scripts that talk in turns."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sparkchat.client import EngineClient
from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, Terminated, UsageError
from sparkchat.params import Mode, SamplingParams
from sparkchat.paths import user_paths
from sparkchat.ui.answering import Answerer, Signals
from sparkchat.ui.bridge import Engine, Event
from sparkchat.ui.chats import ChatKeeper, ChatStore
from sparkchat.ui.clipboard import copied_message, fill_tmux_buffer, osc52
from sparkchat.ui.commands import as_typed, command_table, is_command, run_command, without_escape
from sparkchat.ui.compare import Comparison
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.export import begin_trace_export
from sparkchat.ui.line_reader import LineReader
from sparkchat.ui.progress import LoadingLine, use_color
from sparkchat.ui.safe_text import TerminalFilter, visible
from sparkchat.ui.stats import result_line
from sparkchat.ui.trace_sink import TraceSink

MOST_SHOWN = 20
"""Chats that are listed at once."""
_HELP = (
    'a trailing \\ continues the line; """ begins and ends a text of several lines\n'
    "ctrl+c stops an answer; ctrl+d leaves"
)


def run_repl(config: RunConfig, make_engine: Callable[[], Engine] | None = None) -> int:
    """Chat line by line until ctrl+d; returns the exit code. Raises SparkchatError when the engine cannot load."""
    trace = TraceSink(config.argv)
    if config.trace_path is not None:
        trace.open(config.trace_path, config.trace_force)
    with Signals() as signals:
        repl = Repl(config, make_engine or (lambda: EngineClient(config.spec)), trace, signals)
        try:
            return repl.run()
        except Terminated:
            return signals.exit_code or Terminated.exit_code
        finally:
            repl.end()
            trace.close()


class Repl:
    """Reads lines, runs commands, prints answers."""

    def __init__(
        self, config: RunConfig, make_engine: Callable[[], Engine], trace: TraceSink, signals: Signals
    ) -> None:
        self.conversation = Conversation(config)
        self.trace = trace
        self._config = config
        self._make_engine = make_engine
        self._signals = signals
        self._loading = LoadingLine(config)
        self._engine: Engine | None = None
        self._answerer: Answerer | None = None
        # A session that is piped in is a script's, and leaves nothing behind.
        self._keeper = ChatKeeper(
            ChatStore(user_paths().sessions), self.conversation, config.spec.name, is_on=sys.stdin.isatty()
        )
        self._is_terminal = sys.stdout.isatty()
        self._dim = ("\x1b[2m", "\x1b[0m") if use_color(config, sys.stdout) else ("", "")
        self._shows_stats = True
        self._shows_thinking = False
        self._wants_quit = False
        self._crash: EngineCrash | None = None
        self._reader = LineReader()

    def run(self) -> int:
        for sentence in self._config.notices:
            self._loading.note(sentence)
        if self._config.resume is not None:
            self.load(self._config.resume or "last")
        try:
            self._load()
        except KeyboardInterrupt:
            return self._signals.exit_code or 130
        for line in self._prompts():
            try:
                self._take(line)
            except SparkchatError as error:
                self.say(error.message)
            if self._signals.exit_code not in (None, 130):
                return self._signals.exit_code or 0
            if self._wants_quit:
                break
        if self._crash is not None:
            raise self._crash
        return 0

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = self._answerer = None

    def end(self) -> None:
        self.close()
        self._keeper.close()

    # Reading

    def _prompts(self) -> Iterator[str]:
        """Complete inputs until the end of input; ctrl+c drops what was begun."""
        while True:
            try:
                text = self._reader.read()
            except KeyboardInterrupt:
                self._signals.forget()
                self._write("\n")
                self.say("nothing is being answered; ctrl+d or /quit leaves")
                continue
            except UsageError as error:
                self.say(error.message)
                continue
            if text is None:
                if self._reader.is_interactive:
                    self._write("\n")
                return
            if text.strip():
                yield text

    def _take(self, text: str) -> None:
        self._signals.forget()
        self._reader.history.add(text)
        if is_command(text):
            run_command(text, self)
        else:
            self._ask(without_escape(text))

    # Answering

    def _load(self) -> None:
        self.close()
        self._engine = self._make_engine()
        answerer = Answerer(self._engine, self.trace, self._signals, self._loading.note)
        info = answerer.load(self._loading.show)
        self._loading.clear()
        self._answerer = answerer
        self.conversation.efforts = tuple(info.get("reasoning_efforts") or ())
        if info.get("mode_fixed"):
            self.conversation.mode = info["mode"]
            self._loading.note(info["mode_fixed"])
        elif not info.get("drafter"):
            self.conversation.mode = "off"
        elif self.conversation.mode != info["mode"]:
            self._engine.set_mode(self.conversation.mode)
        for sentence in info.get("notices") or ():
            self._loading.note(sentence)
        if info.get("reason_off"):
            self._loading.note(f"no speculation: {info['reason_off']}")

    def _ask(self, prompt: str) -> None:
        if self._answerer is None:
            self._loading.note("starting the engine again")
            self._load()
        assert self._answerer is not None
        turn = self.conversation.ask(prompt)
        self._keeper.question(turn)
        request = self.conversation.request(turn)
        printer = _AnswerPrinter(self._write, self._config.ascii, self._is_terminal, self._shows_thinking, self._dim)
        try:
            end = self._answerer.answer(request, printer.take)
        except EngineCrash as crash:
            turn.answer.result = getattr(crash, "result", None)
            self.close()
            self._crash = crash
            raise EngineCrash(f"{crash.message}; send a message to start it again") from None
        finally:
            printer.close()
            turn.answer.text, turn.answer.thinking = printer.answer, printer.thinking
            turn.seed = printer.seed
            turn.answer.was_stopped = True
            self._keeper.answer(turn)
            self._say_problem()
        self._crash = None
        turn.answer.result = end["result"]
        turn.answer.was_stopped = end["result"]["finish_reason"] == "cancelled"
        self._keeper.answer(turn)
        if self._shows_stats:
            self._write(f"{self._dim[0]}{visible(result_line(end['result']))}{self._dim[1]}\n")

    # What commands may do

    def say(self, text: str) -> None:
        self._write(visible(text, self._config.ascii) + "\n")

    def help_text(self) -> str:
        width = shutil.get_terminal_size().columns if self._is_terminal else 100
        return f"{command_table(width)}\n{_HELP}"

    def stats_text(self) -> str:
        lines = [
            f"{n}: {result_line(t.answer.result)}" for n, t in enumerate(self.conversation.turns, 1) if t.answer.result
        ]
        return "\n".join(lines) or "no answer yet"

    def mode_text(self) -> str:
        return f"mode: {self.conversation.mode}"

    def change_mode(self, mode: Mode) -> None:
        info = self._answerer.info if self._answerer else {}
        self._refuse_fixed_mode(info)
        if mode != "off" and info and not info.get("drafter"):
            raise UsageError(
                f"mode {mode} needs a drafter: {info.get('reason_off') or 'none is loaded'}; use --drafter"
            )
        if self._engine is not None:
            self._engine.set_mode(mode)
        self.conversation.mode = mode
        self.say(self.mode_text())

    @staticmethod
    def _refuse_fixed_mode(info: Event) -> None:
        if info.get("mode_fixed"):
            raise UsageError(f"the mode cannot be changed here: {info['mode_fixed']}")

    def set_stats(self, shown: bool) -> None:
        self._shows_stats = shown

    def show_thinking(self, shown: bool) -> None:
        self._shows_thinking = shown

    def new_chat(self) -> None:
        self.conversation.clear()
        self._keeper.new()
        self.say("new chat")

    def regenerate(self) -> None:
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/regen has nothing to answer again: the chat is empty")
        self._ask(prompt)

    def edit(self, number: int | None) -> None:
        turn = self.conversation.turn_at(number, "/edit")
        self._reader.prefill(as_typed(turn.prompt))
        self.conversation.cut(self.conversation.turns.index(turn))
        self._keeper.moved()

    def fork(self, number: int | None) -> None:
        turn = self.conversation.turn_at(number, "/fork")
        self.conversation.cut(self.conversation.turns.index(turn) + 1)
        self._keeper.moved()
        self.say("the next question goes on from here; the other branch is kept (/branch)")

    def branch(self, number: int | None) -> None:
        self.conversation.go_to(self.conversation.branch_at(number))
        self._keeper.moved()
        self._say_chat()

    def load(self, word: str) -> None:
        if not word:
            if self._answerer is None:
                self.restart_engine()
            else:
                self.list_chats("")
            return
        chat = self._keeper.open(self._keeper.store.find(word))
        if chat.num_damaged:
            self.say(f"{chat.num_damaged} lines of this chat could not be read and are left out")
        self._say_chat()
        self._say_problem()

    def list_chats(self, words: str) -> None:
        entries = self._keeper.store.entries(words)
        now = time.time()
        lines = [entry.line(number, now) for number, entry in enumerate(entries[:MOST_SHOWN], 1)]
        more = [f"... {len(entries) - MOST_SHOWN} more; /chats WORDS searches"] if len(entries) > MOST_SHOWN else []
        known = "/load N goes on with one" if not words else "/load ID goes on with one"
        if words:
            lines = [f"{entry.id}  {line[5:]}" for entry, line in zip(entries, lines, strict=False)]
        self.say("\n".join([*lines, *more, known]) if lines else "no kept chat" + (" holds that" if words else ""))

    def keep_chats(self, kept: bool) -> None:
        self._keeper.set_on(kept)
        self._reader.history.is_kept = kept

    def sampling_changed(self, before: SamplingParams) -> str:
        return ""

    def think_changed(self) -> str:
        return ""

    def _say_chat(self) -> None:
        """The present line of the chat, as it would have been printed."""
        for turn in self.conversation.turns:
            self._write(f"{self._dim[0]}>>> {visible(turn.prompt, self._config.ascii)}{self._dim[1]}\n")
            if turn.answer.text:
                self.say(turn.answer.text)

    def _say_problem(self) -> None:
        problem, self._keeper.problem = self._keeper.problem, None
        if problem:
            self._loading.note(problem)

    def copy(self, text: str) -> None:
        if not self._is_terminal:
            raise UsageError("/copy needs a terminal on stdout; use /export FILE")
        self._write(osc52(text))
        self.say(copied_message(text, in_tmux=fill_tmux_buffer(text)))

    def export_trace(self, path: Path, name: str | None) -> None:
        """ctrl+c stops it."""
        job = begin_trace_export(self.trace.path, path, name, lambda _: None)
        self._signals.is_noting = True
        try:
            while not job.wait(0.1):
                if self._signals.count:
                    job.stop()
        finally:
            self._signals.is_noting = False
            job.close()
        self.say(job.text)

    def compare(self) -> None:
        """The last question under every mode; ctrl+c ends the comparison."""
        turn = self.conversation.turns[-1] if self.conversation.turns else None
        if turn is None or not turn.answer.result or self._answerer is None:
            raise UsageError("/compare needs an answer to run again: ask something first")
        self._refuse_fixed_mode(self._answerer.info)
        if not self._answerer.info.get("drafter"):
            raise UsageError("/compare needs a drafter: without one there is nothing to compare")
        comparison = Comparison(self.conversation.request_again(turn), turn.seed)
        while (request := comparison.current) is not None:
            self.say(comparison.progress)
            comparison.take_end(self._answerer.answer(request, lambda event: None)["result"])
            if self._signals.exit_code is not None:
                self.say("comparison stopped")
                return
        self.say(comparison.table())

    def on_screen(self, action: str) -> None:
        raise UsageError("that needs the full screen; run without --plain in a terminal")

    def search_history(self, words: str) -> None:
        found = [line for line in self._reader.history.entries if words.lower() in line.lower()]
        found = [line for line in found if not line.startswith("/history")][-MOST_SHOWN:]
        self.say("\n".join(found) if found else "nothing in the history" + (" holds that" if words else ""))

    def inspect(self) -> None:
        raise UsageError("the step inspector needs the full screen; --trace FILE records every step")

    def restart_engine(self) -> None:
        self._load()
        self.say("the engine is ready")

    def quit(self) -> None:
        self._wants_quit = True

    def _write(self, text: str) -> None:
        if self._is_terminal:
            sys.stdout.write(text)
        else:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.flush()


class _AnswerPrinter:
    """Writes the text of one answer as it comes, and keeps it."""

    def __init__(
        self,
        write: Callable[[str], None],
        ascii_only: bool,
        is_terminal: bool,
        shows_thinking: bool,
        dim: tuple[str, str],
    ) -> None:
        self._write = write
        self._filter = TerminalFilter(ascii_only) if is_terminal else None
        self._shows_thinking = shows_thinking
        self._dim = dim
        self._parts: dict[str, list[str]] = {"answer": [], "thinking": []}
        self._channel = "answer"
        self.seed: int | None = None

    @property
    def answer(self) -> str:
        return "".join(self._parts["answer"])

    @property
    def thinking(self) -> str:
        return "".join(self._parts["thinking"])

    def take(self, event: Event) -> None:
        if event["event"] == "start":
            self.seed = (event.get("sampling") or {}).get("seed")
        if event["event"] != "delta" or not event.get("text"):
            return
        channel = event.get("channel", "answer")
        self._parts.setdefault(channel, []).append(event["text"])
        text = self._filter.feed(event["text"]) if self._filter else event["text"]
        if channel == "thinking":
            first = (
                ""
                if self._channel == "thinking"
                else f"{self._dim[0]}thinking{'' if self._shows_thinking else ' ...'}\n"
            )
            self._write(f"{first}{text if self._shows_thinking else ''}")
        else:
            self._write(f"{self._end_thinking()}{text}")
        self._channel = channel

    def _end_thinking(self) -> str:
        return f"{self._dim[1]}\n" if self._channel == "thinking" else ""

    def close(self) -> None:
        held = self._filter.flush() if self._filter else ""
        self._write(f"{held}{self._end_thinking()}\n")
