"""Chains of a DeepSeek V4 layer side by side in CUDA graphs: every number is that of one chain after the other.

Needs torch, triton, transformers, safetensors and pytest, and no other package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, random_prompts, varied_cost
from fixtures.deepseek_v4 import write_tiny_v4
from sparkchat.kernels.branches import SWITCH, branch
from sparkchat.params import LoadSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "compress_ratios": [0, 4, 16],
    "q_lora_rank": 1024,
    "o_lora_rank": 128,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 4,
    "moe_intermediate_size": 256,
    "hc_sinkhorn_iters": 2,
    "dspark_target_layer_ids": [0, 1, 2],
}
SEEN = ("committed_ids", "confidence_logit", "draft_prob", "target_prob")


def told(folder: Path) -> list[list[Any]]:
    """Everything that the steps of some requests say of their numbers."""
    from sparkchat.engine.engine import Engine

    settings = {"device": "cuda", "dtype": "bfloat16", "context": 320, "concurrency": 3, "graphs": True}
    path = str(folder)
    runner = Runner(Engine(LoadSpec("fixture", path, path, cost_table=varied_cost(), **settings)))  # type: ignore[arg-type]
    assert runner.engine.info["graphs"] is True, runner.engine.info["graphs"]
    prompts, found = random_prompts(3, 60, low=2, high=500, seed=3), []
    for mode in ("static", "off"):
        line = {"mode": mode, "ignore_eos": True, "temperature": 1.0, "max_tokens": 24}
        lines = [{**line, "prompt_ids": p, "seed": n} for n, p in enumerate(prompts)]
        # One request alone, then three together.
        outcomes = [*runner.watch(lines[:1]), *runner.watch(lines)]
        found += [[step[name] for name in SEEN] for outcome in outcomes for step in outcome.steps]
    return found


@pytest.mark.parametrize("drafter", ["dspark", "mtp"])
def test_steps_say_the_same(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = write_tiny_v4(tmp_path / drafter, drafter=drafter, **SIZES), []
    for said in ("0", "1"):
        monkeypatch.setenv(SWITCH, said)
        found.append(told(folder))
    # As they are written: not all are numbers.
    assert repr(found[0]) == repr(found[1])


def test_a_chain_beside_another_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long work aside, and memory that is taken and given back on both streams, replay after replay."""
    monkeypatch.setenv(SWITCH, "1")
    x, total = torch.zeros(6, 1 << 20, device="cuda"), torch.zeros(6, 1 << 20, device="cuda")
    forked = 0

    def stage() -> None:
        nonlocal forked
        total.zero_()
        for turn in range(8):
            with branch("shared", x) as shared:
                forked += shared.is_beside
                with shared.aside():
                    aside = x + turn
                    for _ in range(20):
                        aside = aside * 1.0 + 0.0
                here = x * 2
                shared.join()
                total.add_(aside).add_(here)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        stage()
    torch.cuda.synchronize()
    assert forked == 0
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        stage()
    assert forked == 8
    for number in range(50):
        x.fill_(number)
        graph.replay()
        assert bool((total == 8 * 3 * number + 28).all()), number
