"""A rank of tests/gpu/test_symmetric_on_gpu.py: sums and follows the first, in and out of a graph, and says it did.

python symmetric_ranks.py RANK SIZE STORE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")

import torch
import torch.distributed as dist

from sparkchat.kernels.fp8 import TiledFp8, fp8_linear
from sparkchat.kernels.fp8.plan import num_programs
from sparkchat.kernels.hyper import StreamWeights, hyper_workspace
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.ranks.exchange import Sent
from sparkchat.models.deepseek_v4.vocabulary import VocabularyHead, VocabularyRows
from sparkchat.models.linear import PlainLinear
from sparkchat.models.parallel import ProcessGroup, add_parts
from sparkchat.models.symmetric import SymmetricGroup, open_group

REPLAYS = 120


def part_of(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(6, 4096, generator=generator).to(dtype).cuda()


def connection(group: SymmetricGroup, device: torch.device) -> tuple[Callable[[torch.Tensor], None], torch.Tensor]:
    """What merges x + 1 of all ranks into streams of nothing where ranks push rows, and those streams."""
    # Numbers of zero give every stream the whole of what is brought.
    fn, zeros = torch.zeros(24, 4 * 4096, device=device), torch.zeros(24, device=device)
    weights, space = StreamWeights(fn, zeros, zeros, 4, 1e-6, 1e-6, 3), hyper_workspace(6, 4096, device)
    nothing, mix = torch.zeros(6, 4, 4096, dtype=torch.bfloat16, device=device), torch.zeros(6, 20, device=device)
    merged, exchange = torch.zeros_like(nothing), group.exchange(6, 4096)

    def connect(x: torch.Tensor) -> None:
        if exchange is not None:
            sent = Sent(torch.stack([x, torch.ones_like(x)]), exchange)
            launch_connect_streams(
                nothing, weights, space, sent, mix, merged, None, None, 0.0, None, None, None
            )  # fmt: skip

    return connect, merged


def main(rank: int, size: int, store: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size, device_id=device)
    group, nccl = open_group(device), ProcessGroup()
    assert isinstance(group, SymmetricGroup), "the GPUs do not read each other's memory"
    assert (group.exchange(6, 4096) is not None) == (os.environ["SPARKCHAT_SHARED_SUMS"] == "push")
    for number in range(4):
        for dtype in (torch.bfloat16, torch.float32):
            x = part_of(rank, number, dtype)
            parts = [part_of(r, number, dtype) for r in range(size)]
            found = group.sum(x)
            if size == 2 or dtype == torch.float32:
                assert torch.equal(found, add_parts(parts)), "a sum"
            assert torch.equal(group.join(x), torch.cat(parts, dim=-1)), "parts side by side"
            assert torch.equal(nccl.join(x), torch.cat(parts, dim=-1)), "parts by NCCL"
            held = group.parts(x)
            assert group.addresses(held).tolist() == [part.data_ptr() for part in held], "addresses"
    x, state = torch.zeros(6, 4096, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    outputs = torch.zeros(8, 6, 4096, device=device)
    same = TiledFp8.of(torch.eye(4096, device=device).to(torch.float8_e4m3fn), torch.ones(32, 32, device=device))

    def product(y: torch.Tensor) -> torch.Tensor:
        """y, left by a kernel that meets the others itself; small whole numbers stay what they are."""
        room = group.room(y.shape, torch.bfloat16, device)
        meeting = group.meeting(room, num_programs(4096, 4096, 6, False))
        fp8_linear(y.to(torch.bfloat16), same, room, meeting=meeting)
        return room

    def sum_of(number: int) -> torch.Tensor:
        y = x + number
        if number % 4 == 0:
            return add_parts(group.parts(y))
        if number % 4 == 1:
            return group.sum(y)
        if number % 4 == 2:
            return add_parts(group.parts(product(y)))
        return add_parts(group.parts_of_sum(torch.stack([y, torch.ones_like(y), -torch.ones_like(y)])))

    def stage() -> None:
        group.follow_first(state)
        for number in range(8):
            outputs[number] = sum_of(number)
        streams.copy_(rows.streams(ids, 4, torch.bfloat16))
        connect(x)
        logits.copy_(head(torch.eye(8, device=device).to(torch.bfloat16)[:6]))

    table = torch.arange(512, device=device).view(64, 8).to(torch.bfloat16)
    ids = torch.zeros(6, dtype=torch.int64, device=device)
    rows = VocabularyRows(table.chunk(size)[rank].contiguous(), group)
    head = VocabularyHead(PlainLinear(table.chunk(size)[rank].contiguous(), None), group)
    streams, logits = torch.zeros(6, 4, 8, device=device), torch.zeros(6, 64, device=device)

    connect, merged = connection(group, device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        stage()
    for turn in range(REPLAYS):
        x.fill_(turn + rank)
        state.fill_(turn if rank == 0 else -1)
        ids.copy_((torch.arange(6) * 11 + turn) % 64)
        graph.replay()
        wanted = [sum(turn + r + number for r in range(size)) for number in range(8)]
        assert outputs[:, 0, 0].tolist() == wanted, (turn, outputs[:, 0, 0].tolist(), wanted)
        assert bool((outputs == outputs[:, :1, :1]).all()), turn
        assert torch.equal(streams, table[ids].float().unsqueeze(1).expand(6, 4, 8)), turn
        assert torch.equal(logits, table.T[:6].float()), turn
        assert state.tolist() == [turn] * 64, turn
        brought = sum(turn + r + 1 for r in range(size)) if group.exchange(6, 4096) else 0
        assert bool((merged == brought).all()), (turn, merged[0, 0, 0], brought)
    dist.barrier()
    print("all alike")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
