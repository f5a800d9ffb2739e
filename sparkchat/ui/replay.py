"""The full-screen replay of a recorded session: the chat's own widgets, with keys that steer the time."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from sparkchat.config import Color, RunConfig
from sparkchat.params import LoadSpec
from sparkchat.ui.app import SparkApp, run_app
from sparkchat.ui.recorded import RecordedEngine, Recording
from sparkchat.ui.trace_sink import TraceSink
from sparkchat.ui.widgets.bars import PartsBar
from sparkchat.ui.widgets.prompt import Prompt

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_REFRESH_SECONDS = 0.25


class ReplayApp(SparkApp):
    """``speed`` 2 is twice as fast, 0 shows everything at once."""

    AUTO_FOCUS = None
    CSS = "#replay { height: 1; background: $surface; color: $text; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "toggle_pause", "pause, or play on", id="replay.pause"),
        Binding("right,n", "step", "next step, then wait", id="replay.next"),
        Binding("left,p", "step_back", "step before, then wait", id="replay.previous"),
        Binding("plus,equals_sign,f", "faster", "faster", id="replay.faster"),
        Binding("minus,s", "slower", "slower", id="replay.slower"),
        Binding("home", "seek_start", "from the start", id="replay.start"),
        Binding("up", "browse('up')", "scroll up a line", id="replay.up"),
        Binding("down", "browse('down')", "scroll down a line", id="replay.down"),
        # Before any widget, so that what is typed right after it goes to the prompt already.
        Binding("slash", "write_command", "write a slash command", id="replay.command", priority=True),
        Binding("q", "leave", "leave", id="replay.leave"),
        *SparkApp.BINDINGS,
    ]

    def __init__(self, config: RunConfig, recording: Recording, speed: float = 1.0, *, is_paused: bool = False) -> None:
        super().__init__(config, self._make_engine, TraceSink(), is_replay=True)
        self.recording = recording
        self._start_at: tuple[int, float, bool] = (0, speed, is_paused)
        """Where, how fast and whether standing still the next engine begins."""
        self._engine: RecordedEngine | None = None
        self._bar = PartsBar(self.glyphs, id="replay")

    def _make_engine(self) -> RecordedEngine:
        position, speed, is_paused = self._start_at
        self._engine = RecordedEngine(self.recording, speed, position=position, is_paused=is_paused)
        return self._engine

    @property
    def engine(self) -> RecordedEngine:
        assert self._engine is not None
        return self._engine

    def compose(self) -> ComposeResult:
        for widget in super().compose():
            if isinstance(widget, Prompt):
                # Keys steer the replay until a command is written.
                widget.can_focus = widget.display = False
            yield widget
        yield self._bar

    def on_mount(self) -> None:
        self._show_position()
        self.set_interval(_REFRESH_SECONDS, self._show_position)

    def on_prompt_sent(self, _event: Prompt.Sent) -> None:
        self._hide_prompt()

    def _hide_prompt(self) -> None:
        self.prompt.display = self.prompt.can_focus = False
        self.screen.set_focus(None)
        self._show_position()

    def _show_position(self) -> None:
        if self._engine is None:
            return
        engine, total = self.engine, self.recording.num_steps
        speed = "at once" if engine.speed <= 0 else f"{engine.speed:g}x"
        state = "paused" if engine.is_paused else "playing"
        parts = [
            (0, f"{state} {speed}", "strong"),
            (1, f"step {engine.steps_given} of {total}", "text"),
            (2, "space pause  left/right step", "dim"),
            (3, "+/- speed", "dim"),
            (4, "home start", "dim"),
            (5, "/ command  q leave", "dim"),
        ]
        self._bar.show(parts)

    # Actions

    def action_toggle_pause(self) -> None:
        if self.engine.is_paused:
            self.engine.play()
        else:
            self.engine.pause()
        self._show_position()

    def action_step(self) -> None:
        self.engine.step()
        self._show_position()

    def action_step_back(self) -> None:
        self._seek(self.recording.after_step(self.engine.steps_given - 1), is_paused=True)

    def action_seek_start(self) -> None:
        self._seek(0, is_paused=self.engine.is_paused)

    def action_faster(self) -> None:
        self._change_speed(next((each for each in SPEEDS if each > self.engine.speed), SPEEDS[-1]))

    def action_slower(self) -> None:
        self._change_speed(next((each for each in reversed(SPEEDS) if each < self.engine.speed), SPEEDS[0]))

    def _change_speed(self, speed: float) -> None:
        self.engine.set_speed(speed)
        self._show_position()

    def _seek(self, position: int, *, is_paused: bool) -> None:
        """Draw the session anew up to a line: a step cannot be taken back from a text."""
        speed = self.engine.speed or 1.0
        self._start_at = (position, speed, is_paused)
        self.engine.close()
        self.bridge.close()
        with self._news_lock:
            self._news.clear()
        self.chat.new_chat()
        self.bridge.start()
        self._show_position()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        # While a command is written, a slash is a letter like any other.
        return super().check_action(action, parameters) and not (action == "write_command" and self.prompt.display)

    def action_write_command(self) -> None:
        self.prompt.display = self.prompt.can_focus = True
        self.screen.set_focus(self.prompt)
        self.prompt.set_value("/")

    def action_stop(self) -> None:
        if self.prompt.display:
            self.prompt.clear()
            self._hide_prompt()
        elif not self.chat.stop():
            self.action_leave()


def run_replay(
    path: Path, *, speed: float = 1.0, is_paused: bool = False, color: Color = "auto", ascii_only: bool = False
) -> int:
    """Play a recorded session on the screen; ``speed`` 2 is twice as fast, 0 shows it at once.

    Raises UsageError or DamagedFile when the file is no trace.
    """
    recording = Recording(path)
    app = ReplayApp(replay_config(recording, color, ascii_only), recording, speed, is_paused=is_paused)
    return run_app(app, TraceSink())


def replay_config(recording: Recording, color: Color, ascii_only: bool) -> RunConfig:
    name = recording.path.name
    spec = LoadSpec(name=name, model_path=str(recording.path), mode=recording.mode)
    return RunConfig(spec=spec, label=f"replay of {name}", color=color, ascii=ascii_only)
