"""Dummy weights: from configs alone, the same every time, numbers of a sensible size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.shapes import SHIPPED, write_shapes
from sparkchat.errors import UsageError
from sparkchat.models import load_drafter, load_target
from sparkchat.models.base import ForwardBatch
from sparkchat.models.dspark.config import read_drafter_config
from sparkchat.models.hf_config import parse_target, read_config

CPU = torch.device("cpu")


def logits_of(folder: Path) -> torch.Tensor:
    target = load_target(folder, device=CPU, dtype=torch.float32, is_dummy=True)
    load_drafter(folder / "drafter", target, device=CPU, dtype=torch.float32, is_dummy=True)
    cache = target.new_cache(1, 64, 64)
    row = cache.allocate()
    batch = ForwardBatch(torch.arange(20), torch.arange(20), (row,), (0, 20))
    return target.logits(target.forward(batch, cache)[0])


def test_dummy_weights_are_made_from_configs_alone(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path)
    logits = logits_of(folder)
    assert logits.isfinite().all()
    assert 0.01 < float(logits.std()) < 10.0
    assert torch.equal(logits, logits_of(folder))


def test_the_shipped_shapes_are_those_that_were_published() -> None:
    target = parse_target(SHIPPED, read_config(SHIPPED))
    drafter = read_drafter_config(SHIPPED / "drafter")
    d, i, layers, vocab = target.hidden_size, target.decoder.intermediate_size, target.num_layers, target.vocab_size
    weights = layers * (d * 6144 + 4096 * d + 3 * d * i) + 2 * vocab * d
    assert weights == pytest.approx(8.19e9, rel=0.001)
    assert (drafter.block_size, drafter.decoder.num_layers, drafter.markov_rank) == (7, 5, 256)
    assert drafter.target_layer_ids == (1, 9, 17, 25, 33)
    # A step reads all of it but the embedding table.
    assert 2 * (weights - vocab * d) == pytest.approx(15.137e9, rel=0.001)


def test_what_has_no_dense_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        load_target(tmp_path, device=CPU, is_dummy=True)
    folder = write_shapes(tmp_path / "gemma", architectures=["Gemma4ForConditionalGeneration"])
    with pytest.raises(UsageError, match="dummy weights are made for"):
        load_target(folder, device=CPU, is_dummy=True)
