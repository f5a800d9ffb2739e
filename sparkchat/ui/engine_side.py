"""The chat as the engine sees it: what each event does to the state and to the screen.

No key and no layout is known here; ``app.py`` has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparkchat.config import RunConfig
from sparkchat.errors import EngineCrash, SparkchatError, error_from_name
from sparkchat.paths import user_paths
from sparkchat.ui.answer_view import ActiveAnswer, AnswerView
from sparkchat.ui.badge import badge_text
from sparkchat.ui.bars_text import status_parts, title_parts
from sparkchat.ui.bridge import Batch, Bridge, Event, TextUpdate
from sparkchat.ui.chats import ChatKeeper, ChatStore
from sparkchat.ui.compare import Comparison
from sparkchat.ui.conversation import Conversation
from sparkchat.ui.export_job import ExportJob
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.progress import loading_text
from sparkchat.ui.stats import Snapshot
from sparkchat.ui.step_log import StepLog, Steps
from sparkchat.ui.trace_sink import TraceSink
from sparkchat.ui.widgets.bars import Badge, PartsBar
from sparkchat.ui.widgets.step_panel import StepPanel
from sparkchat.ui.widgets.transcript import Transcript


class Desk(Protocol):
    """What the chat asks of the app around it."""

    def later(self, seconds: float, action: Any) -> None: ...
    def leave(self, code: int) -> None: ...
    def send_to_clipboard(self, text: str) -> str: ...
    def edit(self, text: str) -> None: ...
    def give_back(self, text: str) -> None:
        """A text that could not be sent is edited again, before what was written since."""
        ...

    def key_rows(self) -> list[tuple[str, str]]: ...
    def set_panel(self, shown: bool) -> None: ...
    def show_steps(self) -> None: ...
    def act(self, action: str) -> None: ...
    def show_comparison(self, comparison: Comparison) -> None: ...
    def comparison_moved(self) -> None: ...
    def export_moved(self, job: ExportJob) -> None:
        """Called from a thread."""
        ...

    def choose_chat(self, words: str) -> None: ...
    def keep_prompts(self, kept: bool) -> None: ...


@dataclass
class View:
    """The widgets."""

    title: PartsBar
    badge: Badge
    transcript: Transcript
    panel: StepPanel
    status: PartsBar


class EngineSide:
    """State of the chat and of its engine; ``receive`` takes what the bridge hands over."""

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
        self.keeper = ChatKeeper(
            ChatStore(user_paths().sessions), self.conversation, config.spec.name, is_on=not is_replay
        )
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
        self.records = StepLog()
        self._export: ExportJob | None = None
        self._comparison: Comparison | None = None
        self._before_comparison = Snapshot()
        """The numbers of the newest answer, shown again behind a comparison."""

    def steps_of(self, request_id: str | None) -> Steps:
        """The steps of one answer that are still at hand, in order."""
        return self.records.of(request_id)

    @property
    def newest_id(self) -> str | None:
        """The request of the last turn; it may have ended already."""
        return self.conversation.turns[-1].request_id if self.conversation.turns else None

    @property
    def is_busy(self) -> bool:
        return self.active is not None or self._comparison is not None

    @property
    def running_id(self) -> str | None:
        """The request that the engine works on."""
        if self._comparison is not None and self._comparison.current is not None:
            return self._comparison.current.id
        return self.active.turn.request_id if self.active is not None and self.active.has_started else None

    def restart_engine(self) -> None:
        self.state, self.failure, self.info = "loading", None, {}
        self._loading = "starting the engine again"
        self._bridge.restart()
        self.refresh_bars()

    def _submit(self) -> None:
        assert self.active is not None
        try:
            self._bridge.generate(self.conversation.request(self.active.turn))
        except EngineCrash:
            # It died while nobody looked: start it again, the question goes out when it is ready.
            self.restart_engine()

    # Events

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
            comparison.take_numbers(snapshot)
            self._show_numbers(snapshot)
        if comparison is not None:
            self._desk.comparison_moved()
        # By the turn and not by what is running: its start and its end may both have been among the items.
        newest = self.newest_id
        if newest in batch.stats:
            self._show_numbers(batch.stats[newest])
        for step, bonus_text in batch.steps:
            if step["id"] == newest:
                self.records.add(step, bonus_text)

    def _take_text(self, update: TextUpdate) -> None:
        # Text of an answer that was given up on the screen is not shown any more.
        if self.active is not None and update.id == self.active.turn.request_id:
            self._answers.take_text(self.active, update)
            self.keeper.text(self.active.turn, update.channel, "".join(run.text for run in update.runs))
        elif self._comparison is not None:
            self._comparison.take_text(update)

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
            "setting_change": self._on_setting_change,
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
        self.conversation.efforts = tuple(self.info.get("reasoning_efforts") or ())
        for sentence in self.info.get("notices") or ():
            self._answers.note(sentence)
        if self.info.get("mode_fixed"):
            self.conversation.mode = self.info["mode"]
        elif not self.info.get("drafter"):
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
        prompt = event.get("prompt_text") or f"(a question of {num_tokens} tokens, whose text is not in the trace)"
        turn = self.conversation.adopt(prompt, event["id"])
        self._answers.question(turn)
        self.active = ActiveAnswer(turn)

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
        elif turn is not None:
            self.keeper.answer(turn)  # it was given up on the screen before it ended

    def _on_setting_change(self, event: Event) -> None:
        parts = [f"{name} {change['from']} -> {change['to']}" for name, change in event["changes"].items()]
        self.flash(", ".join(parts) + ", from this step on")

    def _on_notice(self, event: Event) -> None:
        self._answers.note(event.get("message", ""))

    def _next_comparison(self) -> None:
        comparison = self._comparison
        assert comparison is not None
        if comparison.current is not None:
            self._bridge.generate(comparison.current)
            return
        self._comparison = None
        self._desk.comparison_moved()
        self._show_numbers(self._before_comparison)
        self._answers.table(comparison.table())

    # Drawing

    def _close_answer(self, result: dict[str, Any] | None) -> None:
        active, self.active = self.active, None
        assert active is not None
        self._answers.close(active, result, self._snapshot.num_tokens if active.has_started else 0)
        self.keeper.answer(active.turn)
        self._say_problem()

    def _say_problem(self) -> None:
        problem, self.keeper.problem = self.keeper.problem, None
        if problem:
            self._answers.note(problem, "error")

    def _show_numbers(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._view.panel.show(snapshot, self.info)

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
        branch = self.conversation.branch_text
        self._view.title.show(title_parts(label, self.info, trace, branch, not self._view.transcript.is_following))
        self._view.badge.show_reason(self._badge_text())
        parts = status_parts(self._mode_part(), self._state_text(), self._snapshot)
        if self._export is not None:
            parts.insert(1, (1, f"{self._export.text}, esc stops it", "strong"))
        self._view.status.show([(0, self._flash, "strong")] if self._flash else parts)

    def _badge_text(self) -> str | None:
        return badge_text(self.info, self._snapshot, self.conversation.mode, self._config.reason_off)

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
