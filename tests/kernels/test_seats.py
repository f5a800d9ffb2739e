"""A step's bookkeeping by kernels against the same by torch: rows, records and seats, through whole engines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, random_prompts, varied_cost
from sparkchat.engine import engine as engine_module
from sparkchat.engine.captured.state import Block, Seats, StepInputs
from sparkchat.engine.engine import Engine
from sparkchat.kernels.rope.kernel import launch_write_context
from sparkchat.kernels.rope.reference import write_context_reference
from sparkchat.kernels.seats import PackedRows
from sparkchat.kernels.seats.kernel import launch_enter_rows
from sparkchat.params import LoadSpec

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
)
MODES = ("static", "compact", "cap-accept", "off")


@pytest.fixture(scope="module")
def runners(tiny_pair: Any, mix_folders: dict[str, Path]) -> Iterator[dict[str, tuple[Runner, Runner]]]:
    """By pair: steps whose bookkeeping is torch's, and the kernels' in the interpreter; both on the CPU."""
    found = {}
    kinds = {
        "tiny": (tiny_pair.target, tiny_pair.drafter, {}),
        "oracle": (mix_folders["target"], mix_folders["oracle"], {}),
        "plain": (tiny_pair.target, None, {}),
        "simulated": (tiny_pair.target, tiny_pair.drafter, {"simulate_acceptance": "chat"}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.backends.mkldnn.is_available", lambda: False)
        patch.setattr(engine_module, "build_decoder", partial(engine_module.build_decoder, is_fused=True))
        for name, (target, drafter, spec) in kinds.items():
            found[name] = tuple(open_one(target, drafter, enters, **spec) for enters in (False, True))
    yield found


def open_one(target: Path, drafter: Path | None, enters: bool, **spec: Any) -> Runner:
    loaded = LoadSpec(
        "fixture", str(target), None if drafter is None else str(drafter), device="cpu", context=300, concurrency=5,
        threads=1, cost_table=None if drafter is None else varied_cost(), graphs=True, **spec,
    )  # fmt: skip
    runner = Runner(Engine(loaded))
    runner.engine.pair.is_lagged = True
    runner.engine._captured._step._enters = enters  # type: ignore[union-attr]
    return runner


def lines_of(modes: tuple[str, ...], count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of several lengths, settings and modes, with and without a seed of their own."""
    return [
        {
            "prompt_ids": prompt,
            "max_tokens": tokens + n,
            "ignore_eos": True,
            "mode": modes[n % len(modes)],
            **({"seed": n} if n % 2 else {}),
            **SAMPLINGS[n % 3],
        }
        for n, prompt in enumerate(random_prompts(count, 40, seed=3))
    ]


def assert_alike(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, float) and isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), where
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            if not name.endswith(("_ms", "t_ns", "tokens_per_second", "seed")):
                assert_alike(ours[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(a, b, f"{where}[{n}]")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize(
    ("kind", "modes", "count"),
    [("tiny", MODES, 6), ("oracle", ("cap-accept",), 2), ("plain", ("off",), 3), ("simulated", ("compact",), 3)],
)
def test_steps_and_records_are_those_of_torch(
    kind: str, modes: tuple[str, ...], count: int, runners: dict[str, tuple[Runner, Runner]]
) -> None:
    theirs, ours = runners[kind]
    lines = [{"seed": 7 + n, **line} for n, line in enumerate(lines_of(modes, count, 5))]
    refused = 0
    for want, got in zip(theirs.watch(lines), ours.watch(lines), strict=True):
        assert got.ids == want.ids
        for step, other in zip(got.steps, want.steps, strict=True):
            assert_alike(step, other, kind)
            refused += step.get("reject") is not None
    assert kind in ("oracle", "plain") or refused


def test_requests_that_share_a_budget(runners: dict[str, tuple[Runner, Runner]]) -> None:
    """Greedy ones, as others would differ by the seeds they are given."""
    lines = [
        {"prompt_ids": prompt, "max_tokens": 9, "ignore_eos": True, "mode": "compact"}
        for prompt in random_prompts(4, 40, seed=5)
    ]
    found = [runner.watch(lines) for runner in runners["tiny"]]
    for want, got in zip(*found, strict=True):
        assert got.ids == want.ids
        assert [step["verify_len"] for step in got.steps] == [step["verify_len"] for step in want.steps]
    assert len({step["verify_len"] for outcome in found[0] for step in outcome.steps}) > 1


def test_rows_of_ids_are_whole_numbers(device: torch.device) -> None:
    """Where a token's row of the table is its id: the same numbers, of another type."""
    words, seats, block = StepInputs(2, 3, device), Seats.empty(2, device), Block.empty(2, 3, 1, device)
    words.device_words[[0, 1, 6]] = torch.tensor([3, 1, 2], device=device).to(words.device_words.dtype)
    numbers = {
        "anchor": (129_000, 7),
        "kv_len": (10, 20),
        "remaining": (9, 9),
        "cache_row": (1, 3),
        "draft_row": (2, 0),
    }
    for name, values in numbers.items():
        getattr(seats, name).copy_(torch.tensor(values))
    block.ids.copy_(100_000 + torch.arange(6).view(2, 3))
    table = torch.arange(129_280, dtype=torch.float32, device=device).unsqueeze(1)
    plain, named = (PackedRows.empty(2, 8, 1, device, has_ids=has_ids) for has_ids in (False, True))
    for rows in (plain, named):
        launch_enter_rows(words, seats, table, rows, block, 9, 8, None)
    assert named.x.flatten().tolist() == [129_000, 100_000, 100_001, 100_002, 7, 100_003, 7, 7]
    assert named.cache_rows.tolist() == [1, 1, 1, 1, 3, 3, 9, 9]
    for name in ("x", "positions", "cache_rows", "draft_rows", "ends"):
        found, want = getattr(named, name), getattr(plain, name)
        assert found.dtype == torch.int64 and torch.equal(found.double(), want.double())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("has_norm", [False, True])
def test_write_context(parts: int, has_norm: bool, device: torch.device) -> None:
    layers, kv_heads, dim = 3, 2, 16
    kv = torch.randn(parts, 4, layers * 2 * kv_heads * dim, device=device)
    kv = kv[0] if parts == 1 else kv
    positions = torch.tensor([3, 4, 9, 0], device=device)
    rows = torch.tensor([1, 1, 0, -1], device=device, dtype=torch.int32)
    table, norm = torch.randn(16, dim, device=device), torch.randn(layers, kv_heads, dim, device=device)
    caches = torch.full((2, layers, 2, 2 * kv_heads, 12, dim), torch.nan, device=device)
    for run, cache in zip((launch_write_context, write_context_reference), caches, strict=True):
        run(kv, positions, rows, table, cache, norm if has_norm else None, 1e-6)
    torch.testing.assert_close(caches[0], caches[1], equal_nan=True)
    assert int(caches[0].isnan().logical_not().sum()) == 3 * layers * 2 * kv_heads * dim
