"""Measures what a step costs by verified rows, when no profile says it: a second or two at the start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparkchat import __version__
from sparkchat.engine.cache_file import measurement_key
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.loop import decode_step
from sparkchat.engine.output import SilentOutput
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.prefill import prefill_step
from sparkchat.engine.request import RequestState
from sparkchat.engine.sampling import TokenHistory
from sparkchat.engine.slots import DraftContext, Slot
from sparkchat.engine.step_plan import StepIntent, StepLengths
from sparkchat.errors import SparkchatError
from sparkchat.params import CostTable, GenerateRequest, LoadSpec, SamplingParams

PROMPT_TOKENS = 128
REPEATS = 7
BUDGET_SECONDS = 2.5
PROBE_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, ignore_eos=True, seed=1)
"""Close to what chats use, so that the probe pays for filters and draws too."""


def cost_of(
    spec: LoadSpec, pair: LoadedPair, progress: Callable[[dict[str, Any]], None]
) -> tuple[CostLookup, float | None]:
    """The stored table of this machine and pair, else a measured one, which is then stored."""
    folder = None if spec.cache_dir is None else Path(spec.cache_dir) / "cost_tables"
    key = measurement_key(
        model=_identity(spec.model_path),
        drafter=None if spec.drafter_path is None else _identity(spec.drafter_path),
        device=f"{pair.device} x{torch.get_num_threads()} batch {spec.concurrency} {pair.target.config.dtype_name}",
        versions={"sparkchat": __version__, "torch": torch.__version__},
    )
    if folder is not None:
        lookup, notice = CostLookup.load(folder, key)
        if notice:
            progress({"event": "notice", "id": None, "message": notice})
        if lookup is not None:
            return lookup, lookup.plain_ms
    progress({"event": "loading", "stage": "cost_table", "message": "measuring step costs", "done": None, "total": None})
    lookup = CostLookup(measure(pair, spec.concurrency))
    if folder is not None:
        try:
            lookup.save(folder, key)
        except SparkchatError as error:
            progress({"event": "notice", "id": None, "message": error.message})
    return lookup, lookup.plain_ms


def _identity(path: str) -> str:
    """Name, size and time of the weight files: a changed file is measured again."""
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
    return " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


@torch.inference_mode()
def measure(pair: LoadedPair, concurrency: int) -> CostTable:
    """Time whole steps, drafting included, at every verify length; the caches must be idle.

    rows are summed over the batch: 1 .. block + 1 for one request, then multiples for ``concurrency`` requests.
    """
    costs: dict[int, float] = {}
    plain_ms = None
    deadline = time.monotonic() + BUDGET_SECONDS * (1 if concurrency == 1 else 2)
    for num_requests in sorted({1, concurrency}):
        states = _probe_states(pair, num_requests)
        try:
            if num_requests == 1:
                plain_ms = _time_steps(pair, states, None, deadline)
            for length in range(pair.block_size + 1):
                rows = num_requests * (length + 1)
                if rows not in costs:
                    costs[rows] = _time_steps(pair, states, length, deadline)
        finally:
            for state in states:
                pair.cache.free(state.slot.row)
                if pair.draft_cache is not None:
                    pair.draft_cache.free(state.slot.draft.row)
    rows = sorted(costs)
    return CostTable(tuple(rows), tuple(costs[r] for r in rows), source="measured", plain_ms=plain_ms)


def _probe_states(pair: LoadedPair, count: int) -> list[RequestState]:
    vocab = pair.target.config.vocab_size
    prompt = tuple((7919 * i + 13) % vocab for i in range(min(PROMPT_TOKENS, pair.context // 4 + 1)))
    states = []
    for number in range(count):
        draft = None if pair.draft_cache is None else DraftContext(pair.draft_cache.allocate())
        states.append(
            RequestState(
                request=GenerateRequest(id=f"probe-{number}", prompt_ids=prompt, sampling=PROBE_SAMPLING),
                prompt_ids=prompt,
                block_size=pair.block_size,
                context=pair.context,
                seed=number,
                output=SilentOutput(),
                history=TokenHistory(prompt),
                slot=Slot(pair.cache.allocate(), draft),
            )
        )
    while any(not state.is_prefilled for state in states):
        prefill_step(pair, [state for state in states if not state.is_prefilled])
    return states


def _time_steps(pair: LoadedPair, states: list[RequestState], length: int | None, deadline: float) -> float:
    """Median milliseconds of a step with this verify length; None is a plain step without drafting."""

    def choose(states: Any, intents: list[StepIntent], *_: Any) -> list[StepLengths]:
        return [StepLengths(length or 0, None, None, None, None) for _ in intents]

    times: list[float] = []
    mode = "off" if length is None else "static"
    for repeat in range(REPEATS + 2):
        for state in states:
            _rewind(pair, state)
        started = time.perf_counter()
        decode_step(pair, states, mode, choose)
        elapsed = (time.perf_counter() - started) * 1e3
        if repeat >= 2:
            times.append(elapsed)
        if times and time.monotonic() > deadline:
            break
    return statistics.median(times)


def _rewind(pair: LoadedPair, state: RequestState) -> None:
    """Back to the first token, so that every timed step sees the same context."""
    if len(state.tokens) <= len(state.prompt_ids) + 1:
        return
    state.tokens = state.tokens[: len(state.prompt_ids) + 1]
    state.delivered = state.delivered[:1]
    pair.cache.truncate(state.slot.row, state.kv_len)
    if state.slot.draft is not None and pair.draft_cache is not None:
        state.slot.draft.truncate(state.kv_len)
        pair.draft_cache.truncate(state.slot.draft.row, state.slot.draft.length)
