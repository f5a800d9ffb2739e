"""How questions, answers, thinking and our own sentences become sections of the transcript."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkchat.ui.bridge import TextUpdate
from sparkchat.ui.conversation import Turn
from sparkchat.ui.document import Section
from sparkchat.ui.glyphs import Glyphs
from sparkchat.ui.stats import result_line
from sparkchat.ui.widgets.transcript import Transcript


@dataclass
class ActiveAnswer:
    """An answer on its way."""

    turn: Turn
    has_started: bool = False
    is_stopping: bool = False
    section: Section | None = None
    channel: str = ""
    thinking_head: Section | None = None


class AnswerView:
    """Writes into the transcript; whoever calls it redraws the transcript afterwards."""

    def __init__(self, transcript: Transcript, glyphs: Glyphs) -> None:
        self._transcript = transcript
        self._glyphs = glyphs
        self.shows_thinking = False
        self._thinking: list[tuple[Section, Section]] = []

    def clear(self) -> None:
        self._thinking.clear()
        self._transcript.clear()

    def question(self, text: str) -> None:
        self._add(text, "user", margin=f"{self._glyphs.user} ")

    def note(self, text: str, style: str = "notice") -> None:
        self._add(text, style)

    def table(self, markdown: str) -> None:
        section = self._transcript.add_section("markdown")
        section.append(markdown)
        section.finish()

    def take_text(self, active: ActiveAnswer, update: TextUpdate) -> None:
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

    def close(self, active: ActiveAnswer, result: dict[str, Any] | None, num_tokens: int) -> None:
        """End the answer; without a result it was stopped, or the engine is gone."""
        if active.section is not None:
            active.section.finish()
        active.turn.answer.was_stopped = result is None or result.get("finish_reason") == "cancelled"
        if result is not None and result.get("finish_reason") == "error":
            self.note(result.get("error") or "the engine refused the request", "error")
        stopped = f"{num_tokens} tokens {self._glyphs.separator} stopped"
        line = stopped if result is None else result_line(result, self._glyphs.separator)
        self._add(line, "footer", gap=active.section is not None)

    def show_thinking(self, shown: bool) -> None:
        self.shows_thinking = shown
        for head, section in self._thinking:
            section.is_folded = not shown
            head.replace(self._thinking_text(section))
        self._transcript.update_rows(all_rows=True)

    def _add(self, text: str, style: str, **options: Any) -> None:
        section = self._transcript.add_section("plain", style, **options)
        section.append(text)
        section.finish()

    def _open_section(self, active: ActiveAnswer, channel: str) -> None:
        if active.section is not None:
            active.section.finish()
        active.channel = channel
        if channel == "thinking":
            active.thinking_head = self._transcript.add_section("plain", "thinking")
            active.section = self._transcript.add_section("plain", "thinking", margin="  ", gap=False)
            active.section.is_folded = not self.shows_thinking
            self._thinking.append((active.thinking_head, active.section))
        else:
            active.section = self._transcript.add_section("markdown")

    def _thinking_text(self, section: Section) -> str:
        mark = self._glyphs.folded if section.is_folded else self._glyphs.unfolded
        dot = self._glyphs.separator
        return f"{mark} thinking {dot} {len(section.text.split())} words {dot} ctrl+t"
