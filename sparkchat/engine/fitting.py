"""A process of its own that fits confidence temperatures: blocks as JSON on stdin, the fit as JSON on stdout.

The parent never imports torch, and the engine may be busy or not be there at all: what is fitted to traces needs no
model. What is fitted is stored where the engine looks for it when it loads the same pair on the same kind of device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.calibration import (
    corrected_survival,
    fit_temperatures,
    measure,
    save_temperatures,
    survival,
)
from sparkchat.engine.correction_fit import better_correction
from sparkchat.engine.device import resolve_device
from sparkchat.engine.stored_temperatures import temperatures_folder, temperatures_key
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import Correction, LoadSpec

FOLDS = 5
"""Parts that the answers are cut into: the figures of each are of a fit to the others."""
FEWEST_BLOCKS = 30
FEWEST_OF_KIND = 250
"""Blocks of one kind of sampling that are worth a correction of its own."""
CHANCE_DRAWS = 16

Fit = Callable[[Tensor], Correction]
"""Fits to the blocks that a mask [N] names."""


def main() -> None:
    """Entry of the process: prints one object, with ``error`` in it when there is nothing else to say."""
    try:
        answer = fit(json.load(sys.stdin))
    except SparkchatError as error:
        answer = {"error": type(error).__name__, "message": error.message}
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")


def fit(asked: dict[str, Any]) -> dict[str, Any]:
    """``asked``: ``blocks`` (logits, accepted, judged, chat, kind), ``spec`` of the pair, ``about`` for the file.

    ``kind`` names the kind of sampling of each block, or is null where that is not known. Returns temperatures, the
    figures by position before and after, the same by kind, and the file they are stored in. What is kept is fitted to
    all blocks; every block is judged by a fit to other answers, where there are others.
    """
    logits = torch.tensor(asked["blocks"]["logits"], dtype=torch.float64)
    accepted, judged, chat = (torch.tensor(asked["blocks"][name]) for name in ("accepted", "judged", "chat"))
    if len(logits) < FEWEST_BLOCKS:
        raise UsageError(
            f"there are {len(logits)} verified blocks, too few to fit temperatures to; give more traces, or --prompts"
        )
    blocks = Judged(logits, accepted, judged, chat)

    def temperatures_of(part: Tensor) -> Correction:
        found = fit_temperatures(logits[part], accepted[part], judged[part]).temperatures
        return Correction(found, (0.0,) * len(found))

    everything = torch.ones(len(logits), dtype=torch.bool)
    found = temperatures_of(everything)
    temperatures = found.temperatures
    answer = {
        "temperatures": list(temperatures),
        "num_blocks": len(logits),
        "num_held_out": len(logits) if blocks.is_split else 0,
        **blocks.figures(temperatures_of, found),
        "file": None,
    }
    kinds = _by_kind(blocks, asked["blocks"].get("kind"))
    answer["by_kind"] = {kind: figures for kind, (_, figures) in kinds.items()}
    spec = LoadSpec.from_json(asked["spec"])
    folder = temperatures_folder(spec)
    if folder is not None:
        key = temperatures_key(spec, resolve_device(spec.device))
        about = {**asked.get("about", {}), "before": answer["before"], "after": answer["after"]}
        corrections = {kind: correction for kind, (correction, _) in kinds.items()}
        answer["file"] = str(save_temperatures(Path(folder), key, temperatures, about, corrections))
    return answer


@dataclass(frozen=True)
class Judged:
    """N blocks of g drafts."""

    logits: Tensor
    """[N, g]"""
    accepted: Tensor
    """[N] leading drafts accepted"""
    judged: Tensor
    """[N] leading drafts that the target judged"""
    chat: Tensor
    """[N] which answer"""

    @property
    def is_split(self) -> bool:
        return len(set((self.chat % FOLDS).tolist())) > 1

    def of(self, part: Tensor) -> Judged:
        return Judged(self.logits[part], self.accepted[part], self.judged[part], self.chat[part])

    def held_out(self, fit: Fit) -> Tensor:
        """[N, g] survivals, those of each answer by a fit to others; of a single answer, by a fit to itself."""
        folds = self.chat % FOLDS if self.is_split else torch.zeros_like(self.chat)
        alive = torch.empty(self.logits.shape, dtype=torch.float64)
        for fold in set(folds.tolist()):
            part = folds == fold
            found = fit(~part if self.is_split else part)
            alive[part] = corrected_survival(self.logits[part], [found] * int(part.sum()))
        return alive

    def figures(self, fit: Fit, found: Correction) -> dict[str, Any]:
        """By position: as drafted, held out, and the calibration error that perfect confidences would show here.

        The AUC after is of ``found``, the fit to all: survivals by several fits are in no order.
        """
        alive = self.held_out(fit)
        ranked = measure(corrected_survival(self.logits, [found] * len(self.logits)), self.accepted, self.judged)
        after = measure(alive, self.accepted, self.judged)
        return {
            "before": [asdict(m) for m in measure(survival(self.logits), self.accepted, self.judged)],
            "after": [asdict(replace(m, auc=r.auc)) for m, r in zip(after, ranked, strict=True)],
            "chance": chance_errors(alive, self.judged),
        }


def chance_errors(alive: Tensor, judged: Tensor) -> list[float | None]:
    """Mean calibration error by position of blocks whose drafts pass exactly as ``alive [N, g]`` says; so few blocks
    show one all the same. None where none was judged."""
    generator = torch.Generator().manual_seed(7)
    before = torch.cat([torch.ones(len(alive), 1, dtype=alive.dtype), alive[:, :-1]], dim=1)
    chances = torch.where(before > 0.0, alive / before, 0.0)
    draws = []
    for _ in range(CHANCE_DRAWS):
        passed = torch.rand(alive.shape, generator=generator, dtype=alive.dtype) < chances
        accepted = torch.minimum(passed.long().cumprod(dim=1).sum(dim=1), judged)
        draws.append([m.ece for m in measure(alive, accepted, judged)])
    return [
        None if None in column else sum(v for v in column if v is not None) / len(column)
        for column in zip(*draws, strict=True)
    ]


def _by_kind(everything: Judged, named: list[str | None] | None) -> dict[str, tuple[Correction, dict[str, Any]]]:
    """(correction, its figures) of every kind with blocks enough."""
    found = {}
    named = named or [None] * len(everything.logits)
    for kind in dict.fromkeys(name for name in named if name is not None):
        blocks = everything.of(torch.tensor([name == kind for name in named]))
        if len(blocks.logits) < FEWEST_OF_KIND:
            continue
        correction = _best_correction(blocks)
        figures = {
            **asdict(correction),
            "num_blocks": len(blocks.logits),
            **blocks.figures(lambda part, of=blocks: _best_correction(of.of(part)), correction),
        }
        found[kind] = correction, figures
    return found


def _best_correction(blocks: Judged) -> Correction:
    """Temperatures, with shifts where answers that were not fitted to say that they help."""
    parts = blocks.logits, blocks.accepted, blocks.judged
    temperatures = fit_temperatures(*parts).temperatures
    plain = Correction(temperatures, (0.0,) * len(temperatures))
    return better_correction(*parts, plain, blocks.chat % 2 == 0)
