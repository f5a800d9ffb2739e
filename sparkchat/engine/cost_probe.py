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
from sparkchat.engine.cost_table import CostLookup, table_of
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
from sparkchat.params import BatchCosts, ContextCosts, CostTable, GenerateRequest, LoadSpec, SamplingParams

BUDGET_SECONDS = 2.0
"""For the whole table. A model too slow for it gets every length that bounds the others timed once."""
REPEATS = 8
TUNE_SECONDS = 4.0
"""For each number of requests when the user asks for a table."""
TUNE_REPEATS = 32
LONG_TOKENS = 1024
PROMPT_TOKENS = 64
"""Of all probe requests together: the prompt pass counts against the budget too."""
PROBE_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, ignore_eos=True, seed=1)
"""Close to what chats use, so that the probe pays for filters and draws too."""

Progress = Callable[[dict[str, Any]], None]
Length = int | None
"""Drafts verified in a step; None is a plain step without drafting."""


def stored_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> CostLookup | None:
    """What ``tune`` or an earlier start measured on this machine with this pair; None when there is nothing usable.

    A tuned table counts wherever it covers as many requests as may run together.
    """
    folder = _folder(spec)
    if folder is None:
        return None
    for key, is_tuned in ((_key(spec, pair), True), (_key(spec, pair, spec.concurrency), False)):
        lookup, notice = CostLookup.load(folder, key)
        if notice:
            progress({"event": "notice", "id": None, "message": notice})
        if lookup is not None and (not is_tuned or (lookup.most_requests or 1) >= spec.concurrency):
            return lookup
    return None


def measured_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> CostLookup:
    """Measure now, and store the table for the next start. Raises DamagedFile when the pair yields no numbers."""
    progress(
        {"event": "loading", "stage": "cost_table", "message": "measuring step costs", "done": None, "total": None}
    )
    counts, block = sorted({1, spec.concurrency}), spec.block_size or pair.block_size
    measured = pair.measure_steps(counts) if pair.measure_steps is not None else measure(pair, counts, block)
    lookup = CostLookup(measured)
    _store(lookup, spec, _key(spec, pair, spec.concurrency), progress)
    return lookup


def tuned_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> tuple[CostLookup, str | None]:
    """Measure thoroughly, for every number of requests up to the most that may run together and for long contexts.

    Returns the table and the file it is stored in. Raises DamagedFile when the pair yields no numbers.
    """
    block = spec.block_size or pair.block_size
    counts = [2**n for n in range(spec.concurrency.bit_length()) if 2**n < spec.concurrency] + [spec.concurrency]
    if pair.measure_steps is not None:
        lookup = CostLookup(pair.measure_steps(counts))
    else:
        lookup = CostLookup(measure(pair, counts, block, TUNE_SECONDS * len(counts), TUNE_REPEATS, is_long=True))
    return lookup, _store(lookup, spec, _key(spec, pair), progress)


def _store(lookup: CostLookup, spec: LoadSpec, key: str, progress: Progress) -> str | None:
    folder = _folder(spec)
    if folder is None:
        return None
    try:
        return str(lookup.save(folder, key))
    except SparkchatError as error:
        progress({"event": "notice", "id": None, "message": error.message})
        return None


def _folder(spec: LoadSpec) -> Path | None:
    # Dummy weights have no file that tells one model from another.
    return None if spec.cache_dir is None or spec.dummy_weights else Path(spec.cache_dir) / "cost_tables"


def _key(spec: LoadSpec, pair: LoadedPair, batch: int | None = None) -> str:
    """``batch``: the number of requests a quick measurement was made for; None for a tuned table."""
    threads = f"x{torch.get_num_threads()} " if pair.device.type == "cpu" else ""
    form = "" if pair.measure_steps is None else "captured "
    sizes = f"{form}{'tuned' if batch is None else f'batch {batch}'} block {spec.block_size or pair.block_size}"
    return measurement_key(
        model=files_identity(spec.model_path),
        drafter=None if spec.drafter_path is None else files_identity(spec.drafter_path),
        device=f"{device_name(pair.device, pair.num_devices)} {threads}{sizes} {pair.target.config.dtype_name}",
        versions={"sparkchat": __version__, "torch": torch.__version__},
    )


