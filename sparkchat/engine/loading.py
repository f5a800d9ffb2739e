"""From a LoadSpec to a LoadedPair, and the description of it that front ends and traces show."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparkchat import __version__
from sparkchat.engine.cache_plan import plan_caches
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.device import device_name, resolve_device
from sparkchat.engine.pair import LoadedPair, draft_index_table
from sparkchat.engine.ranks import Team
from sparkchat.engine.refinement import Refinement
from sparkchat.engine.shared_pair import load_shared
from sparkchat.engine.stored_temperatures import calibration_of, temperatures_of
from sparkchat.engine.text_model import TextModel
from sparkchat.errors import UsageError
from sparkchat.kernels import cpu
from sparkchat.models import load_drafter, load_target
from sparkchat.models.deepseek_v4.loading import check_parts
from sparkchat.params import MODES, LoadSpec
from sparkchat.simulation import WHAT, SimulatedAcceptance, parse_simulation

Progress = Callable[[dict[str, Any]], None]

HASH_LIMIT_BYTES = 1 << 30
"""Larger files are identified by their revision alone: reading them twice would double the start."""


def load_pair(spec: LoadSpec, progress: Progress) -> tuple[LoadedPair, TextModel]:
    """Load target, drafter and tokenizer. Raises the errors of ``models``, UsageError, and what other ranks meet."""
    _check_spec(spec)
    device = resolve_device(spec.device)
    if device.type == "cpu":
        torch.set_num_threads(spec.threads or max(1, len(os.sched_getaffinity(0)) // spec.tp))
    if spec.tp == 1:
        return _load_pair(spec, progress, device, None)
    check_parts(Path(spec.model_path), spec.tp)
    _say(progress, "ranks", f"starting {spec.tp} processes")
    with ExitStack() as stack:
        team = Team(spec.tp, device)
        stack.callback(team.close)
        loaded = _load_pair(spec, progress, device, team)
        stack.pop_all()
    return loaded


def _load_pair(
    spec: LoadSpec, progress: Progress, device: torch.device, team: Team | None
) -> tuple[LoadedPair, TextModel]:
    # Said with each stage that compiles: on a screen the next stage takes the place of the one before.
    first = ", compiling once (about 20 s)" if _compiles(spec, device) else ""
    _say(progress, "weights", f"loading {spec.name}{first}")
    dtype, is_dummy = _dtype(spec.dtype, device), spec.dummy_weights
    shared_drafter: Any = None
    if team is not None:
        target, shared_drafter = load_shared(team, spec, dtype)
    else:
        target = load_target(Path(spec.model_path), device=device, dtype=dtype, is_dummy=is_dummy)
    context = _context(spec, target.config.max_context)
    drafter, reason = None, f"{spec.name} has no drafter"
    if spec.drafter_path is not None:
        _say(progress, "drafter", f"loading the drafter{first}")
        drafter = shared_drafter or load_drafter(
            Path(spec.drafter_path), target, device=device, dtype=dtype, is_dummy=is_dummy
        )
        reason = None
        _check_pair(spec, drafter.config.block_size)
    elif spec.block_size is not None:
        raise UsageError(f"block size {spec.block_size} was asked for, but {reason}; leave --block-size out")
    _say(progress, "tokenizer", "loading the tokenizer")
    text = TextModel.load(spec)
    max_block = 1 if drafter is None else drafter.config.block_size + 1
    caches = plan_caches(spec, device, target, drafter, context, wants_capture(spec, device), progress)
    cache, draft_cache = caches.new_caches(target, drafter)
    temperatures, source, notice = temperatures_of(spec, device, max_block - 1 if drafter is not None else 0)
    if notice is not None:
        progress({"event": "notice", "id": None, "message": notice})
    pair = LoadedPair(
        target=target,
        cache=cache,
        device=device,
        drafter=drafter,
        draft_cache=draft_cache,
        draft_index_of=None
        if drafter is None
        else draft_index_table(drafter.draft_to_target, target.config.vocab_size),
        reason_off=reason,
        cost=None if spec.cost_table is None else CostLookup(spec.cost_table),
        temperatures=temperatures,
        temperatures_source=source,
        calibration=calibration_of(spec, device, max_block - 1 if drafter is not None else 0),
        refinement=Refinement() if spec.refine and drafter is not None else None,
        context=caches.context,
        cache_tokens=caches.num_tokens,
        kv_bytes_per_token=target.config.kv_bytes_per_token,
        damaged_ids=target.embedding.damaged_ids(),
        simulated=_simulated(spec, drafter),
        team=team,
        is_lagged=device.type == "cuda" or spec.graphs is True,
    )
    return pair, text


def _compiles(spec: LoadSpec, device: torch.device) -> bool:
    """Whether loading compiles the decode step for this processor, as it does once on every machine."""
    return device.type == "cpu" and spec.dtype != "float32" and cpu.is_supported() and not cpu.is_compiled()


def describe(
    spec: LoadSpec, pair: LoadedPair, text: TextModel, load_ms: float, graphs: bool | str = False
) -> dict[str, Any]:
    """The INFO object of the ``ready`` event and of the trace header.

    ``graphs``: captured steps are in use, or why not.
    """
    drafter = pair.drafter
    return {
        "model": spec.name,
        "drafter": drafter_name(spec, pair),
        "block_size": None if drafter is None else (spec.block_size or pair.block_size),
        "mode": spec.mode if drafter is not None else "off",
        "reason_off": pair.reason_off if drafter is None else None,
        "device": device_name(pair.device, pair.num_devices),
        "dtype": pair.target.config.dtype_name,
        "context": pair.context,
        "cache_tokens": pair.cache_tokens,
        "vocab_size": pair.target.config.vocab_size,
        "threads": torch.get_num_threads(),
        "load_ms": load_ms,
        "temperatures": None if pair.temperatures is None else list(pair.temperatures),
        "temperatures_source": pair.temperatures_source,
        "calibration": {kind: asdict(one) for kind, one in pair.calibration.items()},
        "refine": pair.refinement is not None,
        "kv_bytes_per_token": pair.kv_bytes_per_token,
        "cost_table": describe_cost(pair.cost),
        "versions": _versions(),
        "model_revision": spec.revision,
        "drafter_revision": spec.drafter_revision,
        "model_sha256": _weights_sha256(Path(spec.model_path)),
        "drafter_sha256": None if spec.drafter_path is None else _weights_sha256(Path(spec.drafter_path)),
        "heads": {
            "markov": None if drafter is None else drafter.config.markov_head_type,
            "confidence": drafter is not None and drafter.has_confidence,
        },
        "kernels": {"linear": pair.target.config.linear_kernel, "step": _step_kernels(pair)},
        "graphs": graphs,
        "chat_template": text.template_source,
        "reasoning_efforts": list(text.reasoning_efforts),
        "dummy_weights": spec.dummy_weights,
        "simulated": None if pair.simulated is None else describe_simulation(pair.simulated),
        "notices": [*_meaningless(spec, pair), *text.notices],
    }


def drafter_name(spec: LoadSpec, pair: LoadedPair) -> str | None:
    return None if pair.drafter is None or spec.drafter_path is None else Path(spec.drafter_path).name


def _check_spec(spec: LoadSpec) -> None:
    """What would otherwise come up in the middle of an answer, or never."""
    if spec.mode not in MODES:
        raise UsageError(f"mode {spec.mode!r} is unknown; give one of {', '.join(MODES)}")
    for name in ("concurrency", "threads", "block_size", "tp", "cache_tokens"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is not possible; give a whole number of 1 or more")
    if any(not (math.isfinite(t) and t > 0) for t in spec.temperatures or ()):
        raise UsageError(f"confidence temperatures {list(spec.temperatures or ())} must be positive numbers")


def _check_pair(spec: LoadSpec, trained: int) -> None:
    if spec.block_size is not None and spec.block_size > trained:
        raise UsageError(
            f"block size {spec.block_size} was asked for, but the drafter was trained with {trained}; "
            f"give --block-size 1 to {trained}"
        )
    if spec.temperatures is not None and len(spec.temperatures) < (spec.block_size or trained):
        raise UsageError(
            f"{len(spec.temperatures)} confidence temperatures were given for blocks of {spec.block_size or trained}; "
            "give one per draft position"
        )


def _simulated(spec: LoadSpec, drafter: Any) -> SimulatedAcceptance | None:
    if spec.simulate_acceptance is None:
        return None
    simulated = parse_simulation(spec.simulate_acceptance)
    if drafter is None:
        raise UsageError(f"{WHAT} {simulated.label} needs a drafter, and {spec.name} has none; give --drafter")
    simulated.check_block(spec.block_size or drafter.config.block_size)
    return simulated


def describe_simulation(simulated: SimulatedAcceptance) -> dict[str, Any]:
    """What events and traces of such a run say it is."""
    return {"profile": simulated.label, "survival": list(simulated.survivals)}


def _meaningless(spec: LoadSpec, pair: LoadedPair) -> list[str]:
    """What makes the text of this run mean nothing, for the user to see first."""
    found = []
    if spec.dummy_weights:
        found.append("the weights are random (--dummy-weights): speeds are real, the text means nothing")
    if pair.simulated is not None:
        found.append(
            f"acceptance is simulated ({pair.simulated.label}): drafts pass by chance, and the text means nothing"
        )
    return found


def wants_capture(spec: LoadSpec, device: torch.device) -> bool:
    """Whether steps are to run in captured form: on a GPU unless refused, elsewhere only where a test asks for it."""
    return spec.graphs is True or (spec.graphs is None and device.type == "cuda")


def _context(spec: LoadSpec, longest: int) -> int:
    if spec.context is None:
        return longest
    if not 2 <= spec.context <= longest:
        raise UsageError(f"a context of {spec.context} was asked for; {spec.name} takes 2 to {longest}")
    return spec.context


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None leaves the choice to the model: its own format on the CPU, bfloat16 on a GPU."""
    return {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def describe_cost(cost: CostLookup | None) -> dict[str, Any] | None:
    if cost is None:
        return None
    table = cost.table
    return {
        "id": cost.id,
        "source": table.source,
        "rows": list(table.rows),
        "step_ms": list(table.step_ms),
        "batches": [{**asdict(b), "rows": list(b.rows), "step_ms": list(b.step_ms)} for b in table.batches],
        "context": None if table.context is None else asdict(table.context),
        "plain_ms": table.plain_ms,
    }


def _versions() -> dict[str, str]:
    import transformers

    return {
        "sparkchat": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": sys.platform,
    }


def _step_kernels(pair: LoadedPair) -> str:
    """Whose kernels run the layers of a decode step: triton's, those compiled for the processor, or torch's own."""
    if getattr(pair.target, "fused", None) is not None:
        return "triton"
    return "compiled" if getattr(getattr(pair.target, "stack", None), "native", None) is not None else "torch"


def _weights_sha256(path: Path) -> str | None:
    """Over the weight files in name order; None for sizes where reading them again would hurt."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files or sum(file.stat().st_size for file in files) > HASH_LIMIT_BYTES:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _say(progress: Progress, stage: str, message: str) -> None:
    progress({"event": "loading", "stage": stage, "message": message, "done": None, "total": None})
