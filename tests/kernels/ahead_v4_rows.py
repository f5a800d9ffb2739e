"""Compiles the kernels of DeepSeek V4's streams, state and attention at their true shapes for an H200.

    PYTHONPATH=.:tests python tests/kernels/ahead_v4_rows.py [NAME]

As ahead.py, whose lines it prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton

from kernels.ahead import CPU, HALF, Driver, compile_only
from sparkchat.kernels.hyper import PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.launch import overlap, started_by

D, STREAMS = 4096, 4


def hyper() -> None:
    weights = StreamWeights(torch.zeros(24, STREAMS * D), torch.zeros(24), torch.zeros(24), STREAMS, 1e-6, 1e-6, 20)
    head = StreamWeights(torch.zeros(4, STREAMS * D), torch.zeros(4), torch.zeros(4), STREAMS, 1e-6, 1e-6)
    norm = torch.ones(D)
    for rows, is_one in ((6, True), (48, False)):
        streams = torch.zeros(rows, STREAMS, D, dtype=HALF)
        space, mix, out = hyper_workspace(rows, D, CPU), torch.zeros(rows, 20), torch.zeros(rows, D, dtype=HALF)
        parts = PartList.of([torch.zeros(rows, D) for _ in range(2)])
        for output in (out.clone(), torch.zeros(4, rows, D), parts):
            launch_connect_streams(
                streams, weights, space, output, mix, streams.clone(), mix, norm, 1e-6, out, None, None, is_one
            )  # fmt: skip
        launch_connect_streams(streams, weights, space, None, None, None, mix, norm, 1e-6, out, None, None, is_one)
        launch_connect_streams(
            streams, head, space, parts, mix, streams.clone(), None, norm, 1e-6, out, out, torch.zeros(rows, D), is_one
        )  # fmt: skip


ALL: dict[str, Callable[[], None]] = {f.__name__: f for f in (hyper,)}


def main(names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    with started_by(compile_only), overlap():
        for name in names or ALL:
            ALL[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
