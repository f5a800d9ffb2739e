"""Streams of two ranks that are added up in the launch that connects them, on two GPUs in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

DEVICES = [torch.device("cuda", index) for index in range(2)]
D, STREAMS, TURNS = 4096, 4, 6
MADE = ("merged", "next_mix", "out", "taken")


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    torch.manual_seed(0)
    beside = [torch.ones(8, device=device) for device in DEVICES]
    for one, other in (beside, beside[::-1]):
        one.copy_(other)
    yield
    torch.cuda.set_device(DEVICES[0])


_kept: list[list[Tensor]] = []
"""Inboxes, which are known by their addresses alone."""


def exchanges() -> list[Any]:
    from sparkchat.kernels.ranks.exchange import Exchange, inbox_words, no_turns

    inboxes = [torch.zeros(inbox_words(2, D), dtype=torch.int64, device=device) for device in DEVICES]
    _kept.append(inboxes)
    where = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    return [Exchange(where.to(device), no_turns(device), rank) for rank, device in enumerate(DEVICES)]


def on_both(run: Callable[[int], None]) -> None:
    for rank, device in enumerate(DEVICES):
        with torch.cuda.device(device):
            run(rank)
    for device in DEVICES:
        torch.cuda.synchronize(device)


def inputs(rows: int) -> dict[str, Tensor]:
    return {
        "streams": torch.randn(rows, STREAMS, D).to(torch.bfloat16),
        "mix": torch.randn(rows, 20),
        "fn": torch.randn(24, STREAMS * D) * (STREAMS * D) ** -0.5,
        "base": torch.randn(24),
        "norm": torch.rand(D),
        "parts": torch.randn(2, TURNS, 3, rows, D),
    }


def states(given: dict[str, Tensor], rows: int) -> list[dict[str, Any]]:
    from sparkchat.kernels.hyper import StreamWeights, hyper_workspace

    found = []
    for rank, device in enumerate(DEVICES):
        there = {name: t.to(device) for name, t in given.items()}
        weights = StreamWeights(there["fn"], there["base"], torch.ones(24, device=device), STREAMS, 1e-6, 1e-6, 20)
        found.append({
            "streams": there["streams"], "mix": there["mix"], "weights": weights, "norm": there["norm"],
            "parts": there["parts"][rank].contiguous(), "workspace": hyper_workspace(rows, D, device),
            "made": [{
                "merged": torch.full_like(there["streams"], float("nan")),
                "next_mix": torch.full_like(there["mix"], float("nan")),
                "out": torch.full((rows, D), float("nan"), device=device, dtype=torch.bfloat16),
                "taken": torch.full((rows, D), float("nan"), device=device, dtype=torch.bfloat16),
            } for _ in range(TURNS)],
        })  # fmt: skip
    return found


def run_turns(state: dict[str, Any], exchange: Any) -> None:
    """Turn after turn, each merging into what the turn before has left."""
    from sparkchat.kernels.hyper.kernel import launch_connect_streams
    from sparkchat.kernels.ranks.exchange import Sent

    streams, mix = state["streams"], state["mix"]
    for turn, made in enumerate(state["made"]):
        launch_connect_streams(
            streams, state["weights"], state["workspace"], Sent(state["parts"][turn], exchange), mix, made["merged"],
            made["next_mix"], state["norm"], 1e-6, made["out"], made["taken"], None,
        )  # fmt: skip
        streams, mix = made["merged"], made["next_mix"]


@pytest.mark.parametrize("rows", [1, 6, 24])
def test_both_ranks_get_the_same_and_what_the_reference_gets(rows: int) -> None:
    from sparkchat.kernels.hyper import StreamWeights
    from sparkchat.kernels.hyper.reference import connect_streams_reference

    given, both = inputs(rows), exchanges()
    state = states(given, rows)
    on_both(lambda rank: run_turns(state[rank], both[rank]))
    cpu = StreamWeights(given["fn"], given["base"], torch.ones(24), STREAMS, 1e-6, 1e-6, 20)
    streams, mix = given["streams"], given["mix"]
    for turn in range(TURNS):
        first, second = ({n: t.cpu() for n, t in state[rank]["made"][turn].items()} for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in MADE), turn
        wanted = {name: torch.empty_like(first[name]) for name in MADE}
        output = given["parts"][:, turn].sum((0, 1))
        connect_streams_reference(
            streams, cpu, output, mix, wanted["merged"], wanted["next_mix"], given["norm"], 1e-6, wanted["out"],
            wanted["taken"], None,
        )  # fmt: skip
        for name in MADE:
            error = (first[name].float() - wanted[name].float()).norm() / wanted[name].float().norm()
            assert error < 6e-3, (turn, name, error)
        streams, mix = first["merged"], first["next_mix"]


def test_captured_turns_follow_each_other_and_rows_do_not_depend_on_those_beside_them() -> None:
    given, both = inputs(6), exchanges()
    state = states(given, 6)
    graphs: list[torch.cuda.CUDAGraph] = []

    def capture(rank: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(DEVICES[rank])):
            run_turns(state[rank], both[rank])
        graphs.append(graph)

    on_both(lambda rank: run_turns(state[rank], both[rank]))
    wanted = [{name: t.clone() for name, t in made.items()} for made in state[0]["made"]]
    on_both(capture)
    for _ in range(100):
        for made in (*state[0]["made"], *state[1]["made"]):
            for t in made.values():
                t.fill_(float("nan"))
        on_both(lambda rank: graphs[rank].replay())
        for rank in range(2):
            for made, want in zip(state[rank]["made"], wanted, strict=True):
                assert all(torch.equal(made[name].to(DEVICES[0]), want[name]) for name in MADE)
    for rows in (slice(0, 1), slice(2, 6)):
        cut = {"streams": given["streams"][rows], "mix": given["mix"][rows], "parts": given["parts"][..., rows, :]}
        alone = states({**given, **{n: t.contiguous() for n, t in cut.items()}}, rows.stop - rows.start)
        on_both(lambda rank: run_turns(alone[rank], both[rank]))  # noqa: B023
        for made, want in zip(alone[0]["made"], wanted, strict=True):
            assert all(torch.equal(made[name], want[name][rows]) for name in MADE)
