"""What every key of the chat does, by action id; ``keymap.toml`` in the config folder gives an action other keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.binding import Binding, BindingType


def _first(keys: str, action: str, what: str, name: str) -> Binding:
    """A key that the prompt does not get to see."""
    return Binding(keys, action, what, id=name, priority=True)


CHAT_BINDINGS: Sequence[Binding] = (
    Binding("escape", "stop", "stop the answer", id="answer.stop"),
    _first("ctrl+c", "interrupt", "copy a selection, else stop, else clear, else quit", "interrupt"),
    _first("ctrl+d", "quit_if_empty", "leave, when nothing is written", "quit.empty"),
    _first("ctrl+q", "leave", "leave", "quit"),
    _first("shift+tab,f6", "cycle_mode", "next verify mode, also during an answer", "mode.cycle"),
    _first("f1", "help", "this help", "help"),
    _first("f2", "toggle_panel", "stats panel", "panel.toggle"),
    _first("f3", "toggle_origins", "token colours: what was drafted, and what the target chose", "tokens.toggle"),
    _first("alt+left", "walk_tokens(-1)", "the token before, and how it came about", "tokens.previous"),
    _first("alt+right", "walk_tokens(1)", "the token after", "tokens.next"),
    _first("f4", "inspect", "step inspector, at the chosen token's step", "steps.inspect"),
    _first("f5", "compare", "the last question again under every mode, side by side", "compare"),
    _first("f7", "copy_code", "copy the last code block", "copy.code"),
    _first("f8", "chats", "kept chats: search, go on, delete", "chats"),
    _first("ctrl+t", "toggle_thinking", "show or hide the thinking", "thinking.toggle"),
    _first("ctrl+r", "search_history", "search the history for what is written", "history.search"),
    _first("ctrl+g", "editor", "write in $VISUAL or $EDITOR", "prompt.editor"),
    Binding("pageup", "browse('page_up')", "scroll up", id="scroll.page_up"),
    Binding("pagedown", "browse('page_down')", "scroll down", id="scroll.page_down"),
    _first("ctrl+up", "browse('up')", "scroll up a line", "scroll.up"),
    _first("ctrl+down", "browse('down')", "scroll down a line", "scroll.down"),
    _first("ctrl+home", "browse('home')", "go to the start", "scroll.home"),
    Binding("ctrl+end,end", "browse('end')", "go to the end and follow it", id="scroll.end"),
    _first("f10,ctrl+backslash", "command_palette", "command palette", "palette"),
)

_PROMPT_ROWS = (("enter", "send"), ("up, down", "history, on the first and the last line"))


def key_rows(
    bindings: Sequence[BindingType], prompt: Sequence[BindingType], keymap: Mapping[str, str]
) -> list[tuple[str, str]]:
    """(keys, what they do) of everything that is bound, after the user's own keys."""
    own = [_row(each, keymap) for each in bindings if isinstance(each, Binding)]
    writing = [_row(each, keymap) for each in prompt if isinstance(each, Binding) and each.id]
    return [_PROMPT_ROWS[0], *writing, _PROMPT_ROWS[1], *own]


def _row(binding: Binding, keymap: Mapping[str, str]) -> tuple[str, str]:
    keys = keymap.get(binding.id or "", binding.key)
    return keys.replace(",", ", "), binding.description
