"""Any block length up to the checkpoint's own works as if trained for it; others are refused with both numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Runner, assert_same, open_runner, random_prompts
from fixtures import bigram, mix

OpenRunner = Callable[..., Runner]


@pytest.mark.parametrize("mode", MODES)
def test_shorter_blocks_accept_as_much_at_each_position(
    mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    opened = runner(mix_folders["target"], mix_folders["half"])
    blocks, prompts = (1, 2, 3, 4, 5), random_prompts(4, 50)
    results = opened.run(
        {"prompt_ids": p, "mode": mode, "block_size": block, "max_tokens": 80} for block in blocks for p in prompts
    )
    rates: dict[int, list[float | None]] = {}
    for n, block in enumerate(blocks):
        found = [r["speculation"] for r in results[n * len(prompts) : (n + 1) * len(prompts)]]
        assert all(len(s["accepted_at_pos"]) == len(s["verified_at_pos"]) == block for s in found)
        assert all(len(s["acceptance_histogram"]) == block + 1 for s in found)
        sums = [[sum(s[k][i] for s in found) for i in range(block)] for k in ("verified_at_pos", "accepted_at_pos")]
        rates[block] = [a / v if v >= 40 else None for v, a in zip(*sums, strict=True)]
    compared = 0
    for block in (1, 2, 3, 4):
        for ours, full in zip(rates[block], rates[5], strict=False):
            if ours is not None and full is not None:
                compared += 1
                assert ours > 0.8 * full - 0.1, f"block {block}: {rates[block]} against {rates[5]}"
    assert compared >= 4


@pytest.mark.parametrize("block", [6, 8, 16])
def test_longer_blocks_are_refused_with_both_numbers_or_change_nothing(
    block: int, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    target = mix_folders["target"]
    opened = runner(target, mix_folders["oracle"])
    prompts = random_prompts(2, 20)
    plain = opened.ids({"prompt_ids": p, "mode": "off", "max_tokens": 40} for p in prompts)
    results = opened.run({"prompt_ids": p, "mode": "static", "block_size": block, "max_tokens": 40} for p in prompts)
    for result in results:
        if result["finish_reason"] == "error":
            assert str(block) in result["error"]
            assert "5" in result["error"]
    if results[0]["finish_reason"] != "error":
        assert_same(target, prompts, [r["token_ids"] for r in results], plain)


def test_refused_block_leaves_the_others_of_the_batch_alone(mix_folders: dict[str, Path], runner: OpenRunner) -> None:
    opened = runner(mix_folders["target"], mix_folders["oracle"])
    good = {"prompt_ids": [301, 302], "mode": "static", "max_tokens": 20}
    results = opened.run([good, {**good, "block_size": 16}, {**good, "block_size": 2}])
    assert results[0]["token_ids"] == results[2]["token_ids"] != []


def edited_drafter(folder: Path, changes: dict[str, Any]) -> Path:
    table = mix.mix_table()
    drafter = bigram.BigramDrafter(config_changes=changes)
    return bigram.write_bigram_drafter(folder, table, drafter, shape=mix.MIX_SHAPE)


def test_block_size_missing_from_the_checkpoint_is_named(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import SparkchatError

    drafter = edited_drafter(tmp_path / "d", {"block_size": None})
    assert "block_size" not in json.loads((drafter / "config.json").read_text())
    with pytest.raises(SparkchatError, match="block_size"):
        open_runner(mix_folders["target"], drafter)


def test_block_size_may_be_spelled_the_other_way(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    drafter = edited_drafter(tmp_path / "d", {"block_size": None, "dspark_block_size": 5})
    opened = open_runner(mix_folders["target"], drafter)
    assert opened.engine.info["block_size"] == 5


def test_block_size_of_the_load_is_the_default_of_requests(mix_folders: dict[str, Path]) -> None:
    opened = open_runner(mix_folders["target"], mix_folders["oracle"], block_size=3)
    result = opened.run([{"prompt_ids": [301], "mode": "static", "max_tokens": 20}])[0]
    assert len(result["speculation"]["proposed_at_pos"]) == 3
