"""Cards older or smaller than an H200: nothing is asked of them that they lack, and plans fit into what they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from kernels.ahead import CARDS, card_named
from sparkchat.kernels.cards import H200, Card, assumed, card_of
from sparkchat.kernels.gemm.plan import plan, plan_of, within

SHAPES = [(6144, 4096), (24576, 4096), (4096, 12288), (960, 576), (1536, 576), (576, 1536), (256, 4096)]


@pytest.mark.parametrize(
    ("card", "kernels", "early", "tiles"),
    [
        (Card((7, 5), 65_536), False, False, False),
        (card_named("8.0"), True, False, False),
        (card_named("8.9"), True, False, False),
        (card_named("9.0"), True, True, True),
        (card_named("10.0"), True, True, True),
        (card_named("12.0"), True, True, False),
        (Card((9, 4), 65_536, is_nvidia=False), False, False, False),
    ],
)
def test_what_a_card_is_asked_for(card: Card, kernels: bool, early: bool, tiles: bool) -> None:
    assert (card.runs_kernels, card.starts_early, card.reads_tiles) == (kernels, early, tiles)


@pytest.mark.parametrize("capability", sorted(CARDS))
@pytest.mark.parametrize("element_size", [1, 2, 4])
def test_products_fit_into_shared_memory_and_keep_their_sums(capability: str, element_size: int) -> None:
    room = CARDS[capability]
    for n, k in SHAPES:
        for rows in (16, 32, 64):
            for epilogue in ("none", "silu_mul", "partials"):
                for overlaps in (False, True):
                    tuned = plan(n, k, element_size, epilogue, rows, overlaps)
                    found = within(tuned, rows, element_size, room)
                    stage = found.block_k * (found.block_out * element_size + rows * max(2, element_size))
                    assert (found.stages - 1) * stage <= room
                    assert (found.splits, found.part_k, found.block_k) == (tuned.splits, tuned.part_k, tuned.block_k)
                    if capability == "9.0":
                        assert found == tuned


def test_a_plan_is_of_the_card_that_the_weight_lies_on() -> None:
    weight = torch.empty(24576, 4096, dtype=torch.bfloat16, device="meta")
    assert plan_of(weight, "silu_mul", 64).stages == 4
    with assumed(card_named("8.9")):
        assert plan_of(weight, "silu_mul", 64).stages == 3


@dataclass
class Properties:
    major: int
    minor: int
    shared_memory_per_block_optin: int = 101_376


@pytest.mark.parametrize(("capability", "starts"), [((8, 9), "none"), ((9, 0), "small")])
def test_captured_kernels_start_early_only_where_the_card_can(capability: tuple[int, int], starts: str) -> None:
    pytest.importorskip("triton")
    from sparkchat.engine.captured import shared
    from sparkchat.kernels import cards
    from sparkchat.kernels.launch import Overlap

    asked: list[Any] = []
    cards._read.cache_clear()
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: Properties(*capability)),
        mock.patch.object(shared, "GraphStages", lambda device, overlaps: asked.append(overlaps)),
    ):
        shared.own_stages(torch.device("cuda", 0), Overlap.SMALL)
    cards._read.cache_clear()
    assert asked == [Overlap(starts)]


def test_tensors_elsewhere_are_those_of_an_h200() -> None:
    assert card_of(torch.device("cpu")) == H200
