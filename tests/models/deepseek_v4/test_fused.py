"""Layers by the kernels give what the layers themselves give, over spans, rollbacks and companies of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device_only import asking_nothing
from fixtures.deepseek_v4 import write_tiny_v4
from fixtures.triton_interpreter import interpreter_that_copes  # noqa: F401
from models.deepseek_v4.trunks import CPU, make_trunk, random_ids, run
from sparkchat.kernels.compressor.kernel import launch_compress_rows
from sparkchat.kernels.hyper.kernel import launch_connect_streams
from sparkchat.kernels.indexer.kernel import launch_choose_entries
from sparkchat.kernels.latent_attention.kernel import launch_latent_attention, launch_write_latents
from sparkchat.kernels.launch import started_by
from sparkchat.models.deepseek_v4 import attention, fused
from sparkchat.models.deepseek_v4.cache import StateCache
from sparkchat.models.deepseek_v4.loading import load_trunk
from sparkchat.models.deepseek_v4.model import DeepseekV4
from sparkchat.models.rows import RowBatch

SMALL: dict[str, Any] = {"compress_ratios": [0, 4, 8], "num_hidden_layers": 3, "hc_sinkhorn_iters": 3}
CONTEXT, WIDEST = 320, 8
TAPS = (-1, 1, 2, 3)
KERNELS: dict[str, tuple[Any, Callable[..., None]]] = {
    "connect_streams": (fused, launch_connect_streams),
    "write_latents": (attention, launch_write_latents),
    "latent_attention": (attention, launch_latent_attention),
    "compress_rows": (attention, launch_compress_rows),
    "choose_entries": (attention, launch_choose_entries),
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Kernels in the interpreter in the place of their references; counts their launches."""
    counts = dict.fromkeys(KERNELS, 0)

    def stand_in(name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **named: Any) -> None:
            counts[name] += 1
            given = signature(launch).bind_partial(*arguments, **named).arguments
            needed = signature(launch).parameters.values()
            missing = {p.name: None for p in needed if p.default is Parameter.empty and p.name not in given}
            launch(*arguments, **named, **missing)

        return call

    for name, (module, launch) in KERNELS.items():
        monkeypatch.setattr(module, name, stand_in(name, launch))
    yield counts


def fused_model(**changes: Any) -> tuple[DeepseekV4, DeepseekV4]:
    """The same weights twice: layers by torch, and by kernels."""
    plain, other = (make_trunk(**{**SMALL, **changes}).ours for _ in range(2))
    return plain, other


def filled(model: DeepseekV4, rows: int) -> StateCache:
    cache = model.new_cache(rows, CONTEXT, 64)
    cache.fill()
    for _ in range(rows):
        cache.allocate()
    model.prepare(CONTEXT)
    model.fuse(cache, 40, WIDEST)
    return cache


@torch.inference_mode()
def by_rows(
    model: DeepseekV4,
    cache: StateCache,
    spans: list[tuple[int, int, Tensor]],
    spare: int = 0,
    taps: tuple[int, ...] = TAPS,
) -> tuple[Tensor, Tensor | None]:
    """hidden and taps of spans (cache row, position of the first, ids), with ``spare`` rows of nobody behind them."""
    ids = torch.cat([part for _, _, part in spans])
    positions = torch.cat([torch.arange(start, start + len(part)) for _, start, part in spans])
    rows = torch.tensor([row for row, _, part in spans for _ in part])
    starts = torch.tensor([0, *[len(part) for _, _, part in spans]]).cumsum(0).int()

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(spare)])

    batch = RowBatch(longer(ids), longer(positions), longer(rows), longer(positions + 1), starts)
    hidden, tapped = model.decode_rows(batch, cache, taps)
    return hidden[: len(ids)], None if tapped is None else tapped[: len(ids)]


