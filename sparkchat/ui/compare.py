"""Does speculation help here? The last question again, with the same seed, under every mode, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparkchat.params import GenerateRequest, Mode
from sparkchat.ui.stats import number

ORDER: tuple[Mode, ...] = ("off", "static", "compact", "cap-accept")


class Comparison:
    """The runs of one question. Each is a request of its own, without a session, so none profits from another."""

    def __init__(self, request: GenerateRequest, seed: int | None, modes: Sequence[Mode] = ORDER) -> None:
        sampling = request.sampling if seed is None else replace(request.sampling, seed=seed)
        self._requests = [
            replace(request, id=f"{request.id}-{mode}", mode=mode, session=None, sampling=sampling) for mode in modes
        ]
        self._results: list[dict[str, Any]] = []
        self.num_tokens = 0
        """Tokens of the run that is going on."""

    @property
    def current(self) -> GenerateRequest | None:
        """The request that runs or is to run next; None when all are done."""
        return self._requests[len(self._results)] if len(self._results) < len(self._requests) else None

    @property
    def progress(self) -> str:
        request = self.current
        where = f"{len(self._results) + 1} of {len(self._requests)}"
        return f"comparing {request.mode}, {where}: {self.num_tokens} tokens" if request else "compared"

    def take_end(self, result: dict[str, Any]) -> None:
        self._results.append(result)
        self.num_tokens = 0

    def table(self) -> str:
        """A Markdown table of the runs that ended, and what it says."""
        rows = ["| mode | tok/s | speed-up | acceptance length | steps | tokens | first token ms | text |"]
        rows.append("|---|---|---|---|---|---|---|---|")
        rows += [f"| {' | '.join(self._row(result))} |" for result in self._results]
        return "\n".join([*rows, "", self._verdict()])

    def _row(self, result: dict[str, Any]) -> list[str]:
        speculation, timing = result["speculation"], result["timing"]
        mode = str(self._requests[self._results.index(result)].mode)
        length = "-" if mode == "off" else number(speculation["mean_acceptance_length"], 2)
        return [
            mode,
            number(timing["tokens_per_second"]),
            self._speed_up(result),
            length,
            str(speculation["num_steps"]),
            str(result["usage"]["completion_tokens"]),
            number(timing["ttft_ms"]),
            self._text_note(result),
        ]

    def _speed_up(self, result: dict[str, Any]) -> str:
        base, rate = self._plain_rate(), result["timing"]["tokens_per_second"]
        return f"{rate / base:.2f}x" if base and rate else "-"

    def _plain_rate(self) -> float | None:
        first = self._results[0] if self._results and self._requests[0].mode == "off" else None
        return first["timing"]["tokens_per_second"] if first else None

    def _text_note(self, result: dict[str, Any]) -> str:
        if result["finish_reason"] in ("error", "cancelled"):
            return str(result.get("error") or "stopped").replace("|", "/").replace("\n", " ")
        if result is self._results[0]:
            return "the reference"
        return "the same" if result["token_ids"] == self._results[0]["token_ids"] else "differs"

    def _verdict(self) -> str:
        greedy = self._requests[0].sampling.temperature == 0
        sameness = (
            "Greedy: texts are the same up to numeric ties."
            if greedy
            else "With a temperature the texts may differ from mode to mode; the law they are drawn from is the same."
        )
        rates = [r["timing"]["tokens_per_second"] for r in self._results]
        known = [(rate, str(self._requests[index].mode)) for index, rate in enumerate(rates) if rate]
        return f"Fastest here: {max(known)[1]}. {sameness}" if known else sameness
