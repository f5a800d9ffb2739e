"""Logits equal transformers' for every kind of layer, however the rows are cut into spans.

transformers leaves out the published roundings of activations, latents and index keys, and the rotation of index
queries and keys that comes with them; it is compared with them off. It is loaded from the published tensor names, by
its own table of names, so that a tensor put in the wrong place of ours has nowhere to hide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from models.deepseek_v4.trunks import Trunk, make_trunk, random_ids, run, run_chunks, theirs_of
from models.pairs import assert_close, batch_of
from sparkchat.models import ForwardBatch

LENGTH = 50
KINDS: dict[str, dict[str, Any]] = {
    "every-kind": {},
    "window-only": {"compress_ratios": [0, 0], "num_hidden_layers": 2, "num_hash_layers": 0},
    "sparse-only": {"compress_ratios": [4, 4, 4], "num_hidden_layers": 3, "index_topk": 2},
    "sparse-sees-all": {"compress_ratios": [4, 4], "num_hidden_layers": 2, "index_topk": 512},
    "heavy-only": {"compress_ratios": [16, 16], "num_hidden_layers": 2, "sliding_window": 5},
    "all-hashed": {"num_hash_layers": 6},
    "clamped": {"swiglu_limit": 0.4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 5},
    "no-yarn": {"rope_scaling": None},
    "short-yarn": {
        "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 16},
        "compress_rope_theta": 2000,
    },
    "two-streams": {"hc_mult": 2, "hc_sinkhorn_iters": 3},
    "one-group": {"o_groups": 1, "num_attention_heads": 2, "head_dim": 48, "qk_rope_head_dim": 8},
    "many-groups": {"o_groups": 6, "num_attention_heads": 6},
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> tuple[Trunk, PreTrainedModel]:
    def build(folder: Path) -> tuple[Trunk, PreTrainedModel]:
        trunk = make_trunk(**KINDS[request.param])
        return trunk, theirs_of(trunk, folder)

    return build_once(f"v4-trunk-{request.param}", build)


def their_logits(theirs: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return theirs(ids[None]).logits[0]


@pytest.mark.parametrize("sizes", [(LENGTH,), (21, 1, 1, 1, 6), (5, 3, 13)], ids=str)
def test_logits(pair: tuple[Trunk, PreTrainedModel], sizes: tuple[int, ...]) -> None:
    trunk, theirs = pair
    ids = random_ids(LENGTH)
    cache = trunk.ours.new_cache(2, 128, LENGTH)
    ours = run_chunks(trunk.ours, cache, cache.allocate(), ids, sizes)
    assert_close(ours, their_logits(theirs, ids))


def test_single_steps_of_both(pair: tuple[Trunk, PreTrainedModel]) -> None:
    trunk, theirs = pair
    ids = random_ids(21, seed=5)
    cache = trunk.ours.new_cache(1, 64, 8)
    ours = run_chunks(trunk.ours, cache, cache.allocate(), ids, (1,))
    assert_close(ours, their_logits(theirs, ids))
    past, steps = DynamicCache(config=theirs.config), []
    with torch.no_grad():
        for one in ids.split(1):
            steps.append(theirs(one[None], cache=past, use_cache=True).logits[0])
    assert_close(ours, torch.cat(steps))


def test_ragged_batch(pair: tuple[Trunk, PreTrainedModel]) -> None:
    """Requests of different lengths, in rows out of order, decoded together with spans of different sizes."""
    trunk, theirs = pair
    prompts = [random_ids(n, seed=n) for n in (3, 41, 17, 29)]
    cache = trunk.ours.new_cache(6, 128, 64)
    rows = [cache.allocate() for _ in range(6)]
    rows = [rows[4], rows[0], rows[3], rows[1]]
    wanted = [their_logits(theirs, ids) for ids in prompts]
    taken = [0] * len(prompts)
    for sizes in ((1, 20, 5, 9), (1, 1, 1, 1), (1, 20, 4, 2), (0, 0, 7, 17)):
        spans = [(row, ids[at : at + n]) for row, ids, at, n in zip(rows, prompts, taken, sizes, strict=True) if n]
        logits = trunk.ours.logits(run(trunk.ours, cache, spans))
        assert_close(logits, torch.cat([w[at : at + n] for w, at, n in zip(wanted, taken, sizes, strict=True)]))
        taken = [at + n for at, n in zip(taken, sizes, strict=True)]
    assert taken == [len(ids) for ids in prompts]


def test_published_ratios_and_window(tmp_path: Path) -> None:
    """4 to 1, 128 to 1 and a window of 128, over three entries of the latter."""
    trunk = make_trunk(compress_ratios=[0, 4, 128], num_hidden_layers=3, sliding_window=128, index_topk=40)
    theirs, ids = theirs_of(trunk, tmp_path), random_ids(410)
    cache = trunk.ours.new_cache(1, 512, 256)
    row = cache.allocate()
    ours = run_chunks(trunk.ours, cache, row, ids, (100, 200, 5, 1, 1, 7))
    assert_close(ours, their_logits(theirs, ids))


def test_taps_are_the_mean_of_a_layers_streams(pair: tuple[Trunk, PreTrainedModel]) -> None:
    trunk, theirs = pair
    ids, layers = random_ids(30), trunk.ours.config.num_layers
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: kept.append(out[0])) for layer in theirs.model.layers]
    their_logits(theirs, ids)
    for hook in hooks:
        hook.remove()
    cache = trunk.ours.new_cache(1, 64, 64)
    row = cache.allocate()
    taps = []
    for part in ids.split([26, 4]):
        _, tapped = trunk.ours.forward(batch_of(cache, [(row, part)]), cache, (-1, 0, layers - 1))  # type: ignore[arg-type]
        taps.append(tapped)
    embedded = theirs.get_input_embeddings()(ids)
    assert_close(torch.cat(taps), torch.cat([embedded, kept[0].mean(1), kept[-1].mean(1)], dim=-1).detach())


def test_no_taps_without_being_asked(pair: tuple[Trunk, PreTrainedModel]) -> None:
    trunk, _ = pair
    cache = trunk.ours.new_cache(1, 16, 16)
    batch = ForwardBatch(random_ids(3), torch.arange(3), (cache.allocate(),), (0, 3))
    hidden, taps = trunk.ours.forward(batch, cache)
    assert taps is None and hidden.shape == (3, 64)


def test_bf16_stays_close(tmp_path: Path) -> None:
    trunk = make_trunk(compress_ratios=[0, 4, 8], num_hidden_layers=3, index_topk=512)
    from sparkchat.models.deepseek_v4.model import DeepseekV4
    from sparkchat.models.deepseek_v4.scope import TensorTable

    half = DeepseekV4(TensorTable(trunk.weights), trunk.ours.config, torch.device("cpu"), torch.bfloat16)
    assert half.config.dtype_name == "bfloat16"
    ids = random_ids(40)
    logits = []
    for model in (trunk.ours, half):
        cache = model.new_cache(1, 64, 64)
        logits.append(run_chunks(model, cache, cache.allocate(), ids, (30, 1)))
    error = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert error < 0.05
