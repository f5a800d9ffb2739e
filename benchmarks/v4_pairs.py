"""Sub-blocks of DeepSeek-V4-Flash that end with the sum over two ranks, on two GPUs in one process: how ranks add up.

    python benchmarks/v4_pairs.py

"read": the product or the sum of the experts' parts ends with the ranks' meeting, and the launch that connects the
streams reads the other's memory. "pushed": ranks push their parts and add them in the launch that connects the streams.
Times are of both launches, on the slower GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from sparkchat.kernels.fp8 import TiledFp8
from sparkchat.kernels.fp8.kernel import launch_fp8_linear
from sparkchat.kernels.hyper import PartList, StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.hyper.plan import TRIED, ConnectPlan
from sparkchat.kernels.ranks import Meeting, num_pads, publish_sum
from sparkchat.kernels.ranks.exchange import Exchange, Sent, inbox_words, no_turns

D, STREAMS, SETS, PRODUCTS, LAUNCHES = 4096, 4, 40, 6, 80
ROOM = 4 << 20
DEVICES = [torch.device("cuda", index) for index in range(2)]
Step = Callable[[int, int], None]
"""One launch, by rank and number of the run"""


class Rank:
    """What lies on one GPU."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device = rank, DEVICES[rank]
        torch.cuda.set_device(self.device)
        self.slots = torch.zeros(2, ROOM, dtype=torch.uint8, device=self.device)
        self.flags = torch.zeros(num_pads(ROOM, 2), dtype=torch.int32, device=self.device)
        self.inbox = torch.zeros(inbox_words(2, D), dtype=torch.int64, device=self.device)
        self.weights = [
            StreamWeights(
                torch.randn(24, STREAMS * D, device=self.device) * 0.01, torch.randn(24, device=self.device),
                torch.ones(24, device=self.device), STREAMS, 1e-6, 1e-6, 20,
            )
            for _ in range(SETS)
        ]  # fmt: skip
        self.products = [
            TiledFp8(
                torch.zeros(D // 32, D // 128, 2, 2048, dtype=torch.int8, device=self.device),
                torch.ones(D // 32, D // 128, 2, device=self.device),
            )
            for _ in range(PRODUCTS)
        ]
        self.norm = torch.ones(D, device=self.device)

    def meet(self, ranks: list[Rank]) -> None:
        self.pads = torch.tensor([r.flags.data_ptr() for r in ranks], device=self.device)
        self.where = [torch.tensor([r.slots[s].data_ptr() for r in ranks], device=self.device) for s in range(2)]
        inboxes = torch.tensor([r.inbox.data_ptr() for r in ranks], device=self.device)
        self.exchange = Exchange(inboxes, no_turns(self.device), self.rank)

    def room(self, slot: int, rows: int, dtype: torch.dtype) -> Tensor:
        return self.slots[slot, : rows * D * dtype.itemsize].view(dtype).view(rows, D)


def cases(ranks: list[Rank], rows: int) -> dict[str, list[Step]]:
    x = [torch.randn(rows, D, device=r.device).to(torch.bfloat16) for r in ranks]
    experts = [torch.randn(7, rows, D, device=r.device) for r in ranks]
    attention = [torch.empty((r.products[0].splits(rows), rows, D), device=r.device) for r in ranks]
    streams = [torch.randn(rows, STREAMS, D, device=r.device).to(torch.bfloat16) for r in ranks]
    made = [(torch.zeros(rows, 20, device=r.device), torch.empty_like(s), torch.empty_like(s[:, 0])) for r, s in
            zip(ranks, streams, strict=True)]  # fmt: skip
    spaces = {plan: [hyper_workspace(rows, D, r.device, plan=plan) for r in ranks] for plan in TRIED[:3]}

    def connect(plan: ConnectPlan, output_of: Callable[[int, int], PartList | Sent]) -> Step:
        def step(rank: int, i: int) -> None:
            r, (mix, merged, out) = ranks[rank], made[rank]
            launch_connect_streams(
                streams[rank], r.weights[i % SETS], spaces[plan][rank], output_of(rank, i), mix, merged, mix, r.norm,
                1e-6, out, None, None, plan,
            )  # fmt: skip

        return step

    def there(dtype: torch.dtype) -> Callable[[int, int], PartList]:
        return lambda rank, i: PartList(
            tuple(r.room(i % 2, rows, dtype) for r in ranks), ranks[rank].where[i % 2]
        )  # fmt: skip

    def sent(parts: list[Tensor]) -> Callable[[int, int], Sent]:
        return lambda rank, i: Sent(parts[rank], ranks[rank].exchange)

    def publish(rank: int, i: int) -> None:
        publish_sum(experts[rank], ranks[rank].room(i % 2, rows, torch.float32), ranks[rank].pads, rank)

    def product(rank: int, i: int) -> None:
        r = ranks[rank]
        room = r.room(i % 2, rows, torch.bfloat16)
        launch_fp8_linear(x[rank], r.products[i % PRODUCTS], room, 1, False, meeting=Meeting(r.pads, rank))

    def product_in_parts(rank: int, i: int) -> None:
        launch_fp8_linear(x[rank], ranks[rank].products[i % PRODUCTS], attention[rank], 1, False)

    first = TRIED[0]
    return {
        "experts, read": [publish, connect(first, there(torch.float32))],
        **{f"experts, pushed, {p.programs} programs": [connect(p, sent(experts))] for p in spaces},
        "attention, read": [product, connect(first, there(torch.bfloat16))],
        "attention, pushed": [product_in_parts, connect(first, sent(attention))],
        "attention's product in parts": [product_in_parts],
    }


def time_pair(steps: list[Step]) -> float:
    """Microseconds of all steps, on the slower GPU."""
    # Step by step on both GPUs: a kernel is loaded when nothing on its GPU waits for the other.
    for i in range(2):
        for step in steps:
            for rank, device in enumerate(DEVICES):
                with torch.cuda.device(device):
                    step(rank, i)
            for device in DEVICES:
                torch.cuda.synchronize(device)
    graphs = []
    for rank, device in enumerate(DEVICES):
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                for i in range(LAUNCHES):
                    for step in steps:
                        step(rank, i)
            graphs.append(graph)
    found = []
    for number in range(9):
        events = []
        for device, graph in zip(DEVICES, graphs, strict=True):
            with torch.cuda.device(device):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                events.append((begin, end))
        for device in DEVICES:
            torch.cuda.synchronize(device)
        if number >= 2:
            found.append(max(begin.elapsed_time(end) for begin, end in events) * 1e3 / LAUNCHES)
    return statistics.median(found)


def main() -> None:
    # The first copies let each GPU read and write the other's memory.
    beside = [torch.ones(8, device=device) for device in DEVICES]
    for one, other in (beside, beside[::-1]):
        one.copy_(other)
    ranks = [Rank(rank) for rank in range(2)]
    for rank in ranks:
        torch.cuda.set_device(rank.device)
        rank.meet(ranks)
    for device in DEVICES:
        torch.cuda.synchronize(device)
    for rows in (1, 6, 24):
        for name, steps in cases(ranks, rows).items():
            print(f"{rows:3} rows  {name:40} {time_pair(steps):7.2f} us", flush=True)


if __name__ == "__main__":
    main()
