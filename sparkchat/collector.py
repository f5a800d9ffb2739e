"""Python's garbage collector, in processes that must not stand still."""

from __future__ import annotations

import gc

STEP_OBJECTS = 10_000
"""New objects after which an engine's collector looks: more than a step of 256 requests holds at once. At the usual 700
what a step is about to let go of would be moved to the old ones first."""


def set_aside(young_objects: int) -> None:
    """What is there now stays as long as the program: the collector need not look through it again.

    A full collection looks at everything that libraries have built. In an engine it took 176 ms once in some hundred
    steps of 32 requests on an H200 (benchmarks/results/2026-11-30-gpu-decode.md), while the GPU stood idle.
    ``young_objects``: after so many new objects the collector looks at the new ones.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young_objects, 10, 10)
