"""A model that several ranks share is the model: the same logits, the same tokens, a part of the weights each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.harness import Runner, open_runner
from fixtures.deepseek_v4 import (
    parsed,
    random_weights,
    stored_weights,
    v4_config,
    write_json,
    write_shards,
    write_tiny_v4,
)
from models.deepseek_v4.trunks import random_ids
from models.pairs import assert_close
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models import ForwardBatch

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FEW: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 16],
    "dspark_target_layer_ids": [0, 1, 2],
    "hc_sinkhorn_iters": 2,
}
MODES = ("off", "static", "compact", "cap-accept")
LENGTHS = (3, 18, 37, 40)
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(build_once: Build) -> Path:
    return build_once("v4-ranks", lambda path: write_tiny_v4(path, **FEW))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Runner:
    runner = open_runner(folder, folder, context=80)
    # Captured steps plan so, and plans decide which numbers are drawn.
    runner.engine.pair.is_lagged = True
    return runner


class Teams:
    """One runner over ranks at a time: a process can be in one group."""

    def __init__(self) -> None:
        self.key: tuple[Path, int] | None = None
        self.runner: Runner | None = None

    def open(self, folder: Path, size: int) -> Runner:
        if self.runner is None or self.key != (folder, size):
            self.close()
            self.key, self.runner = (folder, size), open_runner(folder, folder, context=80, tp=size)
            # As on GPUs.
            self.runner.engine.pair.is_lagged = size == 2
        return self.runner

    def close(self) -> None:
        if self.runner is not None:
            self.runner.engine.pair.team.close()
        self.runner = None


@pytest.fixture(scope="module")
def teams() -> Iterator[Teams]:
    """Two ranks in captured steps, as on GPUs, four without. A rank that ends raises here instead of ending us."""
    teams = Teams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkchat.engine.loading.wants_capture", lambda spec, device: spec.tp == 2)
        patch.setattr("sparkchat.engine.ranks.end_process", lambda reason: None)
        yield teams
        teams.close()


@pytest.fixture(scope="module", params=[4, 2])
def shared(request: pytest.FixtureRequest, folder: Path, teams: Teams) -> Runner:
    return teams.open(folder, request.param)


def requests(**options: Any) -> list[dict[str, Any]]:
    """One for each mode, side by side."""
    prompts = [(random_ids(n, seed=n) + 2).tolist() for n in LENGTHS]
    settings = {"max_tokens": 14, "ignore_eos": True, **options}
    return [{"prompt_ids": prompt, "mode": mode, **settings} for prompt, mode in zip(prompts, MODES, strict=True)]


def test_logits_and_taps_are_those_of_one_rank(shared: Runner, alone: Runner) -> None:
    ids, found = random_ids(40), []
    for runner in (alone, shared):
        target = runner.engine.pair.target
        cache = target.new_cache(1, 64, 32)
        row, rows = cache.allocate(), []
        with torch.inference_mode():
            for part in ids.split([25, 1, 6, 1, 7]):
                positions = torch.arange(cache.length(row), cache.length(row) + len(part))
                batch = ForwardBatch(part, positions, (row,), (0, len(part)))
                hidden, taps = target.forward(batch, cache, (0, 2))
                rows.append(torch.cat([target.logits(hidden), taps], dim=-1))
        found.append(torch.cat(rows))
    assert_close(found[1], found[0], 1e-4)


def test_every_mode_gives_the_tokens_of_one_rank(shared: Runner, alone: Runner) -> None:
    assert shared.ids(requests()) == alone.ids([{**line, "mode": "off"} for line in requests()])


def test_captured_steps_run_where_they_are_wanted(shared: Runner) -> None:
    assert (shared.engine._captured is not None) == (shared.engine.pair.team.size == 2)


def test_seeded_sampling_gives_the_tokens_of_one_rank(folder: Path, teams: Teams, alone: Runner) -> None:
    shared, lines = teams.open(folder, 2), requests(temperature=0.8, seed=11, max_tokens=8)
    assert shared.ids(lines) == alone.ids(lines)


def test_conversations_go_on_and_back(folder: Path, teams: Teams) -> None:
    shared, text = teams.open(folder, 2), random_ids(30, seed=2).tolist()
    for turn in range(3):
        line = {"prompt_ids": text, "mode": "static", "max_tokens": 4, "ignore_eos": True}
        outcome = shared.run([{**line, "session": "s"}])[0]
        assert outcome["token_ids"] == shared.ids([line])[0]
        assert (outcome["usage"]["cached_tokens"] > 0) == (turn > 0)
        text = [*text, *outcome["token_ids"], 5] if turn == 0 else [*text[:-7], 7, 8]


def test_it_says_how_many_devices_share_it(shared: Runner) -> None:
    size = shared.engine.pair.team.size
    assert shared.engine.info["device"] == f"{size} x cpu"
    assert len(shared.engine.pair.team.pids) == size - 1


def test_the_previews_block_drafts_over_ranks(tmp_path: Path, teams: Teams) -> None:
    folder = write_tiny_v4(tmp_path, drafter="mtp", **{k: v for k, v in FEW.items() if "dspark" not in k})
    lines = [{**line, "mode": mode} for line, mode in zip(requests(max_tokens=8), ("static", "off") * 2, strict=True)]
    wanted = open_runner(folder, folder, context=80).ids([{**line, "mode": "off"} for line in lines])
    assert teams.open(folder, 2).ids([{**line, "block_size": n % 3 + 1} for n, line in enumerate(lines)]) == wanted


def test_large_vocabularies_draft_from_a_shortlist_over_ranks(tmp_path: Path, teams: Teams) -> None:
    folder = write_tiny_v4(tmp_path, vocab_size=4096, **FEW)
    line = {"prompt_ids": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
    wanted = open_runner(folder, context=80).ids([line])
    assert teams.open(folder, 2).ids([{**line, "mode": "static"}]) == wanted


def test_what_another_rank_finds_damaged_is_told_with_the_rank(tmp_path: Path, teams: Teams) -> None:
    teams.close()
    config = v4_config(**FEW)
    stored = stored_weights(parsed(config), random_weights(parsed(config)))
    stored["layers.1.attn.attn_sink"][-1] = torch.nan  # of the last head, which rank 0 does not read
    write_shards(tmp_path, parsed(config), stored)
    write_json(tmp_path / "config.json", config)
    with pytest.raises(DamagedFile, match=r"rank 1 of 2: .*layers\.1\.attn\.attn_sink holds NaN"):
        open_runner(tmp_path, tmp_path, context=80, tp=2)
    assert not torch.distributed.is_initialized()


def test_a_number_of_ranks_that_does_not_divide_is_refused(folder: Path, teams: Teams) -> None:
    teams.close()
    with pytest.raises(UsageError, match="3 devices cannot share the model's 4 attention heads"):
        open_runner(folder, folder, context=80, tp=3)
