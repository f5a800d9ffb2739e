"""Streams of few rows by the launch that balances late: against the reference, and each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.agreement import assert_same_sums
from kernels.test_hyper import MADE, NAN, Buffers, copy_of, make, weights_of
from sparkchat.kernels.hyper import PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.hyper.plan import ConnectPlan
from sparkchat.kernels.hyper.reference import connect_streams_reference, settled

PLAN = ConnectPlan(is_quick=True)
ITERATIONS = 3


def launch(buffers: Buffers, weights: StreamWeights, space: Any = None) -> Buffers:
    rows, size, width = buffers["streams"].shape
    space = space or hyper_workspace(rows, width, buffers["streams"].device, size)
    launch_connect_streams(weights=weights, workspace=space, plan=PLAN, iterations=ITERATIONS, **buffers)
    return buffers


def assert_agree(buffers: Buffers, weights: StreamWeights, atol: float = 2e-5) -> None:
    mix = None if buffers["mix"] is None else settled(buffers["mix"], weights, ITERATIONS)
    want = copy_of(buffers, mix=mix)
    connect_streams_reference(weights=weights, **want)
    got = launch(copy_of(buffers), weights)
    if got["next_mix"] is not None:
        got["next_mix"] = settled(got["next_mix"], weights, ITERATIONS)
    for name in MADE:
        if got[name] is not None:
            torch.testing.assert_close(got[name], want[name], atol=atol, rtol=10 * atol)


@pytest.mark.parametrize("rows", [1, 5])
def test_agrees_with_the_reference(rows: int, device: torch.device) -> None:
    assert_agree(make(device, rows), weights_of(device))


def test_bfloat16_streams(device: torch.device) -> None:
    assert_agree(make(device, 3, torch.bfloat16), weights_of(device), atol=2e-2)


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_streams(size: int, device: torch.device) -> None:
    assert_agree(make(device, 2, size=size), weights_of(device, size=size))


def test_first_read_of_a_stack_and_head(device: torch.device) -> None:
    buffers = make(device, 2)
    assert_agree({**buffers, "output": None, "mix": None, "merged": None}, weights_of(device))
    assert_agree({**buffers, "next_mix": None}, weights_of(device, is_head=True))


def test_parts_anywhere(device: torch.device) -> None:
    buffers, weights = make(device, 3), weights_of(device)
    apart = launch(copy_of(buffers, output=PartList.of(list(buffers["output"].clone()))), weights)
    together = launch(copy_of(buffers), weights)
    for name in MADE:
        assert torch.equal(apart[name], together[name]) and not together[name].isnan().any()


def test_rounds_follow_each_other_and_the_mix_may_be_written_where_it_was_read(device: torch.device) -> None:
    buffers, weights = make(device, 3), weights_of(device)
    space = hyper_workspace(3, buffers["norm"].shape[0], device)
    apart = launch(copy_of(buffers), weights, space)
    shared = copy_of(buffers)
    launch({**shared, "next_mix": shared["mix"]}, weights, space)
    assert torch.equal(shared["mix"], apart["next_mix"]) and space.rounds.tolist() == [2, 2, 2]


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    buffers, weights = make(device, 4), weights_of(device)
    together = launch(copy_of(buffers), weights)
    cut = {n: v[:, 3:] if n == "output" else v[3:] for n, v in buffers.items() if n in
           ("streams", "output", "mix", *MADE)}  # fmt: skip
    alone = launch(copy_of({**buffers, **cut}), weights)
    for name in MADE:
        assert_same_sums(alone[name][0], together[name][3])


def test_what_is_settled_is_balanced() -> None:
    weights = weights_of(torch.device("cpu"), iterations=20)
    mix: Tensor = settled(torch.randn(3, 20), weights, 20)
    assert not torch.full((1,), NAN).equal(mix)
    torch.testing.assert_close(mix[:, 4:].view(3, 4, 4).sum(1), torch.ones(3, 4), atol=1e-5, rtol=0)
