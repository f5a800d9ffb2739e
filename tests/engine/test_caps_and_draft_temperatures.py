"""Options of single requests: a cap on what a step commits, and what drafts are drawn at."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cases.harness import Runner, chi_square_p, open_runner, to_request
from engine.conftest import P
from fixtures.bigram import VOCAB
from sparkchat.engine import shortlist
from sparkchat.errors import UsageError


@pytest.mark.parametrize(("cap", "graphs"), [(1, None), (2, None), (5, None), (9, None), (2, True)])
def test_a_cap_of_the_users_own_bounds_what_a_step_commits(
    cap: int, graphs: bool | None, mix_folders: dict[str, Path]
) -> None:
    """Also in steps of the captured form."""
    opened = open_runner(mix_folders["target"], mix_folders["oracle"], graphs=graphs)
    line = {"prompt_ids": [301, 302], "max_tokens": 60, "ignore_eos": True}
    plain, capped, other = opened.watch(
        [{**line, "mode": "off"}, {**line, "mode": "cap-accept", "accept_cap": cap}, {**line, "mode": "cap-accept"}]
    )
    assert capped.ids == other.ids == plain.ids
    most = max(len(step["committed_ids"]) for step in capped.steps)
    assert most == min(cap, 5) + 1
    assert all(step["verify_len"] == 5 for step in capped.steps)
    # The last step is capped by what may still be delivered.
    assert (sum(step["cap_trim"] for step in capped.steps[:-1]) > 0) == (cap < 5)
    assert {step["budget"] for step in capped.steps} == {None}


def test_a_cap_is_for_cap_accept(tiny: Runner) -> None:
    (event,) = tiny.engine.submit(to_request({"prompt_ids": [301], "mode": "compact", "accept_cap": 2}, 0))
    assert "mode cap-accept" in event["result"]["error"]
    with pytest.raises(UsageError, match="accept_cap"):
        to_request({"prompt_ids": [301], "accept_cap": 0}, 0)
    with pytest.raises(UsageError, match="draft_temperature"):
        to_request({"prompt_ids": [301], "draft_temperature": "hot"}, 0)


@pytest.mark.parametrize(("smallest", "count"), [(512, 30), (4096, 150)])
def test_an_adaptive_draft_temperature_changes_drafts_and_not_the_law(
    smallest: int, count: int, three_tokens: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting from shortlists (512) and from the whole vocabulary."""
    monkeypatch.setattr(shortlist, "SMALLEST_VOCABULARY", smallest)
    monkeypatch.setattr(shortlist, "SIZE", VOCAB - 1)
    opened = open_runner(*three_tokens, concurrency=64)
    assert shortlist.suits(opened.engine.pair) == (smallest == 512)
    temperature = 0.6
    law = [p ** (1 / temperature) for p in P]
    law = [p / sum(law) for p in law]
    probs: dict[str, set[float]] = {}
    for kind in ("target", "adaptive"):
        lines = [
            {"prompt_ids": [300], "max_tokens": 9, "ignore_eos": True, "temperature": temperature, "seed": n}
            | {"mode": "static", "draft_temperature": kind}
            for n in range(count)
        ]
        outcomes = opened.watch(lines)
        counts = Counter(token for outcome in outcomes for token in outcome.ids)
        assert chi_square_p([counts[300 + i] for i in range(3)], law) > 1e-4
        probs[kind] = {round(q, 6) for o in outcomes for s in o.steps for q in s["draft_prob"]}
    assert len(probs["target"] - probs["adaptive"]) > 3


def test_greedy_requests_draft_greedily_whatever_the_draft_temperature(tiny: Runner) -> None:
    line = {"prompt_ids": [301, 302], "max_tokens": 30, "ignore_eos": True, "mode": "static"}
    target, adaptive = tiny.watch([line, {**line, "draft_temperature": "adaptive"}])
    assert adaptive.ids == target.ids
    assert [s["draft_ids"] for s in adaptive.steps] == [s["draft_ids"] for s in target.steps]
