"""A row has the same bits alone, in a longer span, and beside other requests: a verified draft is a plain step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.pairs import SIZES, Pair, assert_close, make_pair, random_ids, run
from models.test_linear import random_codes
from sparkchat.models.refined_head import RefinedHead

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "groups-of-3": {**WIDE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "no-groups": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "pairs": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "large-heads": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "heads-of-64": {**WIDE, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64},
    "window": {
        **WIDE,
        "sliding_window": 10,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> Pair:
    return build_once(
        f"independence-{request.param}", lambda folder: make_pair(folder, "qwen3", **KINDS[request.param])
    )


def assert_same(ours: Tensor, wanted: Tensor) -> None:
    """The same bits where the matrix library is known to allow it, elsewhere the same up to rounding."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available():
        assert torch.equal(ours, wanted)
    assert_close(ours, wanted, 1e-5)


# Around 256, 384 and 512 keys the sums over the keys are cut into parts.
@pytest.mark.parametrize("length", [3, 14, 31, 60, 250, 255, 381, 509])
@pytest.mark.parametrize("block", [2, 3, 6, 8])
def test_span_equals_single_steps(pair: Pair, length: int, block: int) -> None:
    model, ids = pair.ours, random_ids(length + block)
    cache = model.new_cache(2, 600, 600)
    row = cache.allocate()
    run(model, cache, [(row, ids[:length])])
    together, _ = run(model, cache, [(row, ids[length:])])
    cache.truncate(row, length)
    alone = torch.cat([run(model, cache, [(row, ids[i : i + 1])])[0] for i in range(length, length + block)])
    assert_same(together, alone)
    assert_same(model.logits(together), torch.cat([model.logits(row) for row in alone.split(1)]))


def test_batch_equals_each_alone(pair: Pair) -> None:
    model = pair.ours
    prompts = [random_ids(n, seed=n) for n in (40, 7, 300, 22, 13)]
    blocks = [random_ids(n, seed=100 + n) for n in (6, 1, 3, 4, 6)]
    cache = model.new_cache(5, 400, 300)
    rows = [cache.allocate() for _ in prompts]
    run(model, cache, list(zip(rows, prompts, strict=True)))
    together, _ = run(model, cache, list(zip(rows, blocks, strict=True)))
    apart = model.new_cache(1, 400, 300)
    alone = []
    for prompt, block in zip(prompts, blocks, strict=True):
        row = apart.allocate()
        run(model, apart, [(row, prompt)])
        alone.append(run(model, apart, [(row, block)])[0])
        apart.free(row)
    assert_same(together, torch.cat(alone))


def test_long_spans_do_not_change_short_ones(tmp_path: Path) -> None:
    """One request reads its prompt while another decodes."""
    pair = make_pair(tmp_path, "llama")
    model, ids = pair.ours, random_ids(10)
    cache = model.new_cache(2, 128, 64)
    rows = [cache.allocate() for _ in range(2)]
    run(model, cache, [(rows[0], ids[:8])])
    alone, _ = run(model, cache, [(rows[0], ids[8:])])
    cache.truncate(rows[0], 8)
    beside, taps = run(model, cache, [(rows[1], random_ids(50, seed=3)), (rows[0], ids[8:])], (0,))
    assert_same(beside[50:], alone)
    assert taps is not None and taps.shape == (52, SIZES["hidden_size"])
    assert cache.length(rows[0]) == 10 and cache.length(rows[1]) == 50


def test_refined_head_gives_each_row_its_own_bits() -> None:
    head = RefinedHead(random_codes(192, 64))
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    whole = head(hidden)
    for count in (1, 2, 5):
        assert_same(head(hidden[:count]), whole[:count])


def test_refined_head_is_exact_where_it_counts() -> None:
    weight = random_codes(4096, 64)
    hidden = 20 * torch.randn(9, 64, generator=torch.Generator().manual_seed(4))
    exact = hidden @ weight.dense().T
    logits = RefinedHead(weight)(hidden)
    near = exact >= exact.amax(-1, keepdim=True) - 2.5
    assert near.sum() > 9
    assert_close(logits[near], exact[near], 1e-5)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
