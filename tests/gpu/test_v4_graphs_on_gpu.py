"""DeepSeek V4 in CUDA graphs, over one GPU and over two: the tokens of the reference path, drawn and greedy.

Needs torch, triton, transformers, safetensors and pytest, and no other package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, random_prompts, varied_cost
from fixtures.deepseek_v4 import write_tiny_v4
from sparkchat.params import LoadSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
two_gpus = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FEW: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 16],
    "hc_sinkhorn_iters": 2,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
}
MODES = ("off", "static", "compact", "cap-accept")


class Engines:
    """One over several GPUs at a time: a process can be in one group."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._alone: dict[Any, Runner] = {}
        self._shared: tuple[Any, Runner] | None = None

    def folder(self, drafter: str) -> Path:
        taps = {"dspark_target_layer_ids": [0, 1, 2]} if drafter == "dspark" else {}
        path = self._root / drafter
        return path if path.exists() else write_tiny_v4(path, drafter=drafter, **FEW, **taps)

    def __call__(self, drafter: str, *, graphs: bool, tp: int = 1) -> Runner:
        key = (drafter, graphs, tp)
        if key in self._alone:
            return self._alone[key]
        if self._shared is not None and self._shared[0] == key:
            return self._shared[1]
        if tp > 1:
            self.close()
        runner = self._open(drafter, graphs, tp)
        if tp > 1:
            self._shared = (key, runner)
        else:
            self._alone[key] = runner
        return runner

    def _open(self, drafter: str, graphs: bool, tp: int) -> Runner:
        from sparkchat.engine.engine import Engine

        path = str(self.folder(drafter))
        settings = {"device": "cuda", "dtype": "float32", "context": 320, "concurrency": 3, "tp": tp, "graphs": graphs}
        runner = Runner(Engine(LoadSpec("fixture", path, path, cost_table=varied_cost(), **settings)))
        # As captured steps do.
        runner.engine.pair.is_lagged = True
        assert (runner.engine.info["graphs"] is True) == graphs, runner.engine.info["graphs"]
        return runner

    def close(self) -> None:
        if self._shared is not None:
            self._shared[1].engine.pair.team.close()  # type: ignore[union-attr]
        self._shared = None


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("v4-graphs"))
    yield engines
    engines.close()


def lines_of(mode: str, sampling: str, tokens: int = 16) -> list[dict[str, Any]]:
    prompts = random_prompts(3, 40, low=2, high=500, seed=3)
    settings = {"mode": mode, "ignore_eos": True, **SAMPLINGS[sampling]}
    return [{"prompt_ids": p, "max_tokens": tokens + n, "seed": n, **settings} for n, p in enumerate(prompts)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["dspark", "mtp"])
def test_graphs_give_the_tokens_of_the_reference_path(drafter: str, sampling: str, engines: Engines) -> None:
    loop, captured = (engines(drafter, graphs=graphs) for graphs in (False, True))
    for mode in MODES:
        assert captured.ids(lines_of(mode, sampling)) == loop.ids(lines_of(mode, sampling)), mode


def test_graphs_are_replayed_by_rows(engines: Engines) -> None:
    runner = engines("dspark", graphs=True)
    steps = runner.watch(lines_of("compact", "greedy")[:1])[0].steps
    assert all(step["graph"]["replayed"] for step in steps)
    assert len({step["graph"]["key"] for step in steps}) > 1


@pytest.mark.parametrize("marked", [pytest.param(None, marks=two_gpus)])
@pytest.mark.parametrize("drafter", ["mtp", "dspark"])
def test_two_gpus_replay_the_tokens_of_one(drafter: str, marked: None, engines: Engines) -> None:
    alone, shared = engines(drafter, graphs=True), engines(drafter, graphs=True, tp=2)
    for mode in MODES:
        for sampling in ("greedy", "sampled"):
            assert shared.ids(lines_of(mode, sampling)) == alone.ids(lines_of(mode, sampling)), (mode, sampling)


@pytest.mark.parametrize("marked", [pytest.param(None, marks=two_gpus)])
def test_a_conversation_goes_on_between_prompts_and_graphs_of_two(marked: None, engines: Engines) -> None:
    shared, text = engines("dspark", graphs=True, tp=2), random_prompts(2, 60, low=2, high=500, seed=5)[1]
    for turn in range(3):
        line = {"prompt_ids": text, "mode": "static", "max_tokens": 12, "ignore_eos": True}
        (kept,) = shared.run([{**line, "session": "chat"}])
        assert kept["token_ids"] == shared.ids([line])[0]
        assert (kept["usage"]["cached_tokens"] > 0) == (turn > 0)
        text = [*text, *kept["token_ids"], 301] if turn == 0 else [*text[:-15], 310, 311]
