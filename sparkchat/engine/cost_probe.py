"""Measures what a step costs by verified rows, when no profile says it: two seconds, once per machine and pair."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sparkchat import __version__
from sparkchat.engine.cache_file import files_identity, measurement_key
from sparkchat.engine.cost_table import CostLookup
from sparkchat.engine.device import device_name
from sparkchat.engine.loop import decode_step
from sparkchat.engine.output import SilentOutput
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.prefill import CHUNK_ROWS, prefill_step
from sparkchat.engine.request import RequestState
from sparkchat.engine.sampling import TokenHistory
from sparkchat.engine.slots import DraftContext, Slot
from sparkchat.engine.step_plan import StepIntent, StepLengths
from sparkchat.errors import DamagedFile, SparkchatError
from sparkchat.params import CostTable, GenerateRequest, LoadSpec, SamplingParams

BUDGET_SECONDS = 2.0
"""For the whole table. A model too slow for it gets every length that bounds the others timed once."""
REPEATS = 8
PROMPT_TOKENS = 64
"""Of all probe requests together: the prompt pass counts against the budget too."""
PROBE_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, ignore_eos=True, seed=1)
"""Close to what chats use, so that the probe pays for filters and draws too."""

Progress = Callable[[dict[str, Any]], None]
Length = int | None
"""Drafts verified in a step; None is a plain step without drafting."""


def stored_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> CostLookup | None:
    """What an earlier start measured on this machine with this pair; None when there is nothing usable."""
    folder = _folder(spec)
    if folder is None:
        return None
    lookup, notice = CostLookup.load(folder, _key(spec, pair))
    if notice:
        progress({"event": "notice", "id": None, "message": notice})
    return lookup


def measured_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> CostLookup:
    """Measure now, and store the table for the next start. Raises DamagedFile when the pair yields no numbers."""
    progress(
        {"event": "loading", "stage": "cost_table", "message": "measuring step costs", "done": None, "total": None}
    )
    block = spec.block_size or pair.block_size
    measured = measure(pair, spec.concurrency, block) if pair.measure_steps is None else pair.measure_steps()
    lookup = CostLookup(measured)
    folder = _folder(spec)
    if folder is not None:
        try:
            lookup.save(folder, _key(spec, pair))
        except SparkchatError as error:
            progress({"event": "notice", "id": None, "message": error.message})
    return lookup


def _folder(spec: LoadSpec) -> Path | None:
    # Dummy weights have no file that tells one model from another.
    return None if spec.cache_dir is None or spec.dummy_weights else Path(spec.cache_dir) / "cost_tables"


def _key(spec: LoadSpec, pair: LoadedPair) -> str:
    threads = f"x{torch.get_num_threads()} " if pair.device.type == "cpu" else ""
    form = "" if pair.measure_steps is None else "captured "
    sizes = f"{form}batch {spec.concurrency} block {spec.block_size or pair.block_size}"
    return measurement_key(
        model=files_identity(spec.model_path),
        drafter=None if spec.drafter_path is None else files_identity(spec.drafter_path),
        device=f"{device_name(pair.device, pair.num_devices)} {threads}{sizes} {pair.target.config.dtype_name}",
        versions={"sparkchat": __version__, "torch": torch.__version__},
    )


@torch.inference_mode()
def measure(pair: LoadedPair, concurrency: int, block: int) -> CostTable:
    """Time whole steps, drafting included, at every verify length, in caches of their own.

    ``block`` tokens are drafted every time. rows are summed over the batch: 1 .. block + 1 for one request, then
    multiples for ``concurrency`` requests.
    Raises DamagedFile when the pair yields no numbers.
    """
    counts = sorted({1, concurrency})
    lengths = _outside_in(block)
    alone = _time_lengths(pair, 1, block, [None, *lengths], BUDGET_SECONDS / len(counts))
    plain_ms = alone.pop(None)
    costs = {length + 1: ms for length, ms in _filled(alone).items()}
    if concurrency > 1:
        together = _time_lengths(pair, concurrency, block, lengths, BUDGET_SECONDS / len(counts))
        for length, ms in _filled(together).items():
            costs.setdefault(concurrency * (length + 1), ms)
    rows = sorted(costs)
    return CostTable(tuple(rows), tuple(costs[r] for r in rows), source="measured", plain_ms=plain_ms)


def _outside_in(last: int) -> list[int]:
    """0 .. last, the ends first, then middles: what is left out at the end lies between two that are not."""
    order, gaps = [0, last], deque([(0, last)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += (low, middle), (middle, high)
    return order


def _filled(times: Mapping[Length, float]) -> dict[int, float]:
    """Lengths that the budget left out, on the line between their measured neighbours."""
    known = sorted((length, ms) for length, ms in times.items() if length is not None)
    filled = dict(known)
    for (low, low_ms), (high, high_ms) in pairwise(known):
        for length in range(low + 1, high):
            filled[length] = low_ms + (high_ms - low_ms) * (length - low) / (high - low)
    return filled


def _time_lengths(
    pair: LoadedPair, count: int, block: int, lengths: Sequence[Length], seconds: float
) -> dict[Length, float]:
    """Median milliseconds of a step of ``count`` requests by verify length.

    All lengths take turns, so that a machine that is busy for a moment does not bend the table. The first turn warms
    up and counts only where the budget allows no second.
    """
    deadline = time.monotonic() + seconds
    probe, states = _probe(pair, count, block)
    times: dict[Length, list[float]] = {}
    for turn in range(REPEATS + 1):
        began = time.monotonic()
        for length in lengths:
            is_bound = length in (None, 0, block)
            if turn == 0 and not is_bound and time.monotonic() > deadline:
                break
            times.setdefault(length, []).append(_time_step(probe, states, length))
        if 2 * time.monotonic() - began > deadline:
            break
    return {length: statistics.median(found[1:] or found) for length, found in times.items()}


def _probe(pair: LoadedPair, count: int, block: int) -> tuple[LoadedPair, list[RequestState]]:
    """The pair with small caches of its own, and ``count`` requests behind their prompts.

    The engine's caches may be full of running requests and idle sessions.
    """
    num_tokens = min(max(8, PROMPT_TOKENS // count), pair.context - 1)
    room = num_tokens + pair.block_size + 2
    probe = replace(
        pair,
        cache=pair.target.new_cache(count, room, max(CHUNK_ROWS, pair.block_size + 1)),
        draft_cache=None if pair.drafter is None else pair.drafter.new_cache(count, room),
        temperatures=None,
    )
    prompt = tuple((7919 * i + 13) % pair.target.config.vocab_size for i in range(num_tokens))
    states = [
        RequestState(
            request=GenerateRequest(id=f"probe-{number}", prompt_ids=prompt, sampling=PROBE_SAMPLING),
            prompt_ids=prompt,
            block_size=block,
            context=pair.context,
            seed=number,
            output=SilentOutput(),
            history=TokenHistory(prompt),
            slot=Slot(
                probe.cache.allocate(),
                None if probe.draft_cache is None else DraftContext(probe.draft_cache.allocate()),
            ),
        )
        for number in range(count)
    ]
    while filling := [state for state in states if not state.is_prefilled]:
        prefill_step(probe, filling)
        _raise_if_damaged(states)
    return probe, states


def _time_step(probe: LoadedPair, states: list[RequestState], length: Length) -> float:
    def choose(_: Any, intents: list[StepIntent], *__: Any) -> list[StepLengths]:
        return [StepLengths(length or 0, None, None, None, None) for _ in intents]

    for state in states:
        _rewind(probe, state)
    started = time.perf_counter()
    decode_step(probe, states, "off" if length is None else "static", choose)
    elapsed = (time.perf_counter() - started) * 1e3
    _raise_if_damaged(states)
    return elapsed


def _rewind(probe: LoadedPair, state: RequestState) -> None:
    """Back to the first token, so that every timed step sees the same context."""
    state.tokens = state.tokens[: len(state.prompt_ids) + 1]
    state.delivered = state.delivered[:1]
    probe.cache.truncate(state.slot.row, state.kv_len)
    if state.slot.draft is not None and probe.draft_cache is not None:
        state.slot.draft.truncate(state.kv_len)
        probe.draft_cache.truncate(state.slot.draft.row, state.slot.draft.length)


def _raise_if_damaged(states: list[RequestState]) -> None:
    for state in states:
        if state.error is not None:
            raise DamagedFile(state.error)
