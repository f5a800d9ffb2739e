"""The chat as lines: for terminals without a screen, for ``--plain``, and for scripts that talk in turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from sparkchat.client import EngineClient
from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, Terminated, UsageError
from sparkchat.params import Mode
from sparkchat.paths import user_paths
from sparkchat.ui.answering import Answerer, Signals
from sparkchat.ui.bridge import Engine, Event
from sparkchat.ui.clipboard import copied_message, osc52
from sparkchat.ui.commands import command_table, completions, is_command, run_command, without_escape
from sparkchat.ui.compare import Comparison
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.history import History
from sparkchat.ui.progress import LoadingLine, use_color
from sparkchat.ui.safe_text import TerminalFilter, visible
from sparkchat.ui.stats import result_line
from sparkchat.ui.trace_sink import TraceSink

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
            repl.close()
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
        if not info.get("drafter"):
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
        self._crash = None
        turn.answer.result = end["result"]
        turn.seed = printer.seed
        turn.answer.was_stopped = end["result"]["finish_reason"] == "cancelled"
        if self._shows_stats:
            self._write(f"{self._dim[0]}{visible(result_line(end['result']))}{self._dim[1]}\n")

    # What commands may do

    def say(self, text: str) -> None:
        self._write(visible(text, self._config.ascii) + "\n")

    def help_text(self) -> str:
        return f"{command_table()}\n{_HELP}"

    def stats_text(self) -> str:
        lines = [
            f"{n}: {result_line(t.answer.result)}" for n, t in enumerate(self.conversation.turns, 1) if t.answer.result
        ]
        return "\n".join(lines) or "no answer yet"

    def mode_text(self) -> str:
        return f"mode: {self.conversation.mode}"

    def change_mode(self, mode: Mode) -> None:
        info = self._answerer.info if self._answerer else {}
        if mode != "off" and info and not info.get("drafter"):
            raise UsageError(
                f"mode {mode} needs a drafter: {info.get('reason_off') or 'none is loaded'}; use --drafter"
            )
        if self._engine is not None:
            self._engine.set_mode(mode)
        self.conversation.mode = mode
        self.say(self.mode_text())

    def set_stats(self, shown: bool) -> None:
        self._shows_stats = shown

    def show_thinking(self, shown: bool) -> None:
        self._shows_thinking = shown

    def new_chat(self) -> None:
        self.conversation.clear()
        self.say("new chat")

    def regenerate(self) -> None:
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/regen has nothing to answer again: the chat is empty")
        self._ask(prompt)

    def edit_last(self) -> None:
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/edit has nothing to change: the chat is empty")
        self._reader.prefill(prompt)

    def copy(self, text: str) -> None:
        if not self._is_terminal:
            raise UsageError("/copy needs a terminal on stdout; use /export FILE")
        self._write(osc52(text))
        self.say(copied_message(text))

    def compare(self) -> None:
        """The last question under every mode; ctrl+c ends the comparison."""
        turn = self.conversation.turns[-1] if self.conversation.turns else None
        if turn is None or not turn.answer.result or self._answerer is None:
            raise UsageError("/compare needs an answer to run again: ask something first")
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

    def inspect(self) -> None:
        raise UsageError("the step inspector needs the full screen; --trace FILE records every step")

    def restart_engine(self) -> None:
        self._load()
        self.say("the engine is ready")

    def quit(self) -> None:
        self._wants_quit = True

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
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


class LineReader:
    """Reads one input at a time, of one or more lines, with the terminal's line editing where there is one."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.history = History(user_paths().history if self.is_interactive else None)
        self._readline = None
        if self.is_interactive:
            import readline

            self._readline = readline
            for entry in self.history.entries:
                readline.add_history(entry.replace("\n", " "))
            readline.set_auto_history(True)
            readline.set_completer_delims(" ")
            readline.set_completer(_complete)
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")

    def prefill(self, text: str) -> None:
        """Put ``text`` into the next line to edit it."""
        readline = self._readline
        if readline is None:
            raise UsageError("/edit needs a terminal; send the changed question instead")

        def insert() -> None:
            readline.insert_text(text.replace("\n", " "))
            readline.set_startup_hook(None)

        readline.set_startup_hook(insert)

    def read(self) -> str | None:
        """The next input, or None at the end."""
        line = self._line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith('"""'):
            return self._block(line.lstrip()[3:])
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line("... ")
        lines.append(line or "")
        return "\n".join(lines)

    def _block(self, first: str) -> str | None:
        lines: list[str] = []
        line: str | None = first
        while line is not None:
            if line.rstrip().endswith('"""'):
                lines.append(line.rstrip()[:-3])
                break
            lines.append(line)
            line = self._line("... ")
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt if self.is_interactive else "")
        except EOFError:
            return None


def _complete(text: str, state: int) -> str | None:
    found = completions(text) if text.startswith("/") else []
    return found[state] if state < len(found) else None