@torch.inference_mode()
def measure(
    pair: LoadedPair,
    counts: Sequence[int],
    block: int,
    seconds: float | None = None,
    repeats: int | None = None,
    *,
    is_long: bool = False,
) -> CostTable:
    """Time whole steps of 1 and more requests, drafting included, at every verify length, in caches of their own.

    ``counts`` numbers of requests, ascending from 1; ``block`` tokens are drafted every time. ``is_long``: also over a
    long context, for what that adds. Raises DamagedFile when the pair yields no numbers.
    """
    share = (BUDGET_SECONDS if seconds is None else seconds) / (len(counts) + is_long)
    lengths: list[Length] = [None, *_outside_in(block)]
    timed = {
        count: _time_lengths(pair, count, block, lengths, share, PROMPT_TOKENS, REPEATS if repeats is None else repeats)
        for count in counts
    }
    batches = []
    for count, times in timed.items():
        filled = sorted(_filled(times).items())
        rows, step_ms = tuple(count * (n + 1) for n, _ in filled), tuple(ms for _, ms in filled)
        batches.append(BatchCosts(count, rows, step_ms, times.get(None)))
    context = _context_costs(pair, block, timed[1], share) if is_long else None
    return table_of(batches, pads_up=False, context=context)


def _context_costs(pair: LoadedPair, block: int, short: Mapping[Length, float], seconds: float) -> ContextCosts | None:
    """What a cached token adds, from one request behind a long prompt; None where the context has no room for one."""
    base = min(PROMPT_TOKENS, pair.context - 1)
    tokens = min(LONG_TOKENS, pair.context - 1)
    if tokens < 2 * base:
        return None
    long = _time_lengths(pair, 1, block, [0, block], seconds, tokens, TUNE_REPEATS)
    more = tokens - base
    of_one, of_block = ((long[n] - short[n]) / more for n in (0, block))
    by_row = max(0.0, (of_block - of_one) / block)
    return ContextCosts(base, max(0.0, of_one - by_row), by_row)


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
    pair: LoadedPair,
    count: int,
    block: int,
    lengths: Sequence[Length],
    seconds: float,
    prompt_tokens: int,
    repeats: int,
) -> dict[Length, float]:
    """Median milliseconds of a step of ``count`` requests by verify length, behind prompts of ``prompt_tokens`` in all.

    All lengths take turns, so that a machine that is busy for a moment does not bend the table. The first turn warms
    up and counts only where the budget allows no second.
    """
    deadline = time.monotonic() + seconds
    probe, states = _probe(pair, count, block, prompt_tokens)
    times: dict[Length, list[float]] = {}
    for turn in range(repeats + 1):
        began = time.monotonic()
        for length in lengths:
            is_bound = length in (None, 0, block)
            if turn == 0 and not is_bound and time.monotonic() > deadline:
                break
            times.setdefault(length, []).append(_time_step(probe, states, length))
        if 2 * time.monotonic() - began > deadline:
            break
    return {length: statistics.median(found[1:] or found) for length, found in times.items()}


def _probe(pair: LoadedPair, count: int, block: int, prompt_tokens: int) -> tuple[LoadedPair, list[RequestState]]:
    """The pair with small caches of its own, and ``count`` requests behind their prompts.

    The engine's caches may be full of running requests and idle sessions.
    """
    num_tokens = min(max(8, prompt_tokens // count), pair.context - 1)
    room = num_tokens + pair.block_size + 2
    probe = replace(
        pair,
        cache=pair.target.new_cache(count, room, max(CHUNK_ROWS, pair.block_size + 1)),
        draft_cache=None if pair.drafter is None else pair.drafter.new_cache(count, room),
        temperatures=None,
        calibration={},
        refinement=None,
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
