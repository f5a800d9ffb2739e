"""What the keys and the slash commands do, made from what is bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from sparkchat.ui.safe_text import in_columns


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,f1,enter", "dismiss", "close")]

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._rows = rows

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help-box"):
            yield Static("", id="help-text")

    def on_resize(self) -> None:
        # Border, padding and scroll bar are not for the text.
        width = min(self.size.width * 9 // 10, 100) - 6
        self.query_one("#help-text", Static).update(Content(in_columns(self._rows, width)))
