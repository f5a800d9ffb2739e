"""The chat behind the full-screen app: what the engine's events do to the screen, and the user's wishes to both.

No key and no layout is known here; ``app.py`` has those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, UsageError, error_from_name
from sparkchat.params import MODES, Mode
from sparkchat.ui.answer_view import ActiveAnswer, AnswerView
from sparkchat.ui.badge import badge_text
from sparkchat.ui.bars_text import status_parts, title_parts
from sparkchat.ui.bridge import Batch, Bridge, Event, TextUpdate
from sparkchat.ui.commands import command_table, is_command, run_command, without_escape
from sparkchat.ui.compare import Comparison
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.inspection import StepRecord
from sparkchat.ui.progress import loading_text
from sparkchat.ui.recorded import REFUSAL
from sparkchat.ui.stats import Snapshot, result_line
from sparkchat.ui.trace_sink import TraceSink
from sparkchat.ui.widgets.bars import Badge, PartsBar
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
    def show_steps(self) -> None: ...


MOST_RECORDS = 5000
"""Steps that the inspector can show; the trace has them all."""


@dataclass
class View:
    """The widgets."""

    title: PartsBar
    badge: Badge
    transcript: Transcript
    panel: StepPanel
    status: PartsBar


class LiveChat:
    """Implements ``commands.ChatFront``."""

    def __init__(
        self,
        config: RunConfig,
        bridge: Bridge,
        trace: TraceSink,
        view: View,
        desk: Desk,
        glyphs: Glyphs,
        is_replay: bool = False,
    ) -> None:
        self.conversation = Conversation(config)
        self.trace = trace
        self._config = config
        self._bridge = bridge
        self._view = view
        self._desk = desk
        self._glyphs = glyphs
        self._is_replay = is_replay
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
        self._answers = AnswerView(view.transcript, glyphs)
        self.records: deque[StepRecord] = deque(maxlen=MOST_RECORDS)
        """Steps of the newest answer."""
        self._comparison: Comparison | None = None

    # Start

    def begin(self, notices: Sequence[str] = ()) -> None:
        for sentence in (*self._config.notices, *notices):
            self._answers.note(sentence)
        self._bridge.start()
        self.refresh_bars()

    def restart_engine(self) -> None:
        if self._comparison is not None or (self.active is not None and self.active.has_started):
            raise UsageError("an answer is running; esc stops it")
        self.state, self.failure, self.info = "loading", None, {}
        self._loading = "starting the engine again"
        self._bridge.restart()
        self.refresh_bars()

    # What the user wants

    def send(self, text: str) -> None:
        """A line from the prompt: a command or a question."""
        try:
            if is_command(text):
                run_command(text, self)
            else:
                self.ask(without_escape(text))
        except SparkchatError as error:
            self._answers.note(error.message, "error")
        self._view.transcript.update_rows()
        self.refresh_bars()

    def ask(self, prompt: str) -> None:
        if self._is_replay:
            raise UsageError(REFUSAL)
        if self.is_busy:
            self._desk.edit(prompt)
            self.flash("an answer is running; esc stops it")
            return
        self._answers.question(prompt)
        self.active = ActiveAnswer(self.conversation.ask(prompt))
        self.records.clear()
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
        if self._comparison is not None:
            return self._stop_comparison()
        if active is None or self._is_replay:
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
            self._view.transcript.update_rows()
            self.refresh_bars()

    @property
    def is_busy(self) -> bool:
        return self.active is not None or self._comparison is not None

    @property
    def running_id(self) -> str | None:
        """The request that the engine works on."""
        if self._comparison is not None and self._comparison.current is not None:
            return self._comparison.current.id
        return self.active.turn.request_id if self.active is not None and self.active.has_started else None

    def compare(self) -> None:
        """Answer the last question again under every mode, with the same seed, and show the numbers side by side."""
        turn = self.conversation.turns[-1] if self.conversation.turns else None
        if self.is_busy or self.state != "ready":
            raise UsageError("the engine is busy; esc stops an answer")
        if turn is None or not turn.answer.result:
            raise UsageError("/compare needs an answer to run again: ask something first")
        if not self.info.get("drafter"):
            raise UsageError("/compare needs a drafter: without one there is nothing to compare")
        self._comparison = Comparison(self.conversation.request_again(turn), turn.seed)
        self._next_comparison()

    def _next_comparison(self) -> None:
        comparison = self._comparison
        assert comparison is not None
        if comparison.current is not None:
            self._bridge.generate(comparison.current)
            return
        self._comparison = None
        self._answers.table(comparison.table())

    def _stop_comparison(self) -> bool:
        comparison, self._comparison = self._comparison, None
        assert comparison is not None
        if comparison.current is not None:
            with suppress(EngineCrash):
                self._bridge.cancel(comparison.current.id)
        self._answers.note("comparison stopped")
        return True

    def change_mode(self, mode: Mode) -> None:
        if mode != "off" and self.info and not self.info.get("drafter"):
            raise UsageError(f"mode {mode} needs a drafter: {self.info.get('reason_off') or 'none is loaded'}")
        if self.state == "ready":
            self._bridge.set_mode(mode)
        self.conversation.mode = mode
        self.flash(f"mode {mode}, from the next step on")

    def cycle_mode(self) -> None:
        try:
            order = ("static", "compact", "cap-accept", "off")
            self.change_mode(order[(order.index(self.conversation.mode) + 1) % len(MODES)])
        except SparkchatError as error:
            self.flash(error.message)

    # commands.ChatFront

    def say(self, text: str) -> None:
        self._answers.note(text)

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
        self._answers.show_thinking(shown)

    def toggle_thinking(self) -> None:
        self._answers.show_thinking(not self._answers.shows_thinking)

    def new_chat(self) -> None:
        self.stop()
        self.active = None
        self.conversation.clear()
        self._answers.clear()
        self._show_numbers(Snapshot())

    def regenerate(self) -> None:
        if self.is_busy:
            raise UsageError("an answer is running; esc stops it")
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/regen has nothing to answer again: the chat is empty")
        self.ask(prompt)

    def edit_last(self) -> None:
        if self.is_busy:
            raise UsageError("an answer is running; esc stops it")
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/edit has nothing to change: the chat is empty")
        self._answers.note("the last question and its answer are taken back; change it and send it again")
        self._desk.edit(prompt)

    def inspect(self) -> None:
        self._desk.show_steps()

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
        for item in batch.items:
            if isinstance(item, TextUpdate):
                self._take_text(item)
            else:
                self._take_event(item)
        comparison = self._comparison
        if comparison is not None and (snapshot := batch.stats.get(self.running_id or "")):
            comparison.num_tokens = snapshot.num_tokens
            self._show_numbers(snapshot)
        # By the turn and not by what is running: its start and its end may both have been among the items.
        newest = self.conversation.turns[-1].request_id if self.conversation.turns else None
        if newest in batch.stats:
            self._show_numbers(batch.stats[newest])
        self.records.extend(StepRecord(*each) for each in batch.steps if each[0]["id"] == newest)

    def _take_text(self, update: TextUpdate) -> None:
        # Text of an answer that was given up on the screen is not shown any more.
        if self.active is not None and update.id == self.active.turn.request_id:
            self._answers.take_text(self.active, update)

    def _take_event(self, event: Event) -> None:
        handler = {
            "loading": self._on_loading,
            "ready": self._on_ready,
            "info": self._on_info,
            "error": self._on_error,
            "crashed": self._on_crashed,
            "start": self._on_start,
            "end": self._on_end,
            "notice": self._on_notice,
            "recording_end": self._on_recording_end,
        }.get(event["event"])
        try:
            if handler is not None:
                handler(event)
        except EngineCrash as crash:
            # It died between this event and our answer to it.
            self._go_down(crash)

    def _on_loading(self, event: Event) -> None:
        self._loading = loading_text(event)
        if self.state == "ready":
            # Something is measured in mid-session, such as the step costs when a mode first needs them.
            self.flash(self._loading)

    def _on_info(self, event: Event) -> None:
        self.info = event["info"]

    def _on_ready(self, event: Event) -> None:
        self.info = event["info"]
        self.state, self.failure = "ready", None
        for sentence in self.info.get("notices") or ():
            self._answers.note(sentence)
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
        if self.state == "down":
            return  # an engine that has said why it cannot load then ends: that is no second failure
        self.state, self.failure, self._comparison = "down", error, None
        if self.active is not None:
            self._close_answer(None)
        self._answers.note(
            f"{error.message}; the chat is kept: send a message, or /load, to start the engine again", "error"
        )

    def _on_start(self, event: Event) -> None:
        if self._is_replay:
            self._begin_recorded(event)
        if self.active is not None and event["id"] == self.active.turn.request_id:
            self.active.has_started = True
            self._show_numbers(Snapshot())
            self.active.turn.seed = (event.get("sampling") or {}).get("seed")

    def _begin_recorded(self, event: Event) -> None:
        if self.active is not None:
            self._close_answer(None)
        num_tokens = event.get("num_prompt_tokens", len(event["prompt_token_ids"]))
        prompt = f"(a question of {num_tokens} tokens; a trace keeps no text of it)"
        self._answers.question(prompt)
        self.records.clear()
        self.active = ActiveAnswer(self.conversation.adopt(prompt, event["id"]))

    def _on_recording_end(self, _event: Event) -> None:
        if self.active is not None:
            self._close_answer(None)
        self._answers.note("the recording ends here; F4 shows the steps of the last answer")

    def _on_end(self, event: Event) -> None:
        comparison = self._comparison
        if comparison is not None and comparison.current is not None and comparison.current.id == event["id"]:
            comparison.take_end(event["result"])
            self._next_comparison()
            return
        turn = self.conversation.turn_of(event["id"])
        if turn is not None:
            turn.answer.result = event["result"]
        if self.active is not None and self.active.turn is turn:
            self._close_answer(event["result"])

    def _on_notice(self, event: Event) -> None:
        self._answers.note(event.get("message", ""))

    # Drawing

    def _close_answer(self, result: dict[str, Any] | None) -> None:
        active, self.active = self.active, None
        assert active is not None
        self._answers.close(active, result, self._snapshot.num_tokens if active.has_started else 0)

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
        trace = self.trace.path.name if self.trace.path else None
        label = self._config.label or self._config.spec.name
        self._view.title.show(title_parts(label, self.info, trace, not self._view.transcript.is_following))
        self._view.badge.show_reason(
            badge_text(self.info, self._snapshot.step, self.conversation.mode, self._config.reason_off)
        )
        parts = status_parts(self._mode_part(), self._state_text(), self._snapshot)
        self._view.status.show([(0, self._flash, "strong")] if self._flash else parts)

    def _mode_part(self) -> str:
        asked, effective = self.conversation.mode, self._snapshot.mode
        is_live = self.active is not None and self.active.has_started
        return f"{effective} -> {asked}" if is_live and effective not in (None, asked) else asked

    def _state_text(self) -> str:
        if self.state == "down":
            return "engine stopped"
        if self.state == "loading":
            return self._loading + (" (your message waits)" if self.active else "")
        if self._comparison is not None:
            return self._comparison.progress
        if self.active is None:
            return "ready"
        if self.active.is_stopping:
            return "stopping"
        return "answering" if self.active.has_started else "reading the prompt"
