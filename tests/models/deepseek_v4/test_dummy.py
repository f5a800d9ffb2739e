"""Made-up weights: the published forms, the same model over any number of ranks, tokens that modes agree on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cases.harness import open_runner
from fixtures.deepseek_v4 import TINY_SIZES, full_layout, parsed, v4_config, write_json
from models.deepseek_v4.trunks import CPU
from sparkchat.models.deepseek_v4.dummy import DummyCheckpoint
from sparkchat.models.deepseek_v4.formats import ScaledWeight, Stored
from sparkchat.models.deepseek_v4.load_plan import packed_bytes
from sparkchat.models.deepseek_v4.loading import read_v4_config
from sparkchat.models.deepseek_v4.weights import split_axis
from sparkchat.paths import user_paths

CONFIG = v4_config({**TINY_SIZES, "hc_sinkhorn_iters": 2})


@dataclass(frozen=True)
class Place:
    """A rank that says nothing to others."""

    rank: int
    size: int


def plain(weight: Stored) -> torch.Tensor:
    return weight.dense() if isinstance(weight, ScaledWeight) else weight


def nbytes(source: DummyCheckpoint, names: list[str]) -> int:
    return sum(source.take(name).nbytes for name in names)


def test_ranks_hold_parts_of_one_model_in_the_published_forms() -> None:
    config = parsed(CONFIG)
    layout = full_layout(config)
    whole = DummyCheckpoint(config, layout, CPU)
    assert nbytes(whole, list(layout)) == packed_bytes(layout)
    parts = [DummyCheckpoint(config, layout, CPU, Place(rank, 2)) for rank in (0, 1)]  # type: ignore[arg-type]
    assert nbytes(parts[1], list(layout)) == packed_bytes(layout, 1, 2)
    for name in layout:
        found, axis = [plain(part.take(name)) for part in parts], split_axis(name)
        joined = found[0] if axis is None else torch.cat(found, dim=axis)
        assert torch.equal(joined, plain(whole.take(name))), name
        assert axis is not None or torch.equal(*found)


@pytest.mark.parametrize("drafter", ["dspark", "mtp"])
def test_modes_agree_on_what_a_made_up_model_says(drafter: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", v4_config({**TINY_SIZES, "hc_sinkhorn_iters": 2}, drafter=drafter))
    runner = open_runner(tmp_path, tmp_path, context=80, dummy_weights=True)
    line = {"prompt_ids": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}
    off, static = runner.ids([{**line, "mode": mode} for mode in ("off", "static")])
    assert off == static and len(set(off)) > 1
    assert any("random" in notice for notice in runner.engine.info["notices"])


def test_the_shipped_shapes_are_those_of_the_release() -> None:
    config = read_v4_config(user_paths().shipped_shapes / "deepseek-v4-flash")
    assert packed_bytes(full_layout(config)) == 166_878_536_440