def walk(model: DeepseekV4, plain: DeepseekV4, steps: int, widest: int, first: int = 0) -> None:
    """Two requests of which some rows stay, beside what torch's layers give for the texts that remain.

    ``first``: rows of a pass before, which all stay.
    """
    draw = torch.Generator().manual_seed(2)
    cache = filled(model, 3)
    texts = [random_ids(20 * widest, seed=n) for n in range(2)]
    wanted = []
    for text in texts:
        single = plain.new_cache(1, CONTEXT, 256)
        wanted.append(run(plain, single, [(single.allocate(), text)]))
    at = [0, 0]
    for turn in range(steps):
        width, keep = (int(torch.randint(1, widest + 1, (), generator=draw)) for _ in range(2))
        width, keep = (first, first) if first and turn == 0 else (width, min(keep, width))
        parts = [
            torch.cat([text[n : n + keep], random_ids(width - keep, seed=turn)])
            for n, text in zip(at, texts, strict=True)
        ]
        spans = [(row, n, part) for row, n, part in zip((2, 0), at, parts, strict=True)]
        hidden, _ = by_rows(model, cache, spans, spare=turn % 3)
        for n, text, part in zip(at, wanted, hidden.split(width), strict=True):
            found, want = part[:keep], text[n : n + keep]
            torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)
            assert torch.equal(model.logits(found).argmax(dim=1), plain.logits(want).argmax(dim=1))
        at = [n + keep for n in at]


def test_references_give_what_layers_give() -> None:
    plain, model = fused_model()
    walk(model, plain, steps=16, widest=WIDEST)


def test_kernels_give_what_layers_give(interpreted: dict[str, int]) -> None:
    # Rows from the eighth position on see more entries than are chosen.
    plain, model = fused_model(num_hidden_layers=2, compress_ratios=[4, 8], index_topk=1)
    walk(model, plain, steps=3, widest=4, first=7)
    assert interpreted == {"connect_streams": 15, "write_latents": 0, "latent_attention": 6, "compress_rows": 6,
                           "choose_entries": 3}  # fmt: skip


def test_nothing_is_asked_of_the_host(interpreted: dict[str, int]) -> None:
    """Launches alone, which compute nothing: all else of a step is as in one that is captured."""
    _, model = fused_model()
    cache = filled(model, 1)
    with started_by(lambda *arguments, **options: None), asking_nothing():
        rows = torch.arange(8)
        batch = RowBatch(rows, rows, rows * 0, rows + 1, torch.zeros(2, dtype=torch.int32))
        model.decode_rows(batch, cache, TAPS)
    assert interpreted["latent_attention"] == 3


def test_weights_in_tiles_are_multiplied_together(
    build_once: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two projections in one product, all output groups in one, and outputs left in parts."""
    sizes = {
        **SMALL,
        "vocab_size": 97,
        "hidden_size": 128,
        "q_lora_rank": 128,
        "num_attention_heads": 16,
        "o_lora_rank": 32,
        "num_hidden_layers": 2,
        "compress_ratios": [0, 4],
        "dspark_target_layer_ids": [0, 1, 1],
    }
    folder = build_once("v4-fused", lambda path: write_tiny_v4(path, drafter="none", **sizes))
    plain = load_trunk(folder, device=CPU, dtype=None, is_packed=True)
    for module in ("packed", "gate", "tile_products"):
        monkeypatch.setattr(f"sparkchat.models.deepseek_v4.{module}.has_kernels", lambda device, dtype: True)
    model = load_trunk(folder, device=CPU, dtype=None, is_packed=True)
    assert all(layer.attention._tiles is not None for layer in model.stack.layers)
    single, ids = plain.new_cache(1, CONTEXT, 64), random_ids(32)
    wanted = run(plain, single, [(single.allocate(), ids)])
    cache = filled(model, 1)
    found = torch.cat([by_rows(model, cache, [(0, n, ids[n : n + 8])], taps=())[0] for n in range(0, 32, 8)])
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    # A long prompt goes through the same weights, one by one.
    prompt = model.new_cache(1, CONTEXT, 64)
    torch.testing.assert_close(run(model, prompt, [(prompt.allocate(), ids)]), wanted, atol=2e-3, rtol=2e-3)


def test_taps_are_those_of_the_layers() -> None:
    plain, model = fused_model()
    cache, ids = filled(model, 1), random_ids(30)
    _, found = by_rows(model, cache, [(0, 0, ids[:8])])
    reference = plain.new_cache(1, CONTEXT, 64)
    reference.fill()
    reference.allocate()
    plain.prepare(CONTEXT)
    _, wanted = by_rows(plain, reference, [(0, 0, ids[:8])])
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


def test_roundings_are_followed() -> None:
    """Values that are rounded the other way move what is behind them, so only most rows are close."""
    plain, model = fused_model(has_roundings=True)
    cache, ids = filled(model, 1), random_ids(40)
    found = torch.cat([by_rows(model, cache, [(0, n, ids[n : n + 8])])[0] for n in range(0, 40, 8)])
    single = plain.new_cache(1, CONTEXT, 64)
    wanted = run(plain, single, [(single.allocate(), ids)])
    error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.median() < 1e-3
