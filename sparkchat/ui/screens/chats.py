"""The kept chats: search in them, go on with one, delete one."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from sparkchat.ui.chats import ChatEntry, ChatStore
from sparkchat.ui.safe_text import visible

SEARCH_SECONDS = 0.25
"""A search begins when nothing has been typed for so long."""
_HELP = "enter: go on with it   ctrl+x twice: delete   esc: close"


class ChatsScreen(ModalScreen[str | None]):
    """Gives the id of the chosen chat, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f8", "close", "close"),
        Binding("down", "move('cursor_down')", "down"),
        Binding("up", "move('cursor_up')", "up"),
        Binding("pagedown", "move('page_down')", "page down"),
        Binding("pageup", "move('page_up')", "page up"),
        Binding("ctrl+x", "delete", "delete", priority=True),
    ]

    def __init__(self, store: ChatStore, words: str, present: str | None, ascii_only: bool) -> None:
        super().__init__()
        self._store = store
        self._words = words
        self._present = present
        self._ascii_only = ascii_only
        self._entries: list[ChatEntry] = []
        self._armed: str | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="chats-box"):
            yield Input(self._words, placeholder="search in your chats", id="chats-search", compact=True)
            yield OptionList(id="chats-list", markup=False, compact=True)
            yield Static(Content(_HELP), id="chats-help")

    def on_mount(self) -> None:
        self._timer: Timer | None = None
        self.query_one(Input).focus()
        self._search()

    @on(Input.Changed)
    def _wait_for_more(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(SEARCH_SECONDS, self._search)

    def _search(self) -> None:
        self._entries = self._store.entries(self.query_one(Input).value)
        shown, now = self.query_one(OptionList), time.time()
        width = max(self.size.width - 8, 30)
        shown.clear_options()
        shown.add_options(Option(Content(self._line(number, each, now, width))) for number, each in self._numbered())
        if self._entries:
            shown.highlighted = 0
        self._say(_HELP if self._entries else "no kept chat holds that   esc: close")

    def _numbered(self) -> list[tuple[int, ChatEntry]]:
        return list(enumerate(self._entries, 1))

    def _line(self, number: int, entry: ChatEntry, now: float, width: int) -> str:
        mark = "*" if entry.id == self._present else " "
        return visible(mark + entry.line(number, now, width - 1), self._ascii_only)

    def _say(self, text: str) -> None:
        self.query_one("#chats-help", Static).update(Content(text))

    @property
    def _chosen(self) -> ChatEntry | None:
        index = self.query_one(OptionList).highlighted
        return self._entries[index] if index is not None and index < len(self._entries) else None

    def action_close(self) -> None:
        self.dismiss(None)

    def action_move(self, action: str) -> None:
        self._armed = None
        getattr(self.query_one(OptionList), f"action_{action}")()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _choose(self) -> None:
        entry = self._chosen
        self.dismiss(entry.id if entry is not None else None)

    def action_delete(self) -> None:
        entry = self._chosen
        if entry is None:
            return
        if entry.id == self._present:
            self._say("this is the present chat; /new first, then delete it")
        elif self._armed == entry.id:
            self._store.delete(entry.id)
            self._armed = None
            self._search()
            self._say("deleted")
        else:
            self._armed = entry.id
            self._say("ctrl+x again deletes it for good")
