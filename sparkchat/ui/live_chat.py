"""The chat behind the full-screen app: what the engine's events do to the screen, and the user's wishes to both.

No key and no layout is known here; ``app.py`` has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, UsageError, error_from_name
from sparkchat.params import MODES, Mode
from sparkchat.ui.badge import badge_text
from sparkchat.ui.bridge import Batch, Bridge, Event, TextUpdate
from sparkchat.ui.commands import command_table, run_command
from sparkchat.ui.conversation import Conversation, Turn
from sparkchat.ui.document import Section
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.progress import loading_text
from sparkchat.ui.stats import Snapshot, number, result_line
from sparkchat.ui.trace_sink import TraceSink
from sparkchat.ui.widgets.bars import Badge, Part, PartsBar
from sparkchat.ui.widgets.step_panel import StepPanel
from sparkchat.ui.widgets.transcript import Transcript

DETACH_SECONDS = 0.4
"""A stopped answer is closed on the screen after this, even if the engine is still busy."""


class Desk(Protocol):
    """What the chat asks of the app around it."""

    def later(self, seconds: float, action: Any) -> None: ...
    def leave(self, code: int) -> None: ...
    def send_to_clipboard(self, text: str) -> str: ...
    def edit(self, text: str) -> None: ...
    def key_help(self) -> str: ...
    def set_panel(self, shown: bool) -> None: ...


@dataclass
class View:
    """The widgets."""

    title: PartsBar
    badge: Badge
    transcript: Transcript
    panel: StepPanel
    status: PartsBar


@dataclass
class ActiveAnswer:
    """An answer on its way."""

    turn: Turn
    has_started: bool = False
    is_stopping: bool = False
    section: Section | None = None
    channel: str = ""
    thinking_head: Section | None = None
    thinking_sections: list[Section] = field(default_factory=list)


class LiveChat:
    """Implements ``commands.ChatFront``."""

    def __init__(
        self, config: RunConfig, bridge: Bridge, trace: TraceSink, view: View, desk: Desk, glyphs: Glyphs
    ) -> None:
        self.conversation = Conversation(config)
        self.trace = trace
        self._config = config
        self._bridge = bridge
        self._view = view
        self._desk = desk
        self._glyphs = glyphs
        self.info: dict[str, Any] = {}
        self.state = "loading"
        """loading | ready | down"""
        self.active: ActiveAnswer | None = None
        self.failure: SparkchatError | None = None
        """Why the engine is down."""
        self._loading = "starting the engine"
        self._flash: str | None = None
        self._flash_number = 0
        self._snapshot = Snapshot()
        self._shows_thinking = False
        self._thinking: list[tuple[Section, Section]] = []

    # Start

    def begin(self, notices: Sequence[str] = ()) -> None:
        for sentence in (*self._config.notices, *notices):
            self._note(sentence)
        self._bridge.start()
        self.refresh_bars()

    def restart_engine(self) -> None:
        if self.active is not None and self.active.has_started:
            raise UsageError("an answer is running; esc stops it")
        self.state, self.failure, self.info = "loading", None, {}
        self._loading = "starting the engine again"
        self._bridge.restart()
        self.refresh_bars()

    # What the user wants

    def send(self, text: str) -> None:
        """A line from the prompt: a command or a question."""
        try:
            if text.startswith("/") and "\n" not in text.strip():
                run_command(text.strip(), self)
            else:
                self.ask(text)
        except SparkchatError as error:
            self._note(error.message, "error")
        self._view.transcript.update_rows()
        self.refresh_bars()

    def ask(self, prompt: str) -> None:
        if self.active is not None:
            self._desk.edit(prompt)
            self.flash("an answer is running; esc stops it")
            return
        section = self._view.transcript.add_section("plain", "user", margin=f"{self._glyphs.user} ")
        section.append(prompt)
        section.finish()
        self.active = ActiveAnswer(self.conversation.ask(prompt))
        self._view.transcript.follow()
        if self.state == "down":
            self.restart_engine()
        elif self.state == "ready":
            self._submit()

    def _submit(self) -> None:
        assert self.active is not None
        try:
            self._bridge.generate(self.conversation.request(self.active.turn))
        except EngineCrash:
            # It died while nobody looked: start it again, the question goes out when it is ready.
            self.restart_engine()

    def stop(self) -> bool:
        """Stop the answer that is running or waiting; False when there is none."""
        active = self.active
        if active is None:
            return False
        if active.is_stopping or self.state != "ready":
            self._close_answer(None)
            return True
        active.is_stopping = True
        try:
            self._bridge.cancel(active.turn.request_id)
        except EngineCrash:
            self._close_answer(None)
            return True
        self._desk.later(DETACH_SECONDS, lambda: self._detach(active))
        self.refresh_bars()
        return True

    def _detach(self, active: ActiveAnswer) -> None:
        if self.active is active:
            self._close_answer(None)

    def change_mode(self, mode: Mode) -> None:
        if mode != "off" and self.info and not self.info.get("drafter"):
            raise UsageError(f"mode {mode} needs a drafter: {self.info.get('reason_off') or 'none is loaded'}")
        self.conversation.mode = mode
        if self.state == "ready":
            self._bridge.set_mode(mode)
        self.flash(f"mode {mode}, from the next step on")

    def cycle_mode(self) -> None:
        try:
            order = ("static", "compact", "cap-accept", "off")
            self.change_mode(order[(order.index(self.conversation.mode) + 1) % len(MODES)])
        except SparkchatError as error:
            self.flash(error.message)

    # commands.ChatFront

    def say(self, text: str) -> None:
        self._note(text)

    def help_text(self) -> str:
        return f"{self._desk.key_help()}\n\n{command_table()}"

    def stats_text(self) -> str:
        lines = [
            f"{number_}: {result_line(turn.answer.result, self._glyphs.separator)}"
            for number_, turn in enumerate(self.conversation.turns, 1)
            if turn.answer.result
        ]
        return "\n".join(lines) or "no answer yet"

    def mode_text(self) -> str:
        effective = self._snapshot.mode
        now = f", last step ran {effective}" if effective and effective != self.conversation.mode else ""
        return f"mode: {self.conversation.mode}{now}"

    def set_stats(self, shown: bool) -> None:
        self._desk.set_panel(shown)

    def show_thinking(self, shown: bool) -> None:
        self._shows_thinking = shown
        for head, section in self._thinking:
            section.is_folded = not shown
            head.replace(self._thinking_text(section))
        self._view.transcript.update_rows(all_rows=True)

    def toggle_thinking(self) -> None:
        self.show_thinking(not self._shows_thinking)

    def new_chat(self) -> None:
        self.stop()
        self.active = None
        self.conversation.clear()
        self._thinking.clear()
        self._view.transcript.clear()
        self._show_numbers(Snapshot())

    def regenerate(self) -> None:
        if self.active is not None:
            raise UsageError("an answer is running; esc stops it")
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/regen has nothing to answer again: the chat is empty")
        self.ask(prompt)

    def edit_last(self) -> None:
        if self.active is not None:
            raise UsageError("an answer is running; esc stops it")
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/edit has nothing to change: the chat is empty")
        self._note("the last question and its answer are taken back; change it and send it again")
        self._desk.edit(prompt)

    def copy(self, text: str) -> None:
        self.flash(self._desk.send_to_clipboard(text))

    def quit(self) -> None:
        self._desk.leave(self.failure.exit_code if self.failure else 0)

    # What the engine says

    def receive(self, batches: Sequence[Batch]) -> None:
        """Take over what came since the last time, and draw it once."""
        for batch in batches:
            self._take_batch(batch)
        self._view.transcript.update_rows()
        self.refresh_bars()

    def _take_batch(self, batch: Batch) -> None:
        # First, because the end of the answer may be among the items, and its numbers stay on the screen.
        if self.active is not None and (snapshot := batch.stats.get(self.active.turn.request_id)):
            self._show_numbers(snapshot)
        for item in batch.items:
            if isinstance(item, TextUpdate):
                self._take_text(item)
            else:
                self._take_event(item)

    def _take_text(self, update: TextUpdate) -> None:
        active = self.active
        if active is None or update.id != active.turn.request_id:
            return
        if active.section is None or active.channel != update.channel:
            self._open_section(active, update.channel)
        assert active.section is not None
        for run in update.runs:
            active.section.append(run.text)
            active.section.mark_origin(run.origin)
        text = "".join(run.text for run in update.runs)
        if update.channel == "thinking":
            active.turn.answer.thinking += text
            assert active.thinking_head is not None
            active.thinking_head.replace(self._thinking_text(active.section))
        else:
            active.turn.answer.text += text

    def _open_section(self, active: ActiveAnswer, channel: str) -> None:
        transcript = self._view.transcript
        if active.section is not None:
            active.section.finish()
        active.channel = channel
        if channel == "thinking":
            active.thinking_head = transcript.add_section("plain", "thinking")
            active.section = transcript.add_section("plain", "thinking", margin="  ", gap=False)
            active.section.is_folded = not self._shows_thinking
            self._thinking.append((active.thinking_head, active.section))
        else:
            active.section = transcript.add_section("markdown")

    def _thinking_text(self, section: Section) -> str:
        mark = self._glyphs.folded if section.is_folded else self._glyphs.unfolded
        dot = self._glyphs.separator
        return f"{mark} thinking {dot} {len(section.text.split())} words {dot} ctrl+t"

    def _take_event(self, event: Event) -> None:
        handler = {
            "loading": self._on_loading,
            "ready": self._on_ready,
            "error": self._on_error,
            "crashed": self._on_crashed,
            "start": self._on_start,
            "end": self._on_end,
            "notice": self._on_notice,
        }.get(event["event"])
        if handler is not None:
            handler(event)

    def _on_loading(self, event: Event) -> None:
        self._loading = loading_text(event)

    def _on_ready(self, event: Event) -> None:
        self.info = event["info"]
        self.state, self.failure = "ready", None
        for sentence in self.info.get("notices") or ():
            self._note(sentence)
        if not self.info.get("drafter"):
            self.conversation.mode = "off"
        elif self.conversation.mode != self.info.get("mode"):
            self._bridge.set_mode(self.conversation.mode)
        if self.active is not None:
            self._submit()

    def _on_error(self, event: Event) -> None:
        self._go_down(error_from_name(event.get("error", ""), event.get("message", "")))

    def _on_crashed(self, event: Event) -> None:
        self._go_down(EngineCrash(event.get("message") or "the engine process ended"))

    def _go_down(self, error: SparkchatError) -> None:
        self.state, self.failure = "down", error
        if self.active is not None:
            self._close_answer(None)
        self._note(f"{error.message}; the chat is kept: send a message, or /load, to start the engine again", "error")

    def _on_start(self, event: Event) -> None:
        if self.active is not None and event["id"] == self.active.turn.request_id:
            self.active.has_started = True

    def _on_end(self, event: Event) -> None:
        turn = self.conversation.turn_of(event["id"])
        if turn is not None:
            turn.answer.result = event["result"]
        if self.active is not None and self.active.turn is turn:
            self._close_answer(event["result"])

    def _on_notice(self, event: Event) -> None:
        self._note(event.get("message", ""))

    # Drawing

    def _close_answer(self, result: dict[str, Any] | None) -> None:
        """End the answer on the screen; without a result it was stopped, or the engine is gone."""
        active, self.active = self.active, None
        assert active is not None
        if active.section is not None:
            active.section.finish()
        answer = active.turn.answer
        answer.was_stopped = result is None or result.get("finish_reason") == "cancelled"
        if result is not None and result.get("finish_reason") == "error":
            self._note(result.get("error") or "the engine refused the request", "error")
        footer = self._view.transcript.add_section("plain", "footer", gap=active.section is not None)
        separator = self._glyphs.separator
        footer.append(result_line(result, separator) if result else self._stopped_text(active))
        footer.finish()

    def _stopped_text(self, active: ActiveAnswer) -> str:
        tokens = self._snapshot.num_tokens if active.has_started else 0
        return f"{tokens} tokens {self._glyphs.separator} stopped"

    def _note(self, text: str, style: str = "notice") -> None:
        section = self._view.transcript.add_section("plain", style)
        section.append(text)
        section.finish()

    def _show_numbers(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._view.panel.show(snapshot)

    def flash(self, text: str) -> None:
        """Show a sentence in the status bar for a few seconds."""
        self._flash, self._flash_number = text, self._flash_number + 1
        self._desk.later(4.0, lambda mine=self._flash_number: self._end_flash(mine))
        self.refresh_bars()

    def _end_flash(self, mine: int) -> None:
        if mine == self._flash_number:
            self._flash = None
            self.refresh_bars()

    def refresh_bars(self) -> None:
        info, label = self.info, self._config.label or self._config.spec.name
        lines_below = not self._view.transcript.is_following
        size = f"block {info['block_size']}" if info.get("block_size") else ""
        where = f"{info.get('device', '')} {info.get('dtype', '')}".strip()
        trace = f"trace {self.trace.path.name}" if self.trace.path else ""
        below = "more below (End)" if lines_below else ""
        self._view.title.show(
            [
                (1, "sparkchat", "strong"),
                (0, label, "text"),
                (4, where, "dim"),
                (5, size, "dim"),
                (3, trace, "dim"),
                (2, below, "strong"),
            ]
        )
        self._view.badge.show_reason(badge_text(info, self._snapshot.step, self.conversation.mode))
        self._view.status.show([(0, self._flash, "strong")] if self._flash else self._status_parts())

    def _status_parts(self) -> list[Part]:
        snapshot, step = self._snapshot, self._snapshot.step or {}
        parts: list[Part] = [(0, self._mode_part(), "strong"), (1, self._state_text(), "text")]
        if snapshot.num_steps:
            parts += [
                (2, f"{number(snapshot.tokens_per_second_now)} tok/s", "text"),
                (6, f"mean {number(snapshot.tokens_per_second)}", "dim"),
                (3, f"acceptance {number(snapshot.mean_acceptance_length, 2)}", "text"),
                (4, f"verify {step.get('verify_len', '-')}", "text"),
                (5, f"step {number(step.get('step_ms'))}/{number(step.get('predicted_step_ms'))} ms", "dim"),
            ]
        parts.append((7, "F1 help", "dim"))
        return parts

    def _mode_part(self) -> str:
        asked, effective = self.conversation.mode, self._snapshot.mode
        is_live = self.active is not None and self.active.has_started
        return f"{effective} -> {asked}" if is_live and effective not in (None, asked) else asked

    def _state_text(self) -> str:
        if self.state == "down":
            return "engine stopped"
        if self.state == "loading":
            return self._loading + (" (your message waits)" if self.active else "")
        if self.active is None:
            return "ready"
        if self.active.is_stopping:
            return "stopping"
        return "answering" if self.active.has_started else "reading the prompt"
