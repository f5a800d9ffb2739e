"""DeepSeek V4 in captured steps, run without capturing: the reference loop's tokens, and nothing asked of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, random_prompts
from engine.device_only import AskedHost, asking_nothing
from engine.test_captured import MODES, is_alike, lines_of, open_one
from fixtures.deepseek_v4 import write_tiny_v4
from fixtures.deepseek_v4_mix import write_v4_mix, write_v4_mix_mtp
from sparkchat.engine import engine as engine_module
from sparkchat.engine.captured.head_step import HeadStep
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.memory import storage_of

FEW: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 16],
    "dspark_target_layer_ids": [0, 1, 2],
    "hc_sinkhorn_iters": 2,
}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "tiny": lambda path: write_tiny_v4(path, **FEW),
    "half": lambda path: write_v4_mix(path, "half", dspark_block_size=8),
    "mtp": write_v4_mix_mtp,
}
Pairs = Callable[[str], tuple[Runner, Runner]]


@pytest.fixture(scope="module")
def pairs(build_once: Callable[..., Any]) -> Iterator[Pairs]:
    """``pairs(kind)``: the reference loop and captured steps on the same checkpoint, planning alike."""
    opened: dict[str, tuple[Runner, Runner]] = {}

    def get(kind: str) -> tuple[Runner, Runner]:
        if kind not in opened:
            folder = build_once(f"v4-captured-{kind}", WRITERS[kind])
            loop, captured = (open_one(folder, folder, graphs) for graphs in (None, True))
            opened[kind] = (loop, captured)
        return opened[kind]

    yield get
    opened.clear()


@pytest.mark.parametrize("kind", WRITERS)
def test_greedy_tokens_are_those_of_plain_decoding(kind: str, pairs: Pairs) -> None:
    loop, captured = pairs(kind)
    lines = [line for mode in MODES for line in lines_of(mode, "greedy", tokens=7)[:2]]
    plain = loop.ids([{**line, "mode": "off"} for line in lines])
    assert captured.ids(lines) == plain


@pytest.mark.parametrize(("kind", "sampling"), [("tiny", "filtered"), ("half", "sampled"), ("mtp", "sampled")])
def test_sampled_tokens_are_those_of_the_reference_loop(kind: str, sampling: str, pairs: Pairs) -> None:
    loop, captured = pairs(kind)
    for mode in ("static", "compact"):
        lines = lines_of(mode, sampling, tokens=5)[:2]
        assert captured.ids(lines) == loop.ids(lines), mode


@pytest.mark.parametrize("kind", ["half", "mtp"])
def test_drafts_are_those_of_the_reference_loop(kind: str, pairs: Pairs) -> None:
    """Over windows and entries that close inside a block, with most of it accepted or hardly any."""
    loop, captured = pairs(kind)
    lines = lines_of("static", "sampled", tokens=30)[:1]
    (expected,), (found,) = loop.watch(lines), captured.watch(lines)
    assert len(expected.steps) == len(found.steps)
    for ours, theirs in zip(found.steps[:-1], expected.steps[:-1], strict=True):
        for name in ("draft_ids", "confidence_logit", "p_draft", "p_target", "accepted_len", "committed_ids"):
            if name in theirs:
                assert is_alike(ours[name], theirs[name]), (name, ours[name], theirs[name])


@pytest.mark.parametrize(("kind", "enters"), [("tiny", False), ("mtp", False), ("tiny", True)])
def test_steps_of_kernels_give_the_same_tokens(
    kind: str, enters: bool, build_once: Callable[..., Any], pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, draws and acceptance by their torch references; with ``enters``, what is around them by kernels."""
    folder, (loop, _) = build_once(f"v4-captured-{kind}", WRITERS[kind]), pairs(kind)
    monkeypatch.setattr(engine_module, "build_decoder", partial(engine_module.build_decoder, is_fused=True))
    runner = open_one(folder, folder, True)
    step = runner.engine._captured._step  # type: ignore[union-attr]
    assert isinstance(step, HeadStep)
    step._enters = enters
    # The interpreter is slow.
    for sampling in ("sampled",) if enters else ("greedy", "sampled"):
        lines = lines_of("compact", sampling, tokens=3 if enters else 5)[: 1 if enters else 2]
        assert runner.ids(lines) == loop.ids(lines), sampling


