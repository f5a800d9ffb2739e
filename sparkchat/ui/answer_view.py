"""How questions, answers, thinking and our own sentences become sections of the transcript, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Writes into the transcript; whoever calls it redraws the transcript afterwards.

    What was drawn for a turn is kept, so that another branch or an earlier place is shown again as it was.
    """

    def __init__(self, transcript: Transcript, glyphs: Glyphs) -> None:
        self._transcript = transcript
        self._glyphs = glyphs
        self.shows_thinking = False
        self._thinking: dict[Section, Section] = {}
        """The line that stands for a thinking part -> the part."""
        self._drawn: dict[int, list[Section]] = {}
        self._current: list[Section] = []
        """The sections of the turn that is being written; before the first question, of none."""

    def clear(self) -> None:
        self._thinking.clear()
        self._drawn.clear()
        self._current = []
        self._transcript.clear()

    def question(self, turn: Turn) -> None:
        self._current = self._drawn[turn.number] = []
        self._add(turn.prompt, "user", margin=f"{self._glyphs.user} ")

    def note(self, text: str, style: str = "notice") -> None:
        self._add(text, style)

    def table(self, markdown: str) -> None:
        section = self._begin("markdown")
        section.append(markdown)
        section.finish()

    def show_path(self, turns: Sequence[Turn]) -> None:
        """Show these turns and nothing else; those that were never drawn are drawn from what is known of them."""
        self._transcript.clear()
        self._current = []
        for turn in turns:
            if turn.number in self._drawn:
                self._current = self._drawn[turn.number]
                self._transcript.put_back(self._current)
            else:
                self._draw(turn)

    def _draw(self, turn: Turn) -> None:
        self.question(turn)
        answer = turn.answer
        if answer.thinking:
            head, section = self._thinking_part()
            section.append(answer.thinking)
            section.finish()
            head.replace(self._thinking_text(section))
        if answer.text:
            section = self._begin("markdown")
            section.append(answer.text)
            section.finish()
        if answer.result is not None:
            self._add(result_line(answer.result, self._glyphs.separator), "footer", gap=bool(answer.text))
        elif answer.was_stopped:
            self._add("stopped before its end", "footer", gap=bool(answer.text))

    def take_text(self, active: ActiveAnswer, update: TextUpdate) -> None:
        if active.section is None or active.channel != update.channel:
            self._open_section(active, update.channel)
        assert active.section is not None
        for run in update.runs:
            active.section.append(run.text)
            active.section.mark_origin(run.origin, run.step)
        if update.channel == "thinking":
            assert active.thinking_head is not None
            active.thinking_head.replace(self._thinking_text(active.section))

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

    # Thinking

    def show_thinking(self, shown: bool) -> None:
        self.shows_thinking = shown
        for head, section in self._thinking.items():
            self._fold(head, section, not shown)
        self._transcript.update_rows(all_rows=True)

    def toggle_part(self, head: Section) -> bool:
        """Fold or unfold the one thinking part that ``head`` stands for; False when it stands for none."""
        section = self._thinking.get(head)
        if section is None:
            return False
        self._fold(head, section, not section.is_folded)
        self._transcript.update_rows(all_rows=True)
        return True

    def _fold(self, head: Section, section: Section, folded: bool) -> None:
        section.is_folded = folded
        head.replace(self._thinking_text(section))

    def _thinking_part(self) -> tuple[Section, Section]:
        head = self._begin("plain", "thinking")
        section = self._begin("plain", "thinking", margin="  ", gap=False)
        section.is_folded = not self.shows_thinking
        self._thinking[head] = section
        return head, section

    def _thinking_text(self, section: Section) -> str:
        mark = self._glyphs.folded if section.is_folded else self._glyphs.unfolded
        dot = self._glyphs.separator
        return f"{mark} thinking {dot} {section.num_words} words {dot} ctrl+t"

    # Sections

    def _begin(self, syntax: Any, style: str = "", **options: Any) -> Section:
        section = self._transcript.add_section(syntax, style, **options)
        self._current.append(section)
        return section

    def _add(self, text: str, style: str, **options: Any) -> None:
        section = self._begin("plain", style, **options)
        section.append(text)
        section.finish()

    def _open_section(self, active: ActiveAnswer, channel: str) -> None:
        if active.section is not None:
            active.section.finish()
        active.channel = channel
        if channel == "thinking":
            active.thinking_head, active.section = self._thinking_part()
        else:
            active.section = self._begin("markdown")
        active.section.turn_id = active.turn.request_id
        active.turn.answer.add_part(channel, active.section.source)
