"""Measures what a step costs by verified rows, when no profile says it: two seconds, once per machine and pair."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sparkchat import __version__
from sparkchat.engine.cache_file import files_identity, measurement_key
from sparkchat.engine.cost_table import CostLookup, context_costs, table_of
from sparkchat.engine.device import device_name
from sparkchat.engine.loop import decode_step
from sparkchat.engine.output import SilentOutput
from sparkchat.engine.pair import LoadedPair
from sparkchat.engine.prefill import CHUNK_ROWS, prefill_step
from sparkchat.engine.request import RequestState
from sparkchat.engine.sampling import TokenHistory
from sparkchat.engine.slots import DraftContext, Slot, flush_contexts
from sparkchat.engine.step_plan import StepIntent, StepLengths
from sparkchat.errors import DamagedFile, SparkchatError
from sparkchat.models.kv_cache import KVCache
from sparkchat.params import BatchCosts, ContextCosts, CostTable, GenerateRequest, LoadSpec, SamplingParams

BUDGET_SECONDS = 2.0
"""For the whole table. A model too slow for it gets every length that bounds the others timed once."""
REPEATS = 16
TUNE_SECONDS = 4.0
"""For each number of requests when the user asks for a table."""
TUNE_REPEATS = 32
LONG_TOKENS, LEAST_LONG_TOKENS = 1024, 128
"""Cached tokens of all requests behind a long context, and of each of many."""
PROMPT_TOKENS = 64
"""Cached tokens of all probe requests together."""
PENDING_ROWS = 2
"""Features that each request has for its drafter when it drafts: as many as a usual step commits tokens."""
PROBE_SAMPLING = SamplingParams(temperature=0.7, top_p=0.95, ignore_eos=True, seed=1)
"""Close to what chats use, so that the probe pays for filters and draws too."""

_PROBE = "5"
"""Counts up when tables are measured otherwise than before."""

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
    if pair.measure_steps is not None:
        measured = pair.measure_steps(_doubling(spec.concurrency))
    else:
        measured = measure(pair, sorted({1, spec.concurrency}), spec.block_size or pair.block_size)
    lookup = CostLookup(measured)
    _store(lookup, spec, _key(spec, pair, spec.concurrency), progress)
    return lookup


def tuned_cost(spec: LoadSpec, pair: LoadedPair, progress: Progress) -> tuple[CostLookup, str | None]:
    """Measure thoroughly, for every number of requests up to the most that may run together and for long contexts.

    Returns the table and the file it is stored in. Raises DamagedFile when the pair yields no numbers.
    """
    block = spec.block_size or pair.block_size
    counts = _doubling(spec.concurrency)
    if pair.measure_steps is not None:
        lookup = CostLookup(pair.measure_steps(counts))
    else:
        lookup = CostLookup(measure(pair, counts, block, TUNE_SECONDS * (len(counts) + 1), TUNE_REPEATS))
    return lookup, _store(lookup, spec, _key(spec, pair), progress)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``. From 1 to 256 alone there is no line: a step reads weights for as many rows as it may,
    and computes for more. By such a line steps of 8, 16 and 32 were foretold 8, 15 and 22 % too long on an H200."""
    return [2**n for n in range(most.bit_length()) if 2**n < most] + [most]


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
        versions={"sparkchat": __version__, "torch": torch.__version__, "probe": _PROBE},
    )


@torch.inference_mode()
def measure(
    pair: LoadedPair,
    counts: Sequence[int],
    block: int,
    seconds: float | None = None,
    repeats: int | None = None,
) -> CostTable:
    """Time whole steps of 1 and more requests, drafting included, at every verify length, in caches of their own, and
    what long contexts add, where there is time for it.

    ``counts`` numbers of requests, ascending from 1; ``block`` tokens are drafted every time. Raises DamagedFile when
    the pair yields no numbers.
    """
    budget, turns = BUDGET_SECONDS if seconds is None else seconds, REPEATS if repeats is None else repeats
    ends = time.monotonic() + budget
    lengths: list[Length] = [None, *_outside_in(block)]
    batches: list[BatchCosts] = []
    for number, count in enumerate(counts):
        # What one part leaves of its share goes to the others.
        share = (ends - time.monotonic()) / (len(counts) - number)
        # What context adds to the numbers between lies on the line between.
        long_tokens = _long_tokens(pair, count) if count in (counts[0], counts[-1]) else None
        times, context = _time_lengths(pair, count, block, lengths, share, long_tokens, turns)
        filled = sorted(_filled(times).items())
        rows, step_ms = tuple(count * (n + 1) for n, _ in filled), tuple(ms for _, ms in filled)
        batches.append(BatchCosts(count, rows, step_ms, times.get(None), context=context))
    return table_of(batches, pads_up=False, context=batches[0].context)


