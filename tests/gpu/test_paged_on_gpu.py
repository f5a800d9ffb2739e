"""A cache that requests share, on a CUDA device: what little room changes is the time alone; memory stays flat.

Needs torch, triton, transformers, safetensors and pytest, and no other package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from cases.harness import Runner
from engine.test_preemption import COST, KINDS, LITTLE, assert_nothing_is_held, counted, lines_of
from sparkchat.models.paged_cache import PagedCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
FORMS = ("loop", "torch", "kernels")
"""The reference path; captured steps of torch's operations; captured steps of the kernels."""
Engines = Callable[[str], tuple[Runner, Runner]]


@pytest.fixture(autouse=True)
def _start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.engine.scheduler.ROOM_TO_RUN", 8)


@pytest.fixture(scope="module")
def engines(tiny_pair: Any) -> Iterator[Engines]:
    """Return ``engines(form)``: one engine with room for all, one with little, in fp32."""
    from sparkchat.engine import engine as engine_module
    from sparkchat.params import LoadSpec

    opened: dict[str, tuple[Runner, Runner]] = {}
    build = engine_module.build_decoder

    def open_one(form: str, tokens: int) -> Runner:
        target, drafter = str(tiny_pair.target), str(tiny_pair.drafter)
        sizes = {"device": "cuda", "dtype": "float32", "context": 300, "concurrency": 5, "cache_tokens": tokens}
        engine_module.build_decoder = partial(build, is_fused=form == "kernels")
        try:
            loaded = LoadSpec("fixture", target, drafter, graphs=form != "loop", cost_table=COST.table, **sizes)
            return Runner(engine_module.Engine(loaded))
        finally:
            engine_module.build_decoder = build

    def get(form: str) -> tuple[Runner, Runner]:
        if form not in opened:
            opened[form] = open_one(form, 1800), open_one(form, LITTLE)
        return opened[form]

    yield get
    opened.clear()


def all_kinds() -> list[dict[str, Any]]:
    return [line | kind for line, kind in zip(lines_of("off", "greedy", len(KINDS)), KINDS, strict=True)]


@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_a_cache_with_room_for_all(form: str, engines: Engines) -> None:
    ample, little = engines(form)
    assert all(isinstance(runner.engine.pair.cache, PagedCache) for runner in (ample, little))
    for n in range(3):
        lines = [line | {"seed": line["seed"] + 100 * n} for line in all_kinds()]
        expected, none = counted(ample, lines)
        found, some = counted(little, lines)
        assert none == 0 and some >= 2
        assert [r["token_ids"] for r in found] == [r["token_ids"] for r in expected]
        assert [r["finish_reason"] for r in found] == [r["finish_reason"] for r in expected]


@pytest.mark.parametrize("form", FORMS)
def test_memory_stays_flat_however_often_requests_give_way(form: str, engines: Engines) -> None:
    _, little = engines(form)
    counted(little, all_kinds())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        counted(little, all_kinds())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert_nothing_is_held(little)


def test_what_was_damaged_harms_nobody_who_takes_its_pages(engines: Engines) -> None:
    """NaN in every page that is free: whoever takes one finds zeros."""
    ample, little = engines("kernels")
    lines = lines_of("static", "sampled", 5)
    expected, _ = counted(ample, lines)
    pair = little.engine.pair
    for cache in (pair.cache, pair.draft_cache):
        assert isinstance(cache, PagedCache)
        cache.table._used |= set(range(1, cache.table.num_pages + 1))
        for store in cache.stores:
            store.data[:, 1 : cache.table.num_pages + 1] = float("nan")
    found, some = counted(little, lines)
    assert some and [r["token_ids"] for r in found] == [r["token_ids"] for r in expected]
