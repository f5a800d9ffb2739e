"""A row has the same bits alone, in a longer span, and beside other requests: a verified draft is a plain step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.pairs import SIZES, Pair, make_pair, random_ids, run

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "groups-of-3": {**WIDE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "no-groups": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "pairs": {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "window": {
        **WIDE,
        "sliding_window": 10,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> Pair:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("without oneDNN the matrix products of this CPU depend on the number of rows")
    return build_once(
        f"independence-{request.param}", lambda folder: make_pair(folder, "qwen3", **KINDS[request.param])
    )


@pytest.mark.parametrize("length", [3, 14, 31, 60])
@pytest.mark.parametrize("block", [2, 3, 6, 8])
def test_span_equals_single_steps(pair: Pair, length: int, block: int) -> None:
    model, ids = pair.ours, random_ids(length + block)
    cache = model.new_cache(2, 128, 64)
    row = cache.allocate()
    run(model, cache, [(row, ids[:length])])
    together, _ = run(model, cache, [(row, ids[length:])])
    cache.truncate(row, length)
    alone = torch.cat([run(model, cache, [(row, ids[i : i + 1])])[0] for i in range(length, length + block)])
    assert torch.equal(together, alone)
    assert torch.equal(model.logits(together), torch.cat([model.logits(row) for row in alone.split(1)]))


def test_batch_equals_each_alone(pair: Pair) -> None:
    model = pair.ours
    prompts = [random_ids(n, seed=n) for n in (40, 7, 22, 13)]
    blocks = [random_ids(n, seed=100 + n) for n in (6, 1, 4, 6)]
    cache = model.new_cache(4, 128, 64)
    rows = [cache.allocate() for _ in prompts]
    run(model, cache, list(zip(rows, prompts, strict=True)))
    together, _ = run(model, cache, list(zip(rows, blocks, strict=True)))
    apart = model.new_cache(1, 128, 64)
    alone = []
    for prompt, block in zip(prompts, blocks, strict=True):
        row = apart.allocate()
        run(model, apart, [(row, prompt)])
        alone.append(run(model, apart, [(row, block)])[0])
        apart.free(row)
    assert torch.equal(together, torch.cat(alone))


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
    assert torch.equal(beside[50:], alone)
    assert taps is not None and taps.shape == (52, SIZES["hidden_size"])
    assert cache.length(rows[0]) == 10 and cache.length(rows[1]) == 50
