"""The full-screen chat: layout, keys, and the way in and out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.console import RenderableType
from textual.app import App, ComposeResult, SuspendNotSupported, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.filter import NoColor
from textual.geometry import Offset, Size
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from sparkchat.client import EngineClient
from sparkchat.collector import set_aside
from sparkchat.config import RunConfig
from sparkchat.errors import SparkchatError
from sparkchat.paths import user_paths
from sparkchat.ui.bindings import CHAT_BINDINGS, key_rows
from sparkchat.ui.bridge import Batch, Bridge, Engine
from sparkchat.ui.chats import ChatStore
from sparkchat.ui.clipboard import copied_message, fill_tmux_buffer, is_too_long, osc52
from sparkchat.ui.columns import at_columns
from sparkchat.ui.coming_back import watch_stops
from sparkchat.ui.commands import COMMANDS
from sparkchat.ui.compare import Comparison
from sparkchat.ui.document import Section
from sparkchat.ui.editor import edited, editor_command
from sparkchat.ui.export_job import ExportJob
from sparkchat.ui.glyphs import glyphs
from sparkchat.ui.history import History
from sparkchat.ui.keymap import load_keymap, lost_keys
from sparkchat.ui.live_chat import LiveChat, View
from sparkchat.ui.screens.chats import ChatsScreen
from sparkchat.ui.screens.compare import CompareScreen
from sparkchat.ui.screens.help import HelpScreen
from sparkchat.ui.screens.inspector import InspectorScreen
from sparkchat.ui.terminal import TerminalGuard
from sparkchat.ui.terminal_input import TerminalDriver
from sparkchat.ui.token_detail import (
    NOT_AT_HAND,
    TokenSpan,
    find_step,
    step_index,
    token_at,
    token_line,
    walked,
)
from sparkchat.ui.trace_sink import TraceSink
from sparkchat.ui.widgets.bars import Badge, PartsBar
from sparkchat.ui.widgets.prompt import Prompt
from sparkchat.ui.widgets.step_panel import StepPanel
from sparkchat.ui.widgets.transcript import Transcript

QUIT_SECONDS = 3.0
"""How long ctrl+c stays armed."""
END_SECONDS = 0.5
"""How long the end of an answer is waited for when the program ends in the middle of it."""
_NEEDS_ARGUMENT = {"mode", "set", "system", "export", "trace"}


class ChatScreen(Screen[None]):
    """Covered by its widgets; drawing it anew below them at every update would cost more than they do."""

    BLANK = True

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        selected = self._select_state.start.content_widget if self._selecting and self._select_state else None
        if isinstance(selected, Transcript):
            # A selection that is drawn past the text, onto its scroll bar or another widget, ends beside that.
            return selected, selected.text_offset_at(x, y, is_end=True)
        widget, offset = super().get_widget_and_offset_at(x, y)
        return widget, widget.text_offset_at(x, y) if isinstance(widget, Transcript) else offset


class Body(Container):
    BLANK = True


class SparkApp(App[int]):
    """One conversation with one engine."""

    CSS_PATH = "sparkchat.tcss"
    TITLE = "sparkchat"
    COMMAND_PALETTE_BINDING = "f10"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [(0, "-short"), (18, "-tall")]
    BINDINGS: ClassVar[list[BindingType]] = [*CHAT_BINDINGS]

    class EngineNews(Message):
        """Batches wait to be shown."""

    def __init__(
        self, config: RunConfig, make_engine: Callable[[], Engine], trace: TraceSink, is_replay: bool = False
    ) -> None:
        super().__init__(driver_class=TerminalDriver)
        self.config = config
        self.glyphs = glyphs(config.ascii)
        self.bridge = Bridge(make_engine, self._deliver, trace)
        self._trace = trace
        self._is_replay = is_replay
        self._panel_wish: bool | None = None
        self._quit_armed = False
        self._keymap_names: dict[str, str] = {}
        self._token: TokenSpan | None = None
        self._news: list[Batch] = []
        self._news_lock = threading.Lock()
        self.animation_level = "none"
        self._choose_colors(config)

    def _choose_colors(self, config: RunConfig) -> None:
        if config.color == "never" or (config.color == "auto" and self.no_color):
            # The terminal's own two colours only; attributes carry the meaning.
            self.theme = "ansi-dark"
            self._filters = [*self._filters, NoColor()]
        elif config.color == "always" and self.no_color:
            self._filters = [each for each in self._filters if each.__class__.__name__ not in ("Monochrome", "NoColor")]
        if self.console.color_system == "standard":
            # Sixteen colours: the terminal's own by name, not what happens to be nearest to a theme's shades.
            self.theme = "ansi-dark"

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        super()._display(screen, at_columns(renderable))

    def get_default_screen(self) -> Screen[Any]:
        return ChatScreen(id="_default")

    def compose(self) -> ComposeResult:
        yield PartsBar(self.glyphs, id="title")
        yield Badge(self.glyphs, id="badge")
        with Body(id="body"):
            yield Transcript(self.glyphs, id="transcript")
            yield StepPanel(self.glyphs, id="panel")
        yield PartsBar(self.glyphs, id="token")
        yield Prompt(History(user_paths().history), id="prompt")
        yield PartsBar(self.glyphs, id="status")

    def on_mount(self) -> None:
        self.set_class(self.config.ascii, "-plain-glyphs")
        self.transcript = self.query_one(Transcript)
        self.panel = self.query_one(StepPanel)
        self.prompt = self.query_one(Prompt)
        view = View(
            self.query_one("#title", PartsBar),
            self.query_one(Badge),
            self.transcript,
            self.panel,
            self.query_one("#status", PartsBar),
        )
        self.chat = LiveChat(self.config, self.bridge, self._trace, view, self, self.glyphs, self._is_replay)
        self.prompt.focus()
        self._place_panel()
        self.query_one("#token", PartsBar).display = False
        self.chat.begin(self._load_keymap())
        self.transcript.update_rows()
        watch_stops(self)
        self.call_after_refresh(set_aside, YOUNG_OBJECTS)

    def on_unmount(self) -> None:
        self.chat.close()

    def _load_keymap(self) -> list[str]:
        """Apply the user's keys; returns what to say about those that cannot be used."""
        own = [binding for binding in (*self.BINDINGS, *Prompt.BINDINGS) if isinstance(binding, Binding)]
        keymap, problems = load_keymap(user_paths().config / "keymap.toml", [each.id for each in own if each.id])
        lost = lost_keys(keymap, {binding.id: binding.key for binding in own if binding.id})
        problems += [f"{name} has no key any more: another action has it" for name, keys in lost.items() if not keys]
        self._keymap_names = keymap | {name: keys or "no key" for name, keys in lost.items()}
        self.set_keymap(keymap)
        return problems

    def on_resize(self, event: Resize) -> None:
        # ``self.size`` is the one before: Textual notes the new one behind this.
        self._place_panel(event.size)

    def _print_error_renderables(self) -> None:
        """The exception is raised again by :func:`run_tui`, and becomes one line, or a traceback with --debug."""

    # From the engine's thread

    def _deliver(self, batch: Batch) -> None:
        """Called from the bridge's thread. One message is under way at most: a slow terminal piles up no work."""
        with self._news_lock:
            self._news.append(batch)
            if len(self._news) > 1:
                return
        self.post_message(self.EngineNews())

    def on_spark_app_engine_news(self) -> None:
        with self._news_lock:
            news, self._news = self._news, []
        self.chat.receive(news)

    # live_chat.Desk

    def later(self, seconds: float, action: Callable[[], Any]) -> None:
        self.set_timer(seconds, action)

    def leave(self, code: int) -> None:
        self.exit(return_code=code)

    def send_to_clipboard(self, text: str) -> str:
        if self._driver is None or is_too_long(text):
            return f"{len(text)} characters are too many for a terminal's clipboard; use /export FILE"
        self._driver.write(osc52(text))
        return copied_message(text, in_tmux=fill_tmux_buffer(text))

    def copy_to_clipboard(self, text: str) -> None:
        self._clipboard = text
        self.chat.flash(self.send_to_clipboard(text))

    def edit(self, text: str) -> None:
        self.prompt.set_value(text)

    def give_back(self, text: str) -> None:
        self.prompt.set_value(f"{text}\n{since}" if (since := self.prompt.value) else text)

    def key_rows(self) -> list[tuple[str, str]]:
        return key_rows(self.BINDINGS, Prompt.BINDINGS, self._keymap_names)

    def act(self, action: str) -> None:
        self.call_later(self.run_action, action)

    def set_panel(self, shown: bool) -> None:
        self._panel_wish = shown
        self._place_panel()

    def _place_panel(self, size: Size | None = None) -> None:
        if not hasattr(self, "panel"):
            return
        width, height = size or self.size
        has_room = width >= 100 or (width >= 60 and height >= 20)
        self.panel.display = has_room if self._panel_wish is None else self._panel_wish
        self.panel.redraw()

    # Actions

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        self._quit_armed = False
        self._send(event.text)

    def _send(self, text: str) -> None:
        """A line for the chat. A chosen token goes with the text it is part of, and when another question is asked."""
        newest = self.chat.newest_id
        self.chat.send(text)
        token = self._token
        if token is not None and (newest != self.chat.newest_id or token.section not in self.transcript.sections):
            self._choose_token(None)

    def on_prompt_browsed(self, event: Prompt.Browsed) -> None:
        self.action_browse(event.where)

    def action_browse(self, where: str) -> None:
        transcript = self.transcript
        if where == "end":
            transcript.follow()
        else:
            step = {
                "page_up": -transcript.size.height + 1,
                "page_down": transcript.size.height - 1,
                "up": -1,
                "down": 1,
            }
            target = 0 if where == "home" else transcript.scroll_y + step[where]
            transcript.scroll_to(y=target, animate=False, immediate=True)
        self.chat.refresh_bars()

    def action_stop(self) -> None:
        self.screen.clear_selection()
        self.chat.stop()
        self._show()

    async def action_interrupt(self) -> None:
        await self.prompt.settle()
        selected = self.prompt.selected_text or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
        elif self.chat.stop():
            self._show()
        elif self.prompt.text:
            self.prompt.take()
            self.chat.flash("cleared; up brings it back, ctrl+q leaves")
        elif self._quit_armed:
            self.action_leave()
        else:
            self._quit_armed = True
            self.set_timer(QUIT_SECONDS, self._disarm)
            self.chat.flash("ctrl+c again to leave")

    def _disarm(self) -> None:
        self._quit_armed = False

    async def action_quit_if_empty(self) -> None:
        await self.prompt.settle()
        if self.prompt.text:
            self.prompt.action_delete_right()
        else:
            self.action_leave()

    def action_leave(self) -> None:
        self.chat.quit()

    async def action_quit(self) -> None:
        self.chat.quit()

    def action_cycle_mode(self) -> None:
        self.chat.cycle_mode()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.chat.help_rows()))

    def action_inspect(self) -> None:
        self.show_steps()

    def show_steps(self) -> None:
        """The steps of the newest answer, or of the one that holds the chosen token, at its step."""
        if isinstance(self.screen, InspectorScreen):
            return
        token = self._token
        steps = self.chat.steps_of(token.section.turn_id if token is not None else self.chat.newest_id)
        index = step_index(steps, token.step) if token is not None else None
        notice = None
        if token is not None and token.step is not None and index is None:
            index, notice = 0, f"step {token.step + 1}, which made the chosen token, {NOT_AT_HAND}"
        self.push_screen(InspectorScreen(self.glyphs, steps, index, notice))

    def action_compare(self) -> None:
        self.chat.send("/compare")

    def show_comparison(self, comparison: Comparison) -> None:
        self.push_screen(CompareScreen(self.glyphs, comparison, self.action_stop))

    def export_moved(self, job: ExportJob) -> None:
        self.call_later(self.chat.export_moved)

    def comparison_moved(self) -> None:
        if isinstance(self.screen, CompareScreen):
            self.screen.refresh_comparison()

    def action_copy_code(self) -> None:
        self.chat.send("/copy code")

    def action_chats(self) -> None:
        self.chat.send("/chats")

    def choose_chat(self, words: str) -> None:
        keeper = self.chat.keeper

        def chosen(chat_id: str | None) -> None:
            if chat_id is not None:
                self._send(f"/load {chat_id}")

        if not isinstance(self.screen, ChatsScreen):
            self.push_screen(ChatsScreen(keeper.store, words, keeper.id, self.config.ascii), chosen)

    def keep_prompts(self, kept: bool) -> None:
        self.prompt.past.is_kept = kept

    def action_toggle_panel(self) -> None:
        self.set_panel(not self.panel.display)

    def action_toggle_origins(self) -> None:
        self._show_origins(not self.transcript.show_origins)

    def _show_origins(self, shown: bool) -> None:
        self.transcript.show_origins = shown
        self._choose_token(None)
        marks = "drafts plain, the target's own underlined, corrections bold; alt+left walks"
        self.chat.flash(marks if shown else "token colours off")

    def action_walk_tokens(self, by: int) -> None:
        if not self.transcript.show_origins:
            self._show_origins(True)
        found = walked(self.transcript.sections, self._token, by)
        if found is not None:
            self._choose_token(self._token_at(*found))

    def _token_at(self, section: Section, offset: int) -> TokenSpan | None:
        return token_at(section, offset, self.chat.steps_of(section.turn_id))

    def _choose_token(self, token: TokenSpan | None) -> None:
        self._token = token
        self.transcript.mark_token(None if token is None else (token.section, token.start, token.end))
        bar = self.query_one("#token", PartsBar)
        bar.display = token is not None
        if token is not None:
            record = find_step(self.chat.steps_of(token.section.turn_id), token.step)
            bar.show([(0, token_line(token, record), "text"), (1, "F4 step", "dim")])

    def on_transcript_clicked(self, event: Transcript.Clicked) -> None:
        """A click on a folded part unfolds it, on the edge of a code block copies it, on a token says how it came."""
        if self.chat.toggle_part(event.section):
            return
        if event.code is not None:
            self.copy_to_clipboard(event.code)
        elif self.transcript.show_origins:
            self._choose_token(self._token_at(event.section, event.offset))

    def action_toggle_thinking(self) -> None:
        self.chat.toggle_thinking()

    async def action_search_history(self) -> None:
        await self.prompt.settle()
        if not self.prompt.search_history():
            self.chat.flash("nothing older in the history holds that")

    async def action_editor(self) -> None:
        """Hand the prompt to the user's editor; the screen is given back meanwhile."""
        await self.prompt.settle()
        try:
            command = editor_command()
            with self.suspend():
                text = edited(command, self.prompt.value)
        except SuspendNotSupported:
            self.chat.flash("this terminal cannot be handed to an editor")
            return
        except SparkchatError as error:
            self.chat.flash(error.message)
            return
        if text is not None:
            self.prompt.set_value(text)
        self.refresh()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(f"/{command.name}", command.help, lambda name=command.name: self._from_palette(name))
        for binding in self.BINDINGS:
            if isinstance(binding, Binding) and binding.action != "command_palette":
                yield SystemCommand(binding.description, binding.key, self._later_action(binding.action))

    def _later_action(self, action: str) -> Callable[[], None]:
        def run() -> None:
            self.act(action)

        return run

    def _from_palette(self, name: str) -> None:
        if name in _NEEDS_ARGUMENT:
            self.prompt.set_value(f"/{name} ")
            self.prompt.focus()
        else:
            self._send(f"/{name}")

    def _show(self) -> None:
        self.transcript.update_rows()
        self.chat.refresh_bars()


