"""A stack of layers in one call, against the same layers in torch's operations; and each row's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.pairs import CPU, assert_close, batch_of, make_theirs, random_ids, run
from sparkchat.kernels import cpu
from sparkchat.models import KVCache, load_target
from sparkchat.models.dense import DenseModel

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups-of-3": ("qwen3", {**WIDE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}),
    "heads-of-80": ("llama", {**WIDE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}),
    "biases": ("qwen2", {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    "normed-heads": ("qwen3", {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
    "window": (
        "qwen3",
        {
            **WIDE,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 10,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> DenseModel:
    kind, changes = KINDS[request.param]

    def build(folder: Path) -> DenseModel:
        make_theirs(kind, **changes).to(torch.bfloat16).save_pretrained(folder)
        return load_target(folder, device=CPU)

    return build_once(f"cpu-{request.param}", build)


def new_cache(model: DenseModel, dtype: torch.dtype, context: int = 300, span: int = 100) -> KVCache:
    shape = model.config.decoder
    return KVCache(
        shape.windows,
        shape.num_kv_heads,
        shape.head_dim,
        max_rows=4,
        context=context,
        max_span=span,
        dtype=dtype,
        device=CPU,
    )


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_against_torch(model: DenseModel, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, then ragged steps of two requests that cross the window's end; hidden rows and taps."""
    spans = [[(0, 61)], [(1, 5)], [(0, 3), (1, 1)], [(1, 30)], [(1, 2), (0, 4)]]

    def answers() -> list[Tensor]:
        cache = new_cache(model, dtype)
        rows = [cache.allocate() for _ in range(2)]
        out: list[Tensor] = []
        for turn, parts in enumerate(spans):
            given = [(rows[r], random_ids(n, seed=10 * turn + r)) for r, n in parts]
            hidden, taps = run(model, cache, given, (-1, 0, 1))
            assert taps is not None
            out += [hidden, taps]
        return out

    assert model.stack.native is not None
    ours = answers()
    monkeypatch.setattr(model.stack, "native", None)
    for a, b in zip(ours, answers(), strict=True):
        assert_close(a, b, error)


@pytest.mark.parametrize("length", [3, 60, 270])
def test_a_row_has_its_own_bits(model: DenseModel, length: int) -> None:
    """In a block, alone, beside other requests, and with more threads than processors."""
    prompt, block = random_ids(length), random_ids(6, seed=1)
    cache = new_cache(model, torch.bfloat16, 400, 280)
    row, other = cache.allocate(), cache.allocate()
    run(model, cache, [(row, prompt)])
    together, _ = run(model, cache, [(row, block)])
    cache.truncate(row, length)
    alone = torch.cat([run(model, cache, [(row, block[i : i + 1])])[0] for i in range(6)])
    assert torch.equal(together, alone)
    cache.truncate(row, length)
    torch.set_num_threads(3)
    beside, _ = run(model, cache, [(other, random_ids(70, seed=2)), (row, block)])
    torch.set_num_threads(1)
    assert torch.equal(beside[70:], alone)
    assert torch.equal(model.logits(beside[70:]), torch.cat([model.logits(r) for r in alone.split(1)]))


def test_a_prompt_in_chunks_is_the_prompt(model: DenseModel) -> None:
    ids = random_ids(90)
    whole, parts = new_cache(model, torch.bfloat16), new_cache(model, torch.bfloat16)
    a, b = whole.allocate(), parts.allocate()
    hidden, _ = run(model, whole, [(a, ids)])
    chunks = torch.cat([run(model, parts, [(b, part)])[0] for part in ids.split(31)])
    assert torch.equal(hidden, chunks)


def test_what_lies_behind_a_row_is_never_seen(model: DenseModel) -> None:
    """Numbers that are none, left by a draft that was rejected, reach nothing."""
    cache = new_cache(model, torch.bfloat16)
    row = cache.allocate()
    run(model, cache, [(row, random_ids(20))])
    wanted, _ = run(model, cache, [(row, random_ids(1, seed=5))])
    cache.truncate(row, 20)
    for store in cache.stores:
        if store.window is None:
            store.data[:, row, :, 20:] = float("nan")
    again, _ = run(model, cache, [(row, random_ids(1, seed=5))])
    assert torch.equal(wanted, again)


def test_a_damaged_row_harms_no_other(model: DenseModel) -> None:
    cache = new_cache(model, torch.bfloat16)
    rows = [cache.allocate() for _ in range(2)]
    run(model, cache, [(rows[0], random_ids(9)), (rows[1], random_ids(9))])
    for store in cache.stores:
        store.data[:, rows[0], :, 3] = float("nan")
    batch = batch_of(cache, [(rows[0], random_ids(2)), (rows[1], random_ids(2))])
    hidden, _ = model.forward(batch, cache)
    assert hidden[:2].isnan().any() and hidden[2:].isfinite().all()
