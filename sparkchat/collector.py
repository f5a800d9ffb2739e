"""Python's garbage collector, in processes that must not stand still.

Nearly everything is freed the moment nobody names it any more; the collector finds what names itself in a circle, and
while it looks nothing else runs. An engine has it look where that costs least, and only at what is new: a look at some
10,000 objects took up to 15 ms beside a GPU that had nothing to do (benchmarks/results/2026-11-30-collector.md). What
is called here means the same in Python 3.11 to 3.15, whatever thresholds mean there.
"""

from __future__ import annotations

import gc

LOOK_AFTER = 1000
"""New objects (allocated less freed) after which there is a look between two steps."""
BUSY_LOOKS = 250
"""Looks at the new after which an engine that never rests looks at everything since it was loaded: what is lost in
circles takes the room of some 250,000 objects at most, a few tens of megabytes."""
REST_SECONDS = 0.2
"""An engine that was told nothing for so long rests."""


def set_aside(young_objects: int) -> None:
    """What is there now stays as long as the program: the collector need not look through it again.

    ``young_objects``: after so many new objects the collector looks at the new ones.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young_objects, 10, 10)


def take_over() -> None:
    """As ``set_aside``; and from here on nothing is looked at but by the two calls below.

    A full collection looks at everything that libraries have built. In an engine it took 176 ms once in some hundred
    steps of 32 requests on an H200 (benchmarks/results/2026-11-30-gpu-decode.md).
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def look_between_steps() -> None:
    """Look at what is new, if it is much. To be called when the last step's events are gone: within a step all of them
    are new. Does nothing in a process that was not taken over."""
    if gc.isenabled():
        return
    new, looks, _ = gc.get_count()
    if new >= LOOK_AFTER:
        gc.collect(0 if looks < BUSY_LOOKS else 2)


def look_at_rest() -> None:
    """Look at everything since ``take_over``. What is found alive is not set aside as well: whatever becomes a circle
    later would then never be found, and it is little."""
    if not gc.isenabled():
        gc.collect()


def hand_back() -> None:
    """The end of ``take_over``, for a program that goes on without its engine."""
    gc.unfreeze()
    gc.enable()