@pytest.mark.parametrize("kind", ["tiny", "mtp"])
def test_layers_of_kernels_give_the_same_tokens(
    kind: str, build_once: Callable[..., Any], pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same drafts, which all of the drafter's state goes into. As on a GPU, by torch references."""
    folder, (loop, _) = build_once(f"v4-captured-{kind}", WRITERS[kind]), pairs(kind)
    monkeypatch.setattr(engine_module, "build_decoder", partial(engine_module.build_decoder, is_fused=True))
    monkeypatch.setattr("sparkchat.engine.captured.build.has_kernels", lambda device, dtype: True)
    runner = open_one(folder, folder, True)
    assert runner.engine.pair.drafter._fused is not None  # type: ignore[union-attr]
    found, expected = (r.watch(lines_of("static", "greedy", tokens=12)[:2]) for r in (runner, loop))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.ids == theirs.ids
        drafts, wanted = ([step["draft_ids"] for step in outcome.steps[:-1]] for outcome in (ours, theirs))
        assert drafts == wanted and any(drafts)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_ranks_run_layers_of_kernels(
    build_once: Callable[..., Any], pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that ranks hand over unsummed are added by the launch behind them."""
    folder, (loop, _) = build_once("v4-captured-tiny", WRITERS["tiny"]), pairs("tiny")
    monkeypatch.setattr(engine_module, "build_decoder", partial(engine_module.build_decoder, is_fused=True))
    monkeypatch.setattr("sparkchat.engine.captured.build.has_kernels", lambda device, dtype: True)
    runner = open_one(folder, folder, True, tp=2)
    try:
        lines = lines_of("compact", "sampled", tokens=5)[:2]
        assert runner.ids(lines) == loop.ids(lines)
    finally:
        runner.engine.pair.team.close()  # type: ignore[union-attr]


def test_a_conversation_goes_on_between_prompts_and_captured_steps(pairs: Pairs) -> None:
    loop, captured = pairs("half")
    text = random_prompts(2, 60, seed=5)[1]
    for turn in range(3):
        line = {"prompt_ids": text, "mode": "static", "max_tokens": 12, "ignore_eos": True}
        (kept,) = captured.run([{**line, "session": "chat"}])
        assert kept["token_ids"] == loop.ids([line])[0]
        assert (kept["usage"]["cached_tokens"] > 0) == (turn > 0)
        text = [*text, *kept["token_ids"], 301] if turn == 0 else [*text[:-15], 310, 311]


def test_storage_never_moves_once_it_is_captured(pairs: Pairs) -> None:
    _, captured = pairs("mtp")
    pair = captured.engine.pair
    caches: list[Any] = [pair.cache, pair.draft_cache]
    parts = [part for cache in caches for store in cache.stores.values() for part in store.parts]
    before = [part.data.data_ptr() for part in parts]
    captured.ids([{"prompt_ids": random_prompts(2, 280, seed=6)[1], "max_tokens": 10, "ignore_eos": True}])
    assert [part.data.data_ptr() for part in parts] == before


@pytest.mark.parametrize("kind", ["tiny", "mtp"])
def test_a_step_asks_the_host_nothing(kind: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU alone the largest of a row is found by other means.
    monkeypatch.setattr("sparkchat.engine.sampling.argmax_ids", lambda logits: logits.argmax(dim=-1))
    _, captured = pairs(kind)
    decoder = captured.engine._captured
    assert decoder is not None
    step = decoder._step
    with torch.inference_mode():
        decoder._hold_nobody()
        for draws in (Draws.GREEDY, Draws.FILTERED):
            with asking_nothing():
                step.draft(2, draws)
                for rows, shares in ((1, False), (7, True)):
                    step.verify(rows, draws, shares)


def test_the_guard_finds_what_asks_the_host(pairs: Pairs) -> None:
    loop, _ = pairs("tiny")
    numbers, mixture = torch.arange(3), loop.engine.pair.target.stack.layers[1]._experts
    asking: list[Callable[[], Any]] = [
        lambda: int(numbers[0]),
        lambda: bool((numbers > 1).any()),
        lambda: numbers[numbers > 1],
        lambda: torch.tensor([1, 2]),
        lambda: numbers.tolist(),
        lambda: mixture(torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)),
    ]
    for ask in asking:
        with torch.inference_mode(), pytest.raises(AskedHost), asking_nothing():
            ask()


def test_a_mixture_of_all_experts_has_the_bits_of_those_that_are_needed(pairs: Pairs) -> None:
    loop, _ = pairs("tiny")
    mixture = loop.engine.pair.target.stack.layers[1]._experts
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    weights, chosen = mixture.gate(x, torch.arange(9))
    assert torch.equal(mixture.mix_of_all(x, weights, chosen), mixture.mix(x, weights, chosen))


def test_storage_is_what_caches_take(pairs: Pairs) -> None:
    pair = pairs("mtp")[1].engine.pair
    per_position, per_row = storage_of(pair.target, pair.drafter, 256)
    cache, draft_cache = pair.target.new_cache(3, 6400, 256), pair.drafter.new_cache(3, 6400)
    for one in (cache, draft_cache):
        one.fill()
    taken = cache.num_bytes + draft_cache.num_bytes
    assert taken == pytest.approx(3 * (6400 * per_position + per_row), rel=0.02)
