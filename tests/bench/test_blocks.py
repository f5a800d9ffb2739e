"""What temperatures are fitted to, wherever it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.trace_sessions import Answer, ready
from sparkchat.bench.blocks import Blocks, blocks_of, read_blocks
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.trace import TraceWriter


def step(**changes: Any) -> dict[str, Any]:
    base = {
        "event": "step",
        "mode": "static",
        "verify_len": 3,
        "draft_ids": [5, 6, 7],
        "confidence_logit": [2.0, 1.0, -1.0],
        "correct_drafts": 1,
        "committed_ids": [5, 9],
        "cap_trim": 0,
    }
    return base | changes


def test_a_step_says_how_many_drafts_were_judged_and_accepted() -> None:
    compact = step(mode="compact", verify_len=2, cap_trim=None)
    capped = step(mode="cap-accept", correct_drafts=0, committed_ids=[5], cap_trim=2)
    found = blocks_of([step(), compact, capped], chat=4)
    assert (found.accepted, found.judged, found.chat) == ([1, 1, 2], [3, 2, 3], [4, 4, 4])
    assert found.logits == [[2.0, 1.0, -1.0]] * 3


@pytest.mark.parametrize(
    "useless",
    [
        {"confidence_logit": []},  # no confidence head
        {"confidence_logit": [2.0, None, -1.0]},  # no numbers
        {"committed_ids": [5]},  # cut by the end of the answer
        {"mode": "compact", "verify_len": 0, "committed_ids": [5], "correct_drafts": 0},
        {"mode": "off", "draft_ids": [], "confidence_logit": [], "committed_ids": [5], "correct_drafts": 0},
    ],
    ids=str,
)
def test_a_step_that_says_nothing_is_left_out(useless: dict[str, Any]) -> None:
    assert len(blocks_of([step(**useless)], chat=0)) == 0


def test_rows_are_padded_to_one_width() -> None:
    blocks = blocks_of([step(), step(draft_ids=[5], confidence_logit=[0.5], correct_drafts=1, verify_len=1)], chat=0)
    assert blocks.to_json()["logits"] == [[2.0, 1.0, -1.0], [0.5, 0.0, 0.0]]
    assert json.dumps(blocks.to_json(), allow_nan=False)
    assert Blocks().to_json() == {"logits": [], "accepted": [], "judged": [], "chat": [], "kind": []}


def write_trace(path: Path, seed: int) -> list[dict[str, Any]]:
    events = [ready(), *Answer(id="a", seed=seed, num_tokens=40).events(), *Answer(id="b", seed=seed + 1).events()]
    with TraceWriter(path) as writer:
        for event in events:
            assert writer.event(event) is None
    return events


def test_traces_are_read_as_their_events_and_keep_answers_apart(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.spark.jsonl" for n in range(2)]
    events = [write_trace(file, n) for n, file in enumerate(files)]
    blocks = read_blocks(files)
    direct = Blocks()
    for one in events:
        for name in ("a", "b"):
            direct.extend(blocks_of([e for e in one if e.get("id") == name], chat=0))
    assert len(blocks) > 20
    assert (blocks.logits, blocks.accepted, blocks.judged) == (direct.logits, direct.accepted, direct.judged)
    assert len(set(blocks.chat)) == 4


def test_blocks_know_how_their_answer_was_sampled_at_that_step(tmp_path: Path) -> None:
    file = tmp_path / "t.spark.jsonl"
    write_trace(file, 3)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    turns = {line["turn"]: line for line in lines if line["type"] == "turn"}
    assert len(turns) == 2
    turns[0]["sampling"] = {"temperature": 0.7, "top_p": 1.0}
    turns[1]["sampling"] = {"temperature": 0.0}
    steps = [n for n, line in enumerate(lines) if line["type"] == "step" and line["turn"] == 1]
    changed = {"temperature": {"from": 0.0, "to": 1.0}, "top_p": {"from": 1.0, "to": 0.9}}
    lines.insert(
        steps[len(steps) // 2],
        {"schema": lines[0]["schema"], "type": "setting_change", "turn": 1, "id": "b", "changes": changed},
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds = dict.fromkeys(zip((blocks := read_blocks([file])).chat, blocks.kind, strict=True))
    assert set(kinds) == {(0, "warm"), (1, "greedy"), (1, "hot-filtered")}


def test_what_training_leaves_behind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "confidence-t0.7.npz"
    logits = np.array([[1.0, 2.0], [3.0, -1.0], [np.nan, 0.0], [0.5, 0.25]], dtype=np.float32)
    accepted = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], dtype=bool)
    counted = np.array([[1, 1], [1, 1], [1, 1], [1, 0]], dtype=bool)
    np.savez_compressed(path, logits=logits, accepted=accepted, counted=counted)
    blocks = read_blocks([path])
    assert (blocks.accepted, blocks.judged) == ([2, 1, 1], [2, 2, 1])
    assert blocks.logits == [[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]]


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not there"):
        read_blocks([tmp_path / "x.npz"])
    (tmp_path / "y.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(DamagedFile, match=r"y\.npz"):
        read_blocks([tmp_path / "y.npz"])
    np.savez_compressed(tmp_path / "z.npz", logits=np.zeros((2, 2)))
    with pytest.raises(DamagedFile, match=r"z\.npz"):
        read_blocks([tmp_path / "z.npz"])
    pickled = tmp_path / "p.npz"
    np.savez(pickled, logits=np.array([{}], dtype=object), accepted=np.zeros((1, 1)), counted=np.zeros((1, 1)))
    with pytest.raises(DamagedFile, match=r"p\.npz"):
        read_blocks([pickled])
