"""The chat behind the full-screen app: what the user's wishes do to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from sparkchat.errors import EngineCrash, SparkchatError, UsageError
from sparkchat.params import MODES, Mode, SamplingParams
from sparkchat.ui.answer_view import ActiveAnswer
from sparkchat.ui.commands import as_typed, command_rows, is_command, run_command, without_escape
from sparkchat.ui.compare import Comparison
from sparkchat.ui.conversation import Turn
from sparkchat.ui.document import Section
from sparkchat.ui.engine_side import Desk, EngineSide, View
from sparkchat.ui.export import begin_trace_export
from sparkchat.ui.recorded import REFUSAL
from sparkchat.ui.safe_text import in_columns, text_width
from sparkchat.ui.stats import Snapshot, result_line

__all__ = ["Desk", "LiveChat", "View"]

DETACH_SECONDS = 0.4
"""A stopped answer is closed on the screen after this, even if the engine is still busy."""
LIVE_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
)
"""What an engine can change in the middle of an answer; the rest is settled when it starts."""
_BUSY = "an answer is running; esc stops it"


class LiveChat(EngineSide):
    """Implements ``commands.ChatFront``."""

    def begin(self, notices: Sequence[str] = ()) -> None:
        for sentence in (*self._config.notices, *notices):
            self._answers.note(sentence)
        if self._config.resume is not None:
            self._try(lambda: self.load(self._config.resume or "last"))
        self._bridge.start()
        self.refresh_bars()

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except SparkchatError as error:
            self._tell(error.message, "error")

    def _tell(self, text: str, style: str = "notice") -> None:
        """Below an answer that grows a note would push it off the screen: a short one goes into the status bar then."""
        is_growing = self.active is not None and self.active.has_started
        if is_growing and "\n" not in text and text_width(text) < self._view.status.size.width:
            self.flash(text)
        else:
            self._answers.note(text, style)

    def send(self, text: str) -> None:
        """A line from the prompt: a command or a question."""
        transcript = self._view.transcript
        num_sections = len(transcript.sections)
        self._try(lambda: run_command(text, self) if is_command(text) else self.ask(without_escape(text)))
        self._say_problem()
        if len(transcript.sections) > num_sections:
            transcript.is_following = True  # what was asked for is seen, wherever one was reading
        transcript.update_rows()
        self.refresh_bars()

    def ask(self, prompt: str) -> None:
        if self._is_replay:
            raise UsageError(REFUSAL)
        if self.is_busy:
            self._desk.give_back(as_typed(prompt))
            self.flash(_BUSY)
            return
        turn = self.conversation.ask(prompt)
        self._answers.question(turn)
        self.keeper.question(turn)
        self.active = ActiveAnswer(turn)
        self._view.transcript.follow()
        if self.state == "down":
            self.restart_engine()
        elif self.state == "ready":
            self._submit()

    def stop(self) -> bool:
        """Stop the answer that is running or waiting; False when there is none."""
        active = self.active
        if self._comparison is not None:
            return self._stop_comparison()
        if active is None or self._is_replay:
            return self._stop_export()
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

    # Comparing

    def compare(self) -> None:
        """Answer the last question again under every mode, with the same seed, and show the answers side by side."""
        turn = self.conversation.turns[-1] if self.conversation.turns else None
        if self.is_busy or self.state != "ready":
            raise UsageError("the engine is busy; esc stops an answer")
        if turn is None or not turn.answer.result:
            raise UsageError("/compare needs an answer to run again: ask something first")
        self._refuse_fixed_mode()
        if not self.info.get("drafter"):
            raise UsageError("/compare needs a drafter: without one there is nothing to compare")
        self._comparison = Comparison(self.conversation.request_again(turn), turn.seed)
        self._before_comparison = self._snapshot
        self._desk.show_comparison(self._comparison)
        self._next_comparison()

    def _stop_comparison(self) -> bool:
        comparison, self._comparison = self._comparison, None
        assert comparison is not None
        if comparison.current is not None:
            with suppress(EngineCrash):
                self._bridge.cancel(comparison.current.id)
        comparison.stop()
        self._desk.comparison_moved()
        self._show_numbers(self._before_comparison)
        self._answers.note("comparison stopped")
        return True

    # Settings

    def change_mode(self, mode: Mode) -> None:
        if self._is_replay:
            raise UsageError(REFUSAL)
        self._refuse_fixed_mode()
        if mode != "off" and self.info and not self.info.get("drafter"):
            raise UsageError(f"mode {mode} needs a drafter: {self.info.get('reason_off') or 'none is loaded'}")
        if self.state == "ready":
            self._bridge.set_mode(mode)
        self.conversation.mode = mode
        self.flash(f"mode {mode}, from the next step on")

    def _refuse_fixed_mode(self) -> None:
        if self.info.get("mode_fixed"):
            raise UsageError(f"the mode cannot be changed here: {self.info['mode_fixed']}")

    def sampling_changed(self, before: SamplingParams) -> str:
        now = self.conversation.sampling
        names = [each.name for each in fields(now) if getattr(now, each.name) != getattr(before, each.name)]
        running = self.active if self.active is not None and self.active.has_started else None
        if running is None or not names:
            return ""
        if any(name not in LIVE_OPTIONS for name in names):
            return " from the next answer on"
        values = {name: getattr(now, name) for name in names}
        return self._changed(self._bridge.change(running.turn.request_id, sampling=values))

    def think_changed(self) -> str:
        running = self.active if self.active is not None and self.active.has_started else None
        if running is None:
            return ""
        if self.conversation.think is not False or running.channel != "thinking":
            return " from the next answer on"
        return self._changed(self._bridge.change(running.turn.request_id, think=False))

    @staticmethod
    def _changed(was_taken: bool) -> str:
        return " from the next step on" if was_taken else " from the next answer on"

    def cycle_mode(self) -> None:
        try:
            self._refuse_fixed_mode()
            order = ("static", "compact", "cap-accept", "off")
            self.change_mode(order[(order.index(self.conversation.mode) + 1) % len(MODES)])
        except SparkchatError as error:
            self.flash(error.message)

    # commands.ChatFront

    def say(self, text: str) -> None:
        self._tell(text)

    def help_rows(self) -> list[tuple[str, str]]:
        """(keys or command, what it does), an empty row between the two kinds."""
        return [*self._desk.key_rows(), ("", ""), *command_rows()]

    def help_text(self) -> str:
        return in_columns(self.help_rows(), self._view.transcript.size.width - 2)

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
        # On a narrow screen the badge has no room for the whole of its reason.
        reason = self._badge_text()
        return f"mode: {self.conversation.mode}{f' ({reason})' if reason else now}"

    def set_stats(self, shown: bool) -> None:
        self._desk.set_panel(shown)

    def show_thinking(self, shown: bool) -> None:
        self._answers.show_thinking(shown)

    def toggle_thinking(self) -> None:
        self._answers.show_thinking(not self._answers.shows_thinking)

    def toggle_part(self, head: Section) -> bool:
        """Fold or unfold one thinking part by its line."""
        return self._answers.toggle_part(head)

    def on_screen(self, action: str) -> None:
        self._desk.act(action)

    def search_history(self, words: str) -> None:
        if words:
            self._desk.edit(words)
        self._desk.act("search_history")

    def inspect(self) -> None:
        self._desk.show_steps()

    def copy(self, text: str) -> None:
        self.flash(self._desk.send_to_clipboard(text))

    # Exporting

    def export_trace(self, path: Path, name: str | None) -> None:
        if self._export is not None:
            raise UsageError(f"{self._export.text}; esc stops it")
        trace = Path(self._config.spec.model_path) if self._is_replay else self.trace.path
        self._export = begin_trace_export(trace, path, name, self._desk.export_moved)

    def export_moved(self) -> None:
        """Show how far it is, or what became of it."""
        if (job := self._export) is None:
            return
        if job.is_over:
            self._export = None
            self._tell(job.text, "error" if job.error is not None and not job.was_stopped else "notice")
            self._view.transcript.update_rows()
        self.refresh_bars()

    def _stop_export(self) -> bool:
        if self._export is None:
            return False
        self._export.stop()
        return True

    def close(self) -> None:
        """The screen goes; nothing half-written stays."""
        self.keeper.close()
        if self._export is not None:
            self._export.close()

    def quit(self) -> None:
        self._desk.leave(self.failure.exit_code if self.failure else 0)

    # Chats and their branches

    def new_chat(self) -> None:
        self.stop()
        self.active = None
        self.conversation.clear()
        self.keeper.new()
        self.records.clear()
        self._answers.clear()
        self._show_numbers(Snapshot())

    def regenerate(self) -> None:
        self._refuse_when_busy()
        prompt = self.conversation.drop_last()
        if prompt is None:
            raise UsageError("/regen has nothing to answer again: the chat is empty")
        self._answers.show_path(self.conversation.turns)
        self.ask(prompt)

    def edit(self, number: int | None) -> None:
        self._refuse_when_busy()
        turn = self.conversation.turn_at(number, "/edit")
        self._stand_after(turn.parent)
        self._answers.note("change the question and send it again; the other branch is kept (/branch)")
        self._desk.edit(as_typed(turn.prompt))

    def fork(self, number: int | None) -> None:
        self._refuse_when_busy()
        self._stand_after(self.conversation.turn_at(number, "/fork"))
        self._answers.note("the next question goes on from here; the other branch is kept (/branch)")

    def branch(self, number: int | None) -> None:
        """Go to another branch; without a number to the next one."""
        self._refuse_when_busy()
        self.conversation.go_to(self.conversation.branch_at(number))
        self._moved()

    def _stand_after(self, turn: Turn | None) -> None:
        self.conversation.cut(0 if turn is None else self.conversation.turns.index(turn) + 1)
        self._moved()

    def _moved(self) -> None:
        self.keeper.moved()
        self._answers.show_path(self.conversation.turns)
        self._view.transcript.follow()

    def load(self, word: str) -> None:
        """Go on with a kept chat; without a word the user chooses, or an engine that is down starts again."""
        if not word and self.state == "down":
            self.restart_engine()
            return
        self._refuse_when_busy()
        if not word:
            self._desk.choose_chat("")
            return
        chat = self.keeper.open(self.keeper.store.find(word))
        self._answers.clear()
        self.records.clear()
        self._show_numbers(Snapshot())
        self._answers.show_path(self.conversation.turns)
        if chat.num_damaged:
            self._answers.note(f"{chat.num_damaged} lines of this chat could not be read and are left out", "error")
        if chat.model not in (None, self._config.spec.name):
            self._answers.note(f"this chat began with {chat.model}; it goes on with {self._config.spec.name}")
        self._view.transcript.follow()

    def list_chats(self, words: str) -> None:
        self._desk.choose_chat(words)

    def keep_chats(self, kept: bool) -> None:
        self.keeper.set_on(kept)
        self._desk.keep_prompts(kept)

    def _refuse_when_busy(self) -> None:
        if self._is_replay:
            raise UsageError(REFUSAL)
        if self.is_busy:
            raise UsageError(_BUSY)

    def restart_engine(self) -> None:
        if self._comparison is not None or (self.active is not None and self.active.has_started):
            raise UsageError(_BUSY)
        super().restart_engine()