def _long_tokens(pair: LoadedPair, count: int) -> int | None:
    """Cached tokens of ``count`` requests behind long contexts; None where there is no room for any."""
    tokens = count * min(max(LONG_TOKENS // count, LEAST_LONG_TOKENS), pair.context - 1)
    return tokens if tokens >= 2 * _short_tokens(count) else None


def _short_tokens(count: int) -> int:
    return max(PROMPT_TOKENS, PENDING_ROWS * count)


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
    long_tokens: int | None,
    repeats: int,
) -> tuple[dict[Length, float], ContextCosts | None]:
    """Median milliseconds of a step of ``count`` requests by verify length; and what a cached token adds, where
    ``long_tokens`` are given and there is time for steps behind them.

    ``lengths`` begin with None, 0 and ``block``. All of them take turns, those behind long contexts among them, so that
    a machine that is busy, or slower, for a moment bends neither the table nor the difference. The first turn warms up
    and counts only where the budget allows no second.
    """
    deadline = time.monotonic() + seconds
    probe, long = _probe(pair, count, block, PROMPT_TOKENS), None
    times: dict[Length, list[float]] = {}
    behind: dict[Length, list[float]] = {0: [], block: []}
    for turn in range(repeats + 1):
        began = time.monotonic()
        for length in lengths[:3]:
            times.setdefault(length, []).append(_time_step(probe, length))
        if turn == 0 and long_tokens and (times[0][0] + times[block][0]) / 1e3 < deadline - time.monotonic():
            long = _probe(pair, count, block, long_tokens)
        for length in behind if long is not None else ():
            behind[length].append(_time_step(long, length))
        for length in lengths[3:]:
            if turn == 0 and time.monotonic() > deadline:
                break
            times.setdefault(length, []).append(_time_step(probe, length))
        if 2 * time.monotonic() - began > deadline:
            break
    context = None
    if long is not None and long_tokens is not None:
        added = [
            statistics.median(found[1:] or found)
            for found in ([after - before for before, after in zip(times[n], behind[n], strict=True)] for n in behind)
        ]
        context = context_costs(_short_tokens(count), long_tokens, block, [(0.0, ms) for ms in added])
    return {length: statistics.median(found[1:] or found) for length, found in times.items()}, context


@dataclass
class _Probe:
    """The pair with small caches of its own, and requests behind their prompts.

    The engine's caches may be full of running requests and idle sessions.
    """

    pair: LoadedPair
    states: list[RequestState]
    features: torch.Tensor | None
    """[PENDING_ROWS, taps * hidden]: what a drafter is given before it drafts; None without one."""


def _probe(pair: LoadedPair, count: int, block: int, context_tokens: int) -> _Probe:
    """``context_tokens``: cached in all. Where caches only count what they hold, most of it is never run: attention
    takes as long over zeros."""
    num_tokens = min(max(PENDING_ROWS, context_tokens // count), pair.context - 1)
    room = num_tokens + pair.block_size + 2
    caches = [pair.target.new_cache(count, room, max(CHUNK_ROWS, pair.block_size + 1))]
    if pair.drafter is not None:
        caches.append(pair.drafter.new_cache(count, room))
    probe = replace(
        pair,
        cache=caches[0],
        draft_cache=None if pair.drafter is None else caches[1],
        temperatures=None,
        calibration={},
        refinement=None,
        totals=None,
    )
    # What a ring of a sliding window holds is written, never skipped.
    can_skip = all(type(cache) is KVCache and not any(store.is_ring for store in cache.stores) for cache in caches)
    prompt_tokens = min(num_tokens, max(PENDING_ROWS, PROMPT_TOKENS // count)) if can_skip else num_tokens
    prompt = tuple((7919 * i + 13) % pair.target.config.vocab_size for i in range(prompt_tokens))
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
    made = _Probe(probe, states, _features_of(states[0]))
    for state in states:
        _lengthen(made, state, num_tokens - prompt_tokens)
    return made


def _features_of(state: RequestState) -> torch.Tensor | None:
    """Of the prompt's last tokens, where they still wait."""
    draft = state.slot.draft
    if draft is None or not draft.pending:
        return None
    return torch.cat(draft.pending)[-PENDING_ROWS:]


def _lengthen(probe: _Probe, state: RequestState, more: int) -> None:
    """As if the prompt had been ``more`` tokens longer."""
    draft, cache = state.slot.draft, probe.pair.draft_cache
    if more <= 0:
        return
    state.prompt_ids += state.prompt_ids[:1] * more
    state.tokens[-1:] = [*state.prompt_ids[len(state.tokens) - 1 :], state.tokens[-1]]
    probe.pair.cache.reserve(state.slot.row, more)
    probe.pair.cache.advance(state.slot.row, state.kv_len)
    if draft is not None and cache is not None:
        flush_contexts(probe.pair.drafter, cache, [draft])
        cache.reserve(draft.row, more)
        draft.length += more
        cache.advance(draft.row, draft.length)


def _time_step(probe: _Probe, length: Length) -> float:
    def choose(_: Any, intents: list[StepIntent], *__: Any) -> list[StepLengths]:
        return [StepLengths(length or 0, None, None, None, None) for _ in intents]

    for state in probe.states:
        _rewind(probe, state)
    started = time.perf_counter()
    decode_step(probe.pair, probe.states, "off" if length is None else "static", choose)
    elapsed = (time.perf_counter() - started) * 1e3
    _raise_if_damaged(probe.states)
    return elapsed


def _rewind(probe: _Probe, state: RequestState) -> None:
    """Back to the first token, so that every timed step sees the same context."""
    state.tokens = state.tokens[: len(state.prompt_ids) + 1]
    state.delivered = state.delivered[:1]
    probe.pair.cache.truncate(state.slot.row, state.kv_len)
    draft, cache = state.slot.draft, probe.pair.draft_cache
    if draft is None or cache is None:
        return
    if probe.features is None:
        draft.truncate(state.kv_len)
    else:
        draft.truncate(state.kv_len - len(probe.features))
        draft.add(probe.features)
    cache.truncate(draft.row, draft.length)


def _raise_if_damaged(states: list[RequestState]) -> None:
    for state in states:
        if state.error is not None:
            raise DamagedFile(state.error)
