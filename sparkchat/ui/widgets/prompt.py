"""Where the user writes: enter sends, pasting never does, and what is stored is what was typed or pasted."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea
from textual.widgets.text_area import Location

from sparkchat.ui.commands import completions
from sparkchat.ui.graphemes import next_boundary, previous_boundary
from sparkchat.ui.history import History
from sparkchat.ui.prompt_text import FILLER, decoded, encoded, shown_line, typed_character

SETTLE_SECONDS = 2.0
"""No key waits longer for the letters before it."""


class Prompt(TextArea):
    """A text area that sends."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("shift+enter,alt+enter,ctrl+j", "newline", "new line", show=False, id="prompt.newline"),
        Binding("tab", "complete", "complete a slash command", show=False, id="prompt.complete"),
        Binding("alt+b", "cursor_word_left", show=False),
        Binding("alt+f", "cursor_word_right", show=False),
    ]

    class Sent(Message):
        """The user has sent ``text``."""

        def __init__(self, text: str) -> None:
            self.text = text
            super().__init__()

    class Browsed(Message):
        """The user wants to see another part of the conversation."""

        def __init__(self, where: str) -> None:
            self.where = where
            super().__init__()

    def __init__(self, history: History, *, id: str | None = None) -> None:
        super().__init__(id=id, soft_wrap=True, show_line_numbers=False, compact=True, highlight_cursor_line=False)
        self.cursor_blink = False
        self.past = history
        self._search: tuple[str, int] | None = None

    @property
    def value(self) -> str:
        """What the user means to send, control characters and all."""
        return decoded(self.text)

    def set_value(self, text: str) -> None:
        self.load_text(encoded(text))
        self.move_cursor(self.document.end)

    def take(self) -> str:
        """Empty the prompt; what was in it stays in the history."""
        text = self.value
        self.past.add(text)
        self.clear()
        self._search = None
        return text

    # Keys

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(self.Sent(self.take()))
            return
        if event.key not in ("ctrl+r", "up", "down"):
            self._search = None
        character = typed_character(event)
        if character is not None:
            self.past.stop_browsing()
            if not event.is_printable:
                event.stop()
                event.prevent_default()
                self._replace_via_keyboard(encoded(character), *self.selection)
                return
        elif await self._do_at_once(event.key):
            event.stop()
            event.prevent_default()
            return
        await super()._on_key(event)

    async def settle(self) -> None:
        """Wait for the letters that came in one bunch with a key of the app's, which the app gets to see first."""
        written = asyncio.Event()
        if self.call_later(written.set):
            with suppress(TimeoutError):
                await asyncio.wait_for(written.wait(), SETTLE_SECONDS)

    async def _do_at_once(self, key: str) -> bool:
        """Run what a key of the prompt's own does.

        Left to the library it would wait behind the letters that came with it, and ctrl+u would delete what was typed
        after it, when keys come in a bunch: over a slow line, or to a busy machine.
        """
        for binding in self._bindings.key_to_bindings.get(key, ()):
            if not binding.priority and await self.app.run_action(binding.action, self):
                return True
        return False

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = encoded(re.sub("\r\n?", "\n", event.text))
        if result := self._replace_via_keyboard(text, *self.selection):
            self.move_cursor(result.end_location)

    def action_newline(self) -> None:
        self._replace_via_keyboard("\n", *self.selection)

    def action_complete(self) -> None:
        """As much of the command's name as is certain."""
        found = completions(self.value) if self.value.startswith("/") else []
        if not found:
            return
        certain = found[0]
        while not all(name.startswith(certain) for name in found):
            certain = certain[:-1]
        self.set_value(f"{certain} " if len(found) == 1 else certain)

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self._cursor_offset[1] == 0:
            self._show(self.past.older(self.value))
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self._cursor_offset[1] >= self.wrapped_document.height - 1:
            self._show(self.past.newer())
        else:
            super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Browsed("page_up"))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Browsed("page_down"))

    def action_cursor_line_end(self, select: bool = False) -> None:
        if not select and self.cursor_at_end_of_line:
            self.post_message(self.Browsed("end"))
        else:
            super().action_cursor_line_end(select)

    def search_history(self) -> bool:
        """Show the newest entry that holds what is written, then an older one at each call; False when none is left."""
        wanted, before = self._search or (self.value, len(self.past.entries))
        found = self.past.search(wanted, before)
        while found is not None and self.past.entries[found].startswith("/history "):
            found = self.past.search(wanted, found)  # itself a search for the same words
        if found is None:
            return False
        self._show(self.past.entries[found])
        self._search = (wanted, found)
        return True

    def _show(self, text: str | None) -> None:
        if text is not None:
            self.set_value(text)

    # One visible character is one step of the cursor, and one delete

    def get_cursor_left_location(self) -> Location:
        row, column = self.cursor_location
        if column == 0:
            return super().get_cursor_left_location()
        return row, previous_boundary(self.document.get_line(row), column)

    def get_cursor_right_location(self) -> Location:
        row, column = self.cursor_location
        line = self.document.get_line(row)
        if column >= len(line):
            return super().get_cursor_right_location()
        return row, next_boundary(line, column)

    # Drawing

    def get_line(self, line_index: int) -> Text:
        return Text(shown_line(self.document.get_line(line_index)), end="", no_wrap=True)

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        if FILLER not in strip.text:
            return strip
        segments = [Segment(text.replace(FILLER, ""), style, control) for text, style, control in strip]
        return Strip(segments, strip.cell_length)
