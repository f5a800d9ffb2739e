"""What one captured step would launch on a GPU, counted on a machine without one.

    PYTHONPATH=.:tests python tests/kernels/census.py    # of a small pair, with and without a drafter

The stages run on the CPU with noting in the place of starting, so nothing is computed. Whatever torch does beside our
kernels is noted too, but for views and allocations: each such operation is a node of the graph, of about 2 us on an
H200, however small it is. Bytes are those of all tensors handed over, whether or not a kernel reads the whole of them.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.ahead_fixtures import REPLACED
from sparkchat.engine.captured.build import build_decoder
from sparkchat.engine.captured.graphs import EagerStages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.loading import load_pair
from sparkchat.kernels.launch import started_by
from sparkchat.params import LoadSpec

ALLOCATIONS = ("empty", "new_empty")


@dataclass(frozen=True)
class Launch:
    """One node of a graph."""

    name: str
    is_ours: bool
    bytes: int


class _Noting(TorchDispatchMode):
    def __init__(self, found: list[Launch]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        # A view starts nothing; an operation in place, whose name ends so, does.
        is_view = all(t.untyped_storage().data_ptr() in given for t in made) and not name.endswith("_")
        if not name.startswith(ALLOCATIONS) and not (is_view and made):
            self._found.append(Launch(name, False, _bytes_of((args, kwargs, result))))
        return result


def _bytes_of(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor))


def census(stage: Callable[[], None]) -> list[Launch]:
    """Everything that ``stage`` launches once its buffers have been made, in order."""
    found: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        found.append(Launch(kernel.fn.__name__, True, _bytes_of(arguments)))

    with started_by(note):
        stage()
        found.clear()
        with _Noting(found):
            stage()
    return found


@contextmanager
def opened_step(target: Path, drafter: Path | None, **spec: Any) -> Iterator[CapturedStep]:
    """The step of a small pair as a GPU runs it: with weights as they lie in memory and every kernel launched."""
    settings = {"device": "cpu", "dtype": "float32", "context": 600, "concurrency": 4, "graphs": True, **spec}
    with ExitStack() as stack:
        for name, stand_in in REPLACED.items():
            if not name.startswith("torch.empty"):
                stack.enter_context(mock.patch(name, stand_in))
        loaded = LoadSpec("fixture", str(target), None if drafter is None else str(drafter), **settings)
        pair, _ = load_pair(loaded, lambda event: None)
        step = build_decoder(pair, loaded.concurrency, pair.block_size, EagerStages(), is_fused=True)._step
        step._enters = True
        yield step


def table(found: list[Launch]) -> str:
    counts = Counter((launch.is_ours, launch.name) for launch in found)
    lines = []
    for (is_ours, name), count in counts.most_common():
        size = sum(launch.bytes for launch in found if launch.name == name)
        lines.append(f"{count:5}  {'kernel' if is_ours else 'torch':7} {name:28} {size / count / 1e3:10.1f} kB each")
    return "\n".join([*lines, f"{len(found):5}  in all, {sum(not x.is_ours for x in found)} of them torch's"])


def main() -> None:
    from fixtures.tiny import write_tiny

    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny(Path(folder))
        for drafter in (None, tiny.drafter):
            with opened_step(tiny.target, drafter) as step:
                for rows in (1, step.width + 1, 4):
                    print(f"\nverify {rows} rows, {'no drafter' if drafter is None else 'with a drafter'}")
                    print(table(census(lambda: step.verify(rows, Draws.FILTERED, False))))  # noqa: B023
                if drafter is not None:
                    print("\ndraft 1 block\n" + table(census(lambda: step.draft(1, Draws.FILTERED))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
