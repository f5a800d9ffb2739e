"""DeepSeek V4 on a CUDA device: the numbers and tokens of the CPU, and packed weights.

Needs torch, transformers, safetensors and pytest, and no other package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.harness import MODES, Runner, random_prompts, varied_cost
from fixtures.deepseek_v4 import TINY_SIZES, full_layout, parsed, v4_config, write_tiny_v4
from fixtures.deepseek_v4_mix import write_v4_mix, write_v4_mix_mtp
from sparkchat.models import ForwardBatch
from sparkchat.models.deepseek_v4.load_plan import packed_bytes
from sparkchat.models.deepseek_v4.loading import load_drafter, load_trunk
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.params import LoadSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

Open = Callable[..., Runner]
ALL_MODES = ("off", *MODES)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
# Projections outweigh norms and stream weights here, as they do in the published model.
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 16],
    "moe_intermediate_size": 1024,
    "vocab_size": 4096,
    "hc_mult": 2,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_noise_token_id": 4095,
    "dspark_markov_rank": 64,
}


class Folders:
    """Checkpoints by kind, written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._write: dict[str, Callable[[Path], Path]] = {
            "tiny": write_tiny_v4,
            "wide": lambda path: write_tiny_v4(path, **WIDE),
            "oracle": lambda path: write_v4_mix(path, "oracle", dspark_block_size=8),
            "half": lambda path: write_v4_mix(path, "half", dspark_block_size=8),
            "mtp": write_v4_mix_mtp,
        }

    def __call__(self, kind: str) -> Path:
        path = self._root / kind
        return path if path.exists() else self._write[kind](path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def opened(folder: Folders) -> Open:
    """``opened(kind, **spec)``: an engine, loaded once."""
    from sparkchat.engine.engine import Engine

    engines: dict[Any, Runner] = {}

    def get(kind: str, **spec: Any) -> Runner:
        key = (kind, *sorted(spec.items()))
        if key not in engines:
            settings = {"device": "cuda", "dtype": "float32", "context": 640, "concurrency": 8, **spec}
            path = str(folder(kind))
            engines[key] = Runner(Engine(LoadSpec("fixture", path, path, cost_table=varied_cost(), **settings)))
        return engines[key]

    return get


def ids_of(length: int, vocab: int = 500, seed: int = 0) -> Tensor:
    return torch.randint(2, vocab, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def outputs(target: Any, device: torch.device, ids: Tensor, sizes: list[int]) -> Tensor:
    """Logits and a tap of spans of these sizes, on the CPU."""
    cache = target.new_cache(1, 128, 64)
    row, found, at = cache.allocate(), [], 0
    for part in ids.split(sizes):
        positions = torch.arange(at, at + len(part), device=device)
        batch = ForwardBatch(part.to(device), positions, (row,), (0, len(part)))
        hidden, taps = target.forward(batch, cache, (1,))
        found.append(torch.cat([target.logits(hidden), taps.float()], dim=-1).cpu())
        at += len(part)
    return torch.cat(found)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


SIZES = [30, 1, 6, 3, 20]


def load(folder: Path, device: torch.device, **options: Any) -> DeepseekV4:
    return load_trunk(folder, device=device, dtype=options.pop("dtype", torch.float32), **options)


@pytest.mark.parametrize("has_roundings", [False, True])
def test_logits_are_those_of_the_cpu(folder: Folders, has_roundings: bool) -> None:
    wanted = outputs(load(folder("tiny"), CPU, has_roundings=has_roundings), CPU, ids_of(60), SIZES)
    found = outputs(load(folder("tiny"), GPU, has_roundings=has_roundings), GPU, ids_of(60), SIZES)
    # A value that is rounded the other way moves what comes behind it by more than rounding does.
    assert relative(found, wanted) < (2e-2 if has_roundings else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_what_unpacked_ones_give(folder: Folders, dtype: torch.dtype) -> None:
    packed, unpacked = (
        outputs(load(folder("tiny"), GPU, dtype=dtype, is_packed=is_packed), GPU, ids_of(60), SIZES)
        for is_packed in (True, False)
    )
    # Kernels take packed weights in bfloat16 where they lie in tiles, and sum in another order.
    assert torch.equal(packed, unpacked) if dtype == torch.float32 else relative(packed, unpacked) < 2e-2


def test_bfloat16_stays_close(folder: Folders) -> None:
    """Without an indexer's choice, which a rounding can turn."""
    wanted = outputs(load(folder("oracle"), CPU), CPU, ids_of(60), SIZES)
    found = outputs(load(folder("oracle"), GPU, dtype=None), GPU, ids_of(60), SIZES)
    assert relative(found, wanted) < 0.05


def test_memory_taken_is_what_the_plan_counts(folder: Folders) -> None:
    from sparkchat.kernels.fp8 import make_room

    path = folder("wide")
    load(folder("tiny"), GPU)  # what CUDA's libraries take at their first use is no weight
    make_room(GPU)  # nor is what weights are expanded in, once for all models
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    target = load_trunk(path, device=GPU, dtype=None)
    drafter = load_drafter(path, target, device=GPU, dtype=None)
    taken = torch.cuda.memory_allocated() - before
    planned = packed_bytes(full_layout(parsed(v4_config({**TINY_SIZES, **WIDE}))))
    assert target.config.dtype_name == "fp4+fp8" and drafter.config.block_size == 5
    assert taken == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("kind", ["tiny", "half", "mtp"])
def test_greedy_tokens_are_those_of_mode_off_and_of_the_cpu(kind: str, opened: Open) -> None:
    low, high = (2, 500) if kind == "tiny" else (300, 500)
    prompts = random_prompts(6, 90, low=low, high=high, seed=51)
    lines = [{"prompt_ids": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
    on_cpu = opened(kind, device="cpu").ids({**line, "mode": "off"} for line in lines)
    widest = {"tiny": 5, "mtp": 3}.get(kind, 8)
    for number, mode in enumerate(ALL_MODES):
        blocks = [1 + (n + number) % widest for n in range(len(lines))]
        asked = [{**line, "mode": mode, "block_size": b} for line, b in zip(lines, blocks, strict=True)]
        assert opened(kind).ids(asked) == on_cpu, mode


def test_a_conversation_goes_on_and_back(opened: Open) -> None:
    runner, text = opened("half"), random_prompts(2, 150, seed=52)[1]
    for turn in range(3):
        line = {"prompt_ids": text, "mode": "static", "max_tokens": 20, "ignore_eos": True}
        (kept,) = runner.run([{**line, "session": "chat"}])
        assert kept["token_ids"] == runner.ids([line])[0]
        assert (kept["usage"]["cached_tokens"] > 0) == (turn > 0)
        text = [*text, *kept["token_ids"], 301] if turn == 0 else [*text[:-60], 310, 311]


def test_bfloat16_answers_are_repeated(opened: Open) -> None:
    runner = opened("half", dtype="auto")
    lines = [{"prompt_ids": p, "mode": "static", "max_tokens": 30, "ignore_eos": True} for p in random_prompts(4, 60)]
    assert runner.engine.info["dtype"] == "fp4+fp8"
    assert runner.ids(lines) == runner.ids(lines)
