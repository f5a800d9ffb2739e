"""Runs the stages of a captured step: as they are, or captured once per shape into CUDA graphs and replayed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from sparkchat.kernels.launch import Overlap
    from sparkchat.kernels.plans import LaunchPlans

Stage = Callable[[], None]


class Stages(Protocol):
    """How a stage is run."""

    name: str
    num_graphs: int
    seconds: float

    def is_ready(self, key: Hashable) -> bool: ...

    def prepare(self, key: Hashable, stage: Stage) -> None:
        """Make ``stage`` ready to run under ``key``. It is run for that, so its static inputs must hold nobody."""
        ...

    def run(self, key: Hashable, stage: Stage) -> None: ...

    def close(self) -> None:
        """Forget what was made ready; what was captured holds on to the ranks' connections."""
        ...

    def renew(self, plans: LaunchPlans) -> None:
        """Forget what was made ready, with all memory that it held; what is made from now on is by ``plans``."""
        ...


class EagerStages:
    """Every stage is run anew: the code of a captured step without the capture, on any device."""

    name = "eager"
    num_graphs, seconds = 0, 0.0

    def is_ready(self, key: Hashable) -> bool:
        return True

    def prepare(self, key: Hashable, stage: Stage) -> None:
        pass

    def run(self, key: Hashable, stage: Stage) -> None:
        stage()

    def close(self) -> None:
        pass

    def renew(self, plans: LaunchPlans) -> None:
        plans.take()


class GraphStages:
    """CUDA graphs by key, in one memory pool.

    Replays follow each other on one stream, so that graphs may share the memory of their intermediate results; what one
    stage hands to the next lies in static tensors outside of the pool.
    """

    name = "graphs"

    def __init__(self, device: torch.device, overlaps: Overlap | bool = False) -> None:
        """``overlaps``: which captured kernels of ours may start while the one before them ends (kernels/launch.py)."""
        self._device, self._overlaps = device, overlaps
        self._usual = overlaps
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: torch keeps memory apart by stream.
        self._side = torch.cuda.Stream(device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.seconds = 0.0
        """What making them has taken, the run before each capture included."""

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def is_ready(self, key: Hashable) -> bool:
        return key in self._graphs

    def prepare(self, key: Hashable, stage: Stage) -> None:
        from sparkchat.kernels.launch import overlap

        began = time.perf_counter()
        torch.cuda.synchronize(self._device)
        # Run once outside: what libraries and kernels set up at their first call must not be captured.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side), overlap(self._overlaps):
            stage()
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device: NCCL's watches what it has under way.
        mode = "thread_local"
        with (
            torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode=mode),
            overlap(self._overlaps),
        ):
            stage()
        self._graphs[key] = graph
        self.seconds += time.perf_counter() - began

    def run(self, key: Hashable, stage: Stage) -> None:
        self._graphs[key].replay()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graphs.clear()

    def renew(self, plans: LaunchPlans) -> None:
        from sparkchat.kernels.launch import Overlap

        self.close()
        plans.take()
        self._overlaps = self._usual if plans.overlap is None else Overlap(plans.overlap)
        # A pool whose last graph has gone takes no further one.
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()
