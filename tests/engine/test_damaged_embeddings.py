"""A drafted token whose embedding is damaged ends an answer only where plain decoding would end it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cases.harness import MODES, Runner, open_runner
from engine.conftest import edited

ALL_MODES = ("off", *MODES)


def test_a_rejected_draft_with_a_damaged_embedding_harms_nothing(tiny_pair: Any, tiny: Runner, tmp_path: Path) -> None:
    lines = [
        {"prompt_ids": [301, 302], "mode": mode, "max_tokens": 24, "ignore_eos": True, "temperature": t, "seed": 4}
        for mode in ALL_MODES
        for t in (0.0, 1.0)
    ]
    sound = tiny.watch(lines)
    said = {token for outcome in sound for token in outcome.ids}
    drafted = [{token for step in outcome.steps for token in step["draft_ids"]} for outcome in sound]
    targets = sorted(set.union(*drafted) - said - {301, 302})
    spoilt = edited(tiny_pair.target, tmp_path / "t", lambda held: spoil_embeddings(held, targets))
    opened = open_runner(spoilt, tiny_pair.drafter, context=512, concurrency=4)
    assert opened.engine.pair.damaged_ids == set(targets)
    for healthy, outcome in zip(sound, opened.watch(lines), strict=True):
        assert outcome.result["error"] is None
        assert outcome.ids == healthy.ids
    assert any(step["verify_len"] for outcome in sound for step in outcome.steps if set(step["draft_ids"]) & {*targets})


def spoil_embeddings(held: dict[str, Any], tokens: list[int]) -> None:
    held["model.embed_tokens.weight"][tokens] = float("nan")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_accepted_draft_with_a_damaged_embedding_ends_the_answer_where_plain_decoding_ends(
    temperature: float, mix_folders: dict[str, Path], tmp_path: Path
) -> None:
    line = {"prompt_ids": [301], "max_tokens": 30, "ignore_eos": True, "temperature": temperature, "seed": 3}
    healthy = open_runner(mix_folders["target"], mix_folders["oracle"])
    (ids,) = healthy.ids([{**line, "mode": "off"}])
    bad = next(token for token in ids[12:] if token not in ids[:12])
    spoilt = edited(mix_folders["target"], tmp_path / "t", lambda held: spoil_embeddings(held, [bad]))
    opened = open_runner(spoilt, mix_folders["oracle"])
    outcomes = opened.watch({**line, "mode": mode, "seed": seed} for mode in ALL_MODES for seed in range(4))
    for outcome in outcomes:
        has_ended = outcome.result["finish_reason"] == "error"
        assert has_ended == (bad in outcome.ids)
        assert bad not in outcome.ids[:-1]
        if has_ended:
            assert "not numbers" in outcome.result["error"]
        if temperature == 0.0:
            assert outcome.ids == ids[: ids.index(bad) + 1]
    assert any(bad in outcome.ids for outcome in outcomes)
