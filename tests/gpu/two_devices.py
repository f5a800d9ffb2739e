"""A program: two devices that share DeepSeek V4 give what one gives. Its arguments: SECONDS CHECK DEVICE FOLDER.

It runs apart from pytest, for a rank that ends takes its engine's process with it, and one that hangs is shown here.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cases.harness import MODES, Runner, random_prompts, varied_cost
from sparkchat.engine.engine import Engine
from sparkchat.engine.ranks import join_group, open_meeting, rank_devices, set_loopback, use_device
from sparkchat.models import ForwardBatch
from sparkchat.params import LoadSpec

SIZES = [30, 1, 6, 3, 20]


def group(device: torch.device, folder: Path) -> None:
    """Ranks reach each other, and what they say arrives: without a model."""
    set_loopback()
    meeting = open_meeting()
    command = [sys.executable, __file__, sys.argv[1], "other", str(rank_devices(2, device)[1]), str(meeting)]
    other = subprocess.Popen(command, pass_fds=(meeting,))
    _exchange(rank_devices(2, device)[0], 0, meeting)
    assert other.wait(60) == 0


def _exchange(device: torch.device, rank: int, meeting: int) -> None:
    use_device(device)
    found = join_group(meeting, rank, 2, device)
    print(f"rank {rank} has joined on {device}: {type(found).__name__}", file=sys.stderr, flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((2,), (6, 4096), (3, 4, 32), (600, 4096)):
            parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(device, dtype) for r in (0, 1)]
            assert torch.equal(found.sum(parts[rank]), (parts[0].float() + parts[1].float()).to(dtype)), (dtype, shape)
            assert torch.equal(found.join(parts[rank]), torch.cat(parts, -1)), (dtype, shape)
    ids = torch.arange(7, device=device)
    if rank == 0:
        found.send([ids, ids.float()])
    else:
        assert torch.equal(found.receive((7,), torch.int64, device), ids)
        assert torch.equal(found.receive((7,), torch.float32, device), ids.float())
    torch.distributed.destroy_process_group()


def open_engine(device: torch.device, folder: Path, **spec: Any) -> Runner:
    settings = {"device": str(device), "dtype": "float32", "context": 320, "concurrency": 4, "threads": 1, **spec}
    engine = Engine(LoadSpec("fixture", str(folder), str(folder), cost_table=varied_cost(), **settings))
    print(f"loaded over {engine.spec.tp} on {engine.info['device']}", file=sys.stderr, flush=True)
    return Runner(engine)


def captured_tokens(device: torch.device, folder: Path) -> None:
    """As ``tokens``, with graphs where there are GPUs."""
    tokens(device, folder, None)


def tokens(device: torch.device, folder: Path, graphs: bool | None = False) -> None:
    """Greedy tokens of every mode, in float32."""
    lines = [{"prompt_ids": prompt, "max_tokens": 16, "ignore_eos": True} for prompt in random_prompts(4, 70, seed=53)]
    alone = open_engine(device, folder, graphs=False).ids({**line, "mode": "off"} for line in lines)
    shared = open_engine(device, folder, tp=2, graphs=graphs)
    print(f"graphs: {shared.engine.info['graphs']}", file=sys.stderr, flush=True)
    assert shared.engine.info["device"].startswith("2 x ")
    for mode in ("off", *MODES):
        assert shared.ids({**line, "mode": mode} for line in lines) == alone, mode
        print(f"mode {mode} is right", file=sys.stderr, flush=True)
    shared.engine.pair.team.close()


def logits(device: torch.device, folder: Path) -> None:
    """Logits and taps, in float32."""
    _compare(device, folder, "float32", 1e-4)


def half_precision(device: torch.device, folder: Path) -> None:
    """Logits and taps from weights as they are stored, in bfloat16."""
    _compare(device, folder, "auto", 0.05)


def _compare(device: torch.device, folder: Path, dtype: str, most: float) -> None:
    found = []
    for size in (1, 2):
        runner = open_engine(device, folder, dtype=dtype, tp=size, graphs=False)
        found.append(_outputs(runner.engine.pair.target, device))
    runner.engine.pair.team.close()
    difference = float((found[1] - found[0]).norm() / found[0].norm())
    assert difference < most, difference


@torch.inference_mode()
def _outputs(target: Any, device: torch.device) -> Tensor:
    """Logits and a tap of spans of these sizes."""
    ids = torch.randint(2, 500, (sum(SIZES),), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(1, 128, 64)
    row, rows, at = cache.allocate(), [], 0
    for part in ids.split(SIZES):
        positions = torch.arange(at, at + len(part), device=device)
        batch = ForwardBatch(part.to(device), positions, (row,), (0, len(part)))
        hidden, taps = target.forward(batch, cache, (1,))
        rows.append(torch.cat([target.logits(hidden), taps.float()], dim=-1).cpu())
        at += len(part)
    return torch.cat(rows)


CHECKS = {check.__name__: check for check in (group, logits, half_precision, tokens, captured_tokens)}


def main() -> None:
    seconds, check, device, last = sys.argv[1:]
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    if check == "other":
        _exchange(torch.device(device), 1, int(last))
    else:
        CHECKS[check](torch.device(device), Path(last))
    sys.stderr.flush()
    # Python's own way out waits for libraries that wait for other ranks.
    os._exit(0)


if __name__ == "__main__":
    main()
