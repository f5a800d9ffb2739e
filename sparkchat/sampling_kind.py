"""Kinds of sampling that confidences are corrected for apart: the drafter cannot see how the target will be sampled.

Standard library only.
"""

from __future__ import annotations

from functools import lru_cache

from sparkchat.params import SamplingParams

_BY_TEMPERATURE = ((1e-5, "greedy"), (0.6, "cool"), (0.85, "warm"))
"""(temperature below which, name); from the last one on it is hot."""
_HOT = "hot"
_FILTERED, _PENALISED = "filtered", "penalised"
_ORDER = (*(name for _, name in _BY_TEMPERATURE), _HOT)

KINDS: tuple[str, ...] = tuple(
    "-".join([name, *words])
    for name in _ORDER
    for words in ((), (_FILTERED,), (_PENALISED,), (_FILTERED, _PENALISED))
    if not (name == "greedy" and _FILTERED in words)
)


def sampling_kind(sampling: SamplingParams) -> str:
    """One of ``KINDS``. Filters mean nothing to greedy tokens."""
    name = next((name for below, name in _BY_TEMPERATURE if sampling.temperature < below), _HOT)
    words = [name]
    if name != "greedy" and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0):
        words.append(_FILTERED)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0 or any(penalties):
        words.append(_PENALISED)
    return "-".join(words)


@lru_cache(maxsize=256)
def nearest_kind(kind: str, known: tuple[str, ...]) -> str | None:
    """The one of ``known`` whose correction serves a kind of which nothing is known; None where there is none.

    Penalties must be alike, and temperatures neighbours: they move confidences by far more than filters do.
    """
    place, *words = kind.split("-")

    def distance(other: str) -> tuple[int, bool]:
        name, *others = other.split("-")
        apart = abs(_ORDER.index(name) - _ORDER.index(place))
        if apart > 1 or (_PENALISED in others) != (_PENALISED in words):
            apart = len(_ORDER)
        return apart, (_FILTERED in others) != (_FILTERED in words)

    best = min(known, key=distance, default=None)
    return None if best is None or distance(best)[0] == len(_ORDER) else best
