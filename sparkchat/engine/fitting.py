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

from sparkchat.engine.calibration import CalibrationFit, fit_temperatures, measure, save_temperatures, survival
from sparkchat.engine.device import resolve_device
from sparkchat.engine.stored_temperatures import temperatures_folder, temperatures_key
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import LoadSpec

HELD_OUT_EVERY = 3
"""Every third answer is kept from the fit, and the figures shown are of those alone."""
FEWEST_BLOCKS = 30


def main() -> None:
    """Entry of the process: prints one object, with ``error`` in it when there is nothing else to say."""
    try:
        answer = fit(json.load(sys.stdin))
    except SparkchatError as error:
        answer = {"error": type(error).__name__, "message": error.message}
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")


def fit(asked: dict[str, Any]) -> dict[str, Any]:
    """``asked``: ``blocks`` (logits, accepted, judged, chat), ``spec`` of the pair, ``about`` for the stored file.

    Returns temperatures, the figures by position before and after, and the file they are stored in.
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
    spec = LoadSpec.from_json(asked["spec"])
    folder = temperatures_folder(spec)
    if folder is not None:
        key = temperatures_key(spec, resolve_device(spec.device))
        about = {**asked.get("about", {}), "before": answer["before"], "after": answer["after"]}
        answer["file"] = str(save_temperatures(Path(folder), key, found.temperatures, about))
    return answer


def _fit_part(logits: Tensor, accepted: Tensor, judged: Tensor, part: Tensor) -> CalibrationFit:
    return fit_temperatures(logits[part], accepted[part], judged[part])
