"""Which of the plans that were tried the launches of DeepSeek V4 take: for benchmarks that compare them in one process.

The plans in use are constants of their kernels' own files; here others are put in their place until further notice.
Launches that were captured keep what they were captured with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkchat.kernels.experts import plan as experts
from sparkchat.kernels.hyper import kernel as hyper
from sparkchat.kernels.launch import Overlap, watch
from sparkchat.kernels.launched import Launched, LaunchLog

_WHOLE, _CONNECT = experts.WHOLE, hyper.PLAN
_log: LaunchLog | None = None


@dataclass(frozen=True)
class LaunchPlans:
    """What is taken; None: what the package takes by itself."""

    whole: str | None = None
    """Experts of a few rows in one launch: a name of ``WHOLE_TRIED``"""
    streams: int | None = None
    """Warps of a program that connects streams. Programs stay as many, so that the workspace stays right."""
    overlap: str | None = None
    """A value of ``Overlap``, for steps captured from now on"""
    carveout: int | None = None
    """Percent of a multiprocessor's memory that launches ask to have as shared memory, the rest being cache; a hint"""
    carved: str | None = None
    """The one kernel that asks; None: all of the package"""

    @classmethod
    def parse(cls, text: str) -> LaunchPlans:
        """From ``whole=5x2x4,streams=2,overlap=none,carveout=100@_mix_experts``, in any order; empty: nothing changed.

        ``whole`` is programs of a multiprocessor x pairs x stages, or programs alone where pairs are 1. Raises
        ValueError for anything else.
        """
        found: dict[str, str | int | None] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = item.partition("=")
            if name in found:
                raise ValueError(f"a variant names {name} twice: {text}")
            if name == "whole":
                found[name] = _whole_of(value)
            elif name == "streams":
                found[name] = _number(item, value, (1, 2, 4, 8))
            elif name == "overlap":
                found[name] = Overlap(value).value
            elif name == "carveout":
                percent, _, kernel = value.partition("@")
                found[name], found["carved"] = _number(item, percent, range(101)), kernel or None
            else:
                raise ValueError(f"a variant has whole, streams, overlap and carveout, not {item!r}")
        return cls(**found)  # type: ignore[arg-type]

    def take(self) -> None:
        """Have launches from now on take them, but for ``overlap``, which is the capture's affair."""
        global _log
        if _log is not None:
            _log.close()
        experts.WHOLE = _WHOLE if self.whole is None else experts.WHOLE_TRIED[self.whole]
        hyper.PLAN = _CONNECT if self.streams is None else replace(_CONNECT, warps=self.streams)
        _log = LaunchLog(self.carveout, self.carved)
        watch(_log.add)


def kernels_launched() -> list[Launched]:
    """Those that were launched since plans were last taken."""
    return [] if _log is None else _log.kernels()


def _whole_of(value: str) -> str:
    parts = value.split("x")
    names = {
        (plan.programs, plan.gate_up.pairs, plan.gate_up.stages): name for name, plan in experts.WHOLE_TRIED.items()
    }
    if value in experts.WHOLE_TRIED:
        return value
    if len(parts) == 3 and all(part.isdecimal() for part in parts):
        known = names.get((int(parts[0]), int(parts[1]), int(parts[2])))
        if known is not None:
            return known
    told = ", ".join("x".join(map(str, key)) for key in names)
    raise ValueError(f"no plan of experts is called {value}; there are {told}")


def _number(item: str, value: str, allowed: range | tuple[int, ...]) -> int:
    if not value.isdecimal() or int(value) not in allowed:
        raise ValueError(f"{item!r} is not from {allowed[0]} to {allowed[-1]}, or not among what there is")
    return int(value)