YOUNG_OBJECTS = 4000
"""Drawing leaves nothing to the collector, a key some forty objects. More than an update holds at once: at the usual
700 what it is about to let go of would be moved to the old ones first."""


def run_tui(config: RunConfig, make_engine: Callable[[], Engine] | None = None) -> int:
    """Open the full-screen chat; returns the exit code. The terminal is as it was found, whatever happens.

    Raises UsageError when the chat to go on with is not there.
    """
    if config.resume is not None:
        ChatStore(user_paths().sessions).find(config.resume)
    trace = TraceSink(config.argv)
    if config.trace_path is not None:
        trace.open(config.trace_path, config.trace_force)
    return run_app(SparkApp(config, make_engine or (lambda: EngineClient(config.spec)), trace), trace)


def run_app(app: SparkApp, trace: TraceSink) -> int:
    """Run the app on the terminal, which is as it was found afterwards; returns the exit code."""
    for name in ("COLUMNS", "LINES"):
        # Exported by some shells, they would stand for the size for ever; the terminal knows it better.
        os.environ.pop(name, None)
    guard = TerminalGuard(lambda code: app.exit(return_code=code))
    try:
        with guard:
            app.run()
            guard.is_clean = app._exception is None
    finally:
        # The terminal is the user's again; an answer that was running still gets its end in the trace.
        if hasattr(app, "chat") and (running := app.chat.running_id) is not None:
            app.bridge.stop_answer(running, END_SECONDS)
        app.bridge.close()
        trace.close()
    if guard.exit_code is not None:
        return guard.exit_code
    if app._exception is not None:
        raise app._exception
    failure: SparkchatError | None = app.chat.failure if hasattr(app, "chat") else None
    if failure is not None and app.return_code:
        raise failure
    return app.return_code or 0
