"""Does speculation help here? The last question again, with the same seed, under every mode, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkchat.params import GenerateRequest, Mode
from sparkchat.ui.bridge import TextUpdate
from sparkchat.ui.stats import Snapshot, number

ORDER: tuple[Mode, ...] = ("off", "static", "compact", "cap-accept")


@dataclass
class Run:
    """One mode's answer, as far as it has come."""

    request: GenerateRequest
    text: str = ""
    snapshot: Snapshot | None = None
    result: dict[str, Any] | None = None

    @property
    def mode(self) -> str:
        return str(self.request.mode)

    @property
    def rate(self) -> float | None:
        """Tokens a second: of the whole answer once it has ended."""
        if self.result is not None:
            rate: float | None = self.result["timing"]["tokens_per_second"]
            return rate
        return None if self.snapshot is None else self.snapshot.tokens_per_second

    @property
    def acceptance_length(self) -> float | None:
        if self.mode == "off":
            return None
        if self.result is not None:
            length: float | None = self.result["speculation"]["mean_acceptance_length"]
            return length
        return None if self.snapshot is None else self.snapshot.mean_acceptance_length

    @property
    def num_tokens(self) -> int:
        if self.result is not None:
            return int(self.result["usage"]["completion_tokens"] or 0)
        return 0 if self.snapshot is None else self.snapshot.num_tokens


class Comparison:
    """The runs of one question. Each is a request of its own, without a session, so none profits from another."""

    def __init__(self, request: GenerateRequest, seed: int | None, modes: Sequence[Mode] = ORDER) -> None:
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed)
        self.runs = [
            Run(replace(request, id=f"{request.id}-{mode}", mode=mode, session=None, sampling=sampling))
            for mode in modes
        ]
        self.was_stopped = False

    @property
    def current_run(self) -> Run | None:
        """The run that goes on or comes next; None when all are done."""
        return None if self.was_stopped else next((run for run in self.runs if run.result is None), None)

    @property
    def current(self) -> GenerateRequest | None:
        run = self.current_run
        return run.request if run is not None else None

    @property
    def progress(self) -> str:
        run = self.current_run
        if run is None:
            return "compared"
        return f"comparing {run.mode}, {self.runs.index(run) + 1} of {len(self.runs)}: {run.num_tokens} tokens"

    def take_text(self, update: TextUpdate) -> None:
        run = self.current_run
        if run is not None and update.id == run.request.id and update.channel == "answer":
            run.text += "".join(part.text for part in update.runs)

    def take_numbers(self, snapshot: Snapshot) -> None:
        if (run := self.current_run) is not None:
            run.snapshot = snapshot

    def take_end(self, result: dict[str, Any]) -> None:
        run = self.current_run
        assert run is not None
        run.result, run.text = result, result["text"]

    def stop(self) -> None:
        """What has come stays to be read."""
        self.was_stopped = True

    # What it says

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.result is not None]

    def speed_up(self, run: Run) -> float | None:
        base, rate = self._plain_rate(), run.rate
        return rate / base if base and rate else None

    def text_note(self, run: Run) -> str:
        """Whether the tokens are those of the first run, or why nobody knows."""
        result, first = run.result, self.runs[0].result
        if self.was_stopped and result is None:
            return "stopped" if run.snapshot is not None else "not run: stopped"
        if result is None or first is None:
            return "-" if run is not self.runs[0] else "the reference"
        if result["finish_reason"] in ("error", "cancelled"):
            return str(result.get("error") or "stopped").replace("|", "/").replace("\n", " ")
        if run is self.runs[0]:
            return "the reference"
        return "the same" if result["token_ids"] == first["token_ids"] else "differs"

    def difference(self, run: Run) -> int | None:
        """Offset of the first character that differs from the reference's text; None while nothing does."""
        first, text = self.runs[0].text, run.text
        if run is self.runs[0]:
            return None
        length = min(len(first), len(text))
        if first[:length] == text[:length]:
            is_over = run.result is not None and self.runs[0].result is not None
            return length if is_over and len(first) != len(text) else None
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if first[:middle] == text[:middle] else (low, middle - 1)
        return low

    def table(self) -> str:
        """A Markdown table of the runs that ended, and what it says."""
        rows = ["| mode | tok/s | speed-up | acceptance | steps | tokens | text |", "|---|---|---|---|---|---|---|"]
        rows += [f"| {' | '.join(self._row(run))} |" for run in self.done]
        return "\n".join([*rows, "", self.verdict()])

    def _row(self, run: Run) -> list[str]:
        assert run.result is not None
        result, speed_up = run.result, self.speed_up(run)
        return [
            run.mode,
            number(run.rate),
            "-" if speed_up is None else f"{speed_up:.2f}x",
            number(run.acceptance_length, 2),
            str(result["speculation"]["num_steps"]),
            str(result["usage"]["completion_tokens"]),
            self.text_note(run),
        ]

    def _plain_rate(self) -> float | None:
        first = self.runs[0]
        return first.rate if first.mode == "off" and first.result is not None else None

    def verdict(self) -> str:
        greedy = self.runs[0].request.sampling.temperature == 0
        sameness = (
            "Greedy: texts are the same up to numeric ties."
            if greedy
            else "Above temperature 0 texts differ, their law does not."
        )
        known = [(run.rate, run.mode) for run in self.done if run.rate]
        return f"Fastest here: {max(known)[1]}. {sameness}" if known else sameness
