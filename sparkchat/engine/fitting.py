"""A process of its own that fits confidence temperatures: blocks as JSON on stdin, the fit as JSON on stdout.

The parent never imports torch, and the engine may be busy or not be there at all: what is fitted to traces needs no
model. What is fitted is stored where the engine looks for it when it loads the same pair on the same kind of device.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkchat.engine.calibration import (
    CalibrationFit,
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

HELD_OUT_EVERY = 3
"""Every third answer is kept from the fit, and the figures shown are of those alone."""
FEWEST_BLOCKS = 30
FEWEST_OF_KIND = 200
"""Blocks of one kind of sampling that are worth a correction of its own."""


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
    figures by position before and after, the same by kind, and the file they are stored in.
    """
    logits = torch.tensor(asked["blocks"]["logits"], dtype=torch.float64)
    accepted, judged, chat = (torch.tensor(asked["blocks"][name]) for name in ("accepted", "judged", "chat"))
    if len(logits) < FEWEST_BLOCKS:
        raise UsageError(
            f"there are {len(logits)} verified blocks, too few to fit temperatures to; give more traces, or --prompts"
        )
    kept = chat % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    is_split = bool(kept.any()) and bool((~kept).any())
    if not is_split:
        kept = torch.ones_like(kept)
    found = _fit_part(logits, accepted, judged, ~kept if is_split else kept)
    after = measure(survival(logits[kept], found.temperatures), accepted[kept], judged[kept])
    before = measure(survival(logits[kept]), accepted[kept], judged[kept])
    answer = {
        "temperatures": list(found.temperatures),
        "num_blocks": len(logits),
        "num_held_out": int(kept.sum()) if is_split else 0,
        "before": [asdict(m) for m in before],
        "after": [asdict(m) for m in after],
        "file": None,
    }
    kinds = _by_kind(logits, accepted, judged, chat, kept if is_split else torch.zeros_like(kept), asked["blocks"])
    answer["by_kind"] = {kind: figures for kind, (_, figures) in kinds.items()}
    spec = LoadSpec.from_json(asked["spec"])
    folder = temperatures_folder(spec)
    if folder is not None:
        key = temperatures_key(spec, resolve_device(spec.device))
        about = {**asked.get("about", {}), "before": answer["before"], "after": answer["after"]}
        corrections = {kind: correction for kind, (correction, _) in kinds.items()}
        answer["file"] = str(save_temperatures(Path(folder), key, found.temperatures, about, corrections))
    return answer


def _by_kind(
    logits: Tensor, accepted: Tensor, judged: Tensor, chat: Tensor, kept: Tensor, blocks: dict[str, Any]
) -> dict[str, tuple[Correction, dict[str, Any]]]:
    """(correction, its figures) of every kind with blocks enough; figures are of the ``kept`` answers, if any are."""
    named = blocks.get("kind") or [None] * len(logits)
    found = {}
    for kind in dict.fromkeys(name for name in named if name is not None):
        is_kind = torch.tensor([name == kind for name in named])
        part, shown = is_kind & ~kept, is_kind & kept
        if int(part.sum()) < FEWEST_OF_KIND:
            continue
        if not bool(shown.any()):
            shown = part
        parts = logits[part], accepted[part], judged[part]
        temperatures = _fit_part(logits, accepted, judged, part).temperatures
        plain = Correction(temperatures, (0.0,) * len(temperatures))
        correction = better_correction(*parts, plain, chat[part] % 2 == 0)
        alive = corrected_survival(logits[shown], [correction] * int(shown.sum()))
        figures = {
            **asdict(correction),
            "num_blocks": int(is_kind.sum()),
            "before": [asdict(m) for m in measure(survival(logits[shown]), accepted[shown], judged[shown])],
            "after": [asdict(m) for m in measure(alive, accepted[shown], judged[shown])],
        }
        found[kind] = correction, figures
    return found


def _fit_part(logits: Tensor, accepted: Tensor, judged: Tensor, part: Tensor) -> CalibrationFit:
    return fit_temperatures(logits[part], accepted[part], judged[part])
