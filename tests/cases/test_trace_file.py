"""An exported session is strict JSON, its figures add up, and damage to it is found."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.harness import Finished, parse_strict, sparkchat
from fixtures import bigram, mix


def run_traced(trace: Path, target: Path, drafter: Path, *args: str) -> Finished:
    return sparkchat("run", target, "--drafter", drafter, "--prompt-ids", "301,302", "--json", "--trace", trace, *args)


def lines_of(trace: Path) -> list[dict[str, Any]]:
    return [parse_strict(line) for line in trace.read_text().splitlines()]


@pytest.mark.parametrize(
    ("mode", "args"),
    [
        ("static", ("--max-tokens", "1")),
        ("static", ("--max-tokens", "30", "--temperature", "1", "--top-k", "1", "--top-p", "0.1", "--seed", "4")),
        ("compact", ("--max-tokens", "30", "--temperature", "0.8", "--seed", "4")),
    ],
    ids=str,
)
def test_trace_holds_the_answer_and_verifies(
    mode: str, args: tuple[str, ...], tmp_path: Path, mix_folders: dict[str, Path]
) -> None:
    trace = tmp_path / "s.spark.jsonl"
    done = run_traced(trace, mix_folders["target"], mix_folders["half"], "--mode", mode, *args)
    assert done.code == 0, done.err
    result, lines = parse_strict(done.out), lines_of(trace)
    assert [line["type"] for line in lines][:2] == ["header", "turn"]
    assert lines[-1]["type"] == "end"
    assert lines[0]["schema"] == "sparkchat.trace/1"
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    steps = [line for line in lines if line["type"] == "step"]
    assert [i for s in steps for i in s["committed_ids"]] == result["token_ids"][1:]
    assert {s["mode_requested"] for s in steps} <= {mode}
    verified = sparkchat("trace", "verify", trace)
    assert verified.code == 0, verified.out + verified.err


def test_confidence_that_overflows_leaves_a_valid_trace(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    table = mix.mix_table()
    drafter = bigram.write_bigram_drafter(tmp_path / "d", table, bigram.BigramDrafter(), shape=mix.MIX_SHAPE)
    tensors = load_file(drafter / "model.safetensors")
    weight = tensors["confidence_head.proj.weight"]
    tensors["confidence_head.proj.weight"] = torch.where(torch.arange(weight.shape[1]) % 2 == 0, 1e30, -1e30)[None]
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    trace = tmp_path / "s.spark.jsonl"
    done = run_traced(trace, mix_folders["target"], drafter, "--mode", "compact", "--max-tokens", "20")
    assert done.code == 0, done.err
    assert len(parse_strict(done.out)["token_ids"]) == 20
    assert len(lines_of(trace)) > 3
    assert sparkchat("trace", "verify", trace).code == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, mix_folders: dict[str, Path]) -> Path:
    """A trace of 30 tokens; tests that change it work on copies."""
    trace = tmp_path_factory.mktemp("trace") / "s.spark.jsonl"
    done = run_traced(trace, mix_folders["target"], mix_folders["oracle"], "--mode", "static", "--max-tokens", "30")
    assert done.code == 0, done.err
    return trace


def test_trace_is_not_overwritten(recorded: Path, mix_folders: dict[str, Path]) -> None:
    before = recorded.read_bytes()
    again = run_traced(recorded, mix_folders["target"], mix_folders["oracle"], "--mode", "static", "--max-tokens", "5")
    assert again.code != 0
    assert str(recorded) in again.err
    assert recorded.read_bytes() == before


def test_tampering_is_found(recorded: Path, tmp_path: Path) -> None:
    trace, lines = tmp_path / "t.spark.jsonl", lines_of(recorded)
    step = next(line for line in lines if line["type"] == "step" and len(line["committed_ids"]) > 2)
    step["committed_ids"].pop()
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = sparkchat("trace", "verify", trace)
    assert found.code != 0
    assert "Traceback" not in found.err


def test_half_a_last_line_is_read_as_far_as_it_goes(recorded: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.spark.jsonl"
    trace.write_bytes(recorded.read_bytes()[:-40])
    summary = sparkchat("trace", "summary", trace)
    assert summary.code == 0, summary.err
    assert "Traceback" not in summary.err
    assert summary.out.strip()
