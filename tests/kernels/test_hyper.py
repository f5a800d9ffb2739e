"""Residual streams between sub-blocks: against the reference, and each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.agreement import assert_same_sums
from sparkchat.kernels.hyper import HyperWorkspace, PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.hyper.reference import connect_streams_reference, settled
from sparkchat.kernels.ranks.exchange import MOST_ROWS, Exchange, Sent, no_turns

S, D = 4, 64
NAN = float("nan")
Buffers = dict[str, Any]


def weights_of(
    device: torch.device, *, is_head: bool = False, size: int = S, width: int = D, iterations: int = 3
) -> StreamWeights:
    count = size if is_head else (2 + size) * size
    return StreamWeights(
        torch.randn(count, size * width, device=device) * 0.3,
        torch.randn(count, device=device),
        torch.rand(count, device=device) + 0.5,
        size,
        rms_eps=1e-6,
        eps=1e-6,
        iterations=iterations,
    )


def make(device: torch.device, rows: int, dtype: torch.dtype = torch.float32, size: int = S, width: int = D) -> Buffers:
    """Inputs of a call, and room for what it makes."""
    mix = torch.randn(rows, size + size * size, device=device)
    return {
        "streams": torch.randn(rows, size, width, device=device).to(dtype),
        "output": torch.randn(3, rows, width, device=device),
        "mix": mix,
        "merged": torch.full((rows, size, width), NAN, device=device, dtype=dtype),
        "next_mix": torch.full_like(mix, NAN),
        "norm": torch.rand(width, device=device) + 0.5,
        "norm_eps": 1e-6,
        "out": torch.full((rows, width), NAN, device=device, dtype=dtype),
        "taken": torch.full((rows, width), NAN, device=device, dtype=dtype),
        "tap": torch.full((rows, 2 * width), NAN, device=device)[:, width:],
    }


MADE = ("merged", "next_mix", "out", "taken", "tap")


def copy_of(buffers: Buffers, **changes: Any) -> Buffers:
    fresh = {name: value.clone() if isinstance(value, Tensor) else value for name, value in buffers.items()}
    return {**fresh, **changes}


def launch(buffers: Buffers, weights: StreamWeights, space: HyperWorkspace | None = None) -> Buffers:
    rows, size, width = buffers["streams"].shape
    space = space or hyper_workspace(rows, width, buffers["streams"].device, size)
    launch_connect_streams(weights=weights, workspace=space, **buffers)
    return buffers


def assert_agree(buffers: Buffers, weights: StreamWeights, atol: float = 2e-5) -> None:
    want = copy_of(buffers)
    connect_streams_reference(weights=weights, **want)
    got = launch(copy_of(buffers), weights)
    for name in MADE:
        if got[name] is not None:
            torch.testing.assert_close(got[name], want[name], atol=atol, rtol=10 * atol)


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_agrees_with_the_reference(rows: int, device: torch.device) -> None:
    assert_agree(make(device, rows), weights_of(device))


def test_bfloat16_streams(device: torch.device) -> None:
    assert_agree(make(device, 3, torch.bfloat16), weights_of(device), atol=2e-2)


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_streams(size: int, device: torch.device) -> None:
    assert_agree(make(device, 2, size=size), weights_of(device, size=size))


def test_first_read_of_a_stack(device: torch.device) -> None:
    buffers = make(device, 2)
    assert_agree({**buffers, "output": None, "mix": None, "merged": None}, weights_of(device))


def test_head(device: torch.device) -> None:
    assert_agree({**make(device, 3), "next_mix": None}, weights_of(device, is_head=True))


def test_output_in_one_piece_and_in_pieces_anywhere(device: torch.device) -> None:
    buffers, weights = make(device, 3), weights_of(device)
    whole = launch(copy_of(buffers, output=buffers["output"].sum(0)), weights)
    parts = PartList.of(list(buffers["output"].clone()))
    apart = launch(copy_of(buffers, output=parts), weights)
    together = launch(copy_of(buffers), weights)
    for name in MADE:
        torch.testing.assert_close(whole[name], together[name], atol=2e-5, rtol=2e-4)
        assert torch.equal(apart[name], together[name])


def test_the_mix_may_be_written_where_it_was_read(device: torch.device) -> None:
    buffers, weights, space = make(device, 3), weights_of(device), hyper_workspace(3, D, device)
    apart = launch(copy_of(buffers), weights, space)
    shared = copy_of(buffers)
    launch({**shared, "next_mix": shared["mix"]}, weights, space)
    assert torch.equal(shared["mix"], apart["next_mix"]) and space.rounds.tolist() == [2, 2, 2]


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    buffers, weights = make(device, MOST_ROWS + 1), weights_of(device)
    together = launch(copy_of(buffers), weights)
    for row in (0, MOST_ROWS):
        cut = {n: v[:, row : row + 1] if n == "output" else v[row : row + 1] for n, v in buffers.items() if n in
               ("streams", "output", "mix", *MADE)}  # fmt: skip
        alone = launch(copy_of({**buffers, **cut}), weights)
        for name in MADE:
            assert_same_sums(alone[name][0], together[name][row])


def test_the_combination_is_transposed_and_balanced(device: torch.device) -> None:
    """By numbers that a slip shows in: each stream's own constant, moved by a permutation."""
    buffers, weights = make(device, 1), weights_of(device, iterations=20)
    buffers["streams"] = torch.arange(1.0, S + 1, device=device).view(1, S, 1).expand(1, S, D).contiguous()
    buffers["output"] = torch.zeros(1, D, device=device)
    moved = torch.zeros(S, S, device=device)
    moved[torch.arange(S), torch.tensor([2, 0, 3, 1])] = 30.0
    buffers["mix"] = torch.cat([torch.zeros(S, device=device), moved.flatten()]).view(1, -1)
    got = launch(buffers, weights)
    # Stream 0 goes to place 2, 1 to 0, 2 to 3 and 3 to 1.
    wanted = torch.tensor([2.0, 4.0, 1.0, 3.0], device=device)
    torch.testing.assert_close(got["merged"][0, :, 0], wanted, atol=1e-4, rtol=0)
    for numbers in (buffers["mix"], got["next_mix"]):
        balanced = settled(numbers, weights)[0, S:].view(S, S)
        torch.testing.assert_close(balanced.sum(0), torch.ones(S, device=device), atol=1e-5, rtol=0)


def test_streams_cannot_be_merged_in_place(device: torch.device) -> None:
    buffers = make(device, 2)
    with pytest.raises(ValueError, match="take the place"):
        launch({**buffers, "merged": buffers["streams"]}, weights_of(device))


def test_more_rows_than_there_is_room_for_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="no room for 3 rows"):
        launch_connect_streams(weights=weights_of(device), workspace=hyper_workspace(2, D, device), **make(device, 3))


def test_more_rows_than_ranks_exchange_are_refused(device: torch.device) -> None:
    buffers = make(device, MOST_ROWS + 1)
    exchange = Exchange(torch.zeros(2, dtype=torch.int64, device=device), no_turns(device), 0)
    with pytest.raises(ValueError, match="ranks exchange up to 24 rows"):
        launch({**buffers, "output": Sent(buffers["output"], exchange)}, weights_of(device))


def test_widths_without_a_kernel_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="3 residual streams"):
        launch(make(device, 1, size=3), weights_of(device, size=3))
