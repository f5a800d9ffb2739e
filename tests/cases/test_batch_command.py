"""``sparkchat batch`` and ``run --json`` as a script meets them: exit codes, lines in and out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.harness import ROOT, Runner, batch, parse_strict, random_prompts, sparkchat
from fixtures import bigram, tape
from fixtures.profiles import write_profile

OpenRunner = Callable[..., Runner]
MODES = ("off", "static", "compact", "cap-accept")


def test_every_mode_gives_the_tokens_that_an_engine_gives_and_ids_are_echoed(
    mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    target, drafter = mix_folders["window"], mix_folders["half"]
    echoed = ["a", 7, None, {"x": [1]}, "a", 1.5, True, ""]
    lines = [
        {"id": i, "prompt_ids": p, "mode": MODES[n % 4], "block_size": 1 + n % 5, "max_tokens": 30}
        for n, (i, p) in enumerate(zip(echoed, random_prompts(8, 40), strict=True))
    ]
    done = batch(target, lines, "--drafter", drafter, "--concurrency", "3", afresh=True)
    assert (done.code, done.err.count("Traceback")) == (0, 0)
    assert [r["id"] for r in done.records] == echoed
    assert [r["mode"] for r in done.records] == [line["mode"] for line in lines]
    plain = [{**line, "id": f"p{n}", "mode": "off", "block_size": None} for n, line in enumerate(lines)]
    assert [r["token_ids"] for r in done.records] == runner(target, drafter).ids(plain)
    assert {r["schema"] for r in done.records} == {"sparkchat.result/1"}


BAD_LINES: list[Any] = [
    "{",
    "[]",
    "null",
    '"x"',
    "12",
    '{"prompt_ids": [301], "max_tokens": NaN}',
    {"max_tokens": 3},
    {"prompt": "x", "prompt_ids": [301]},
    {"prompt_ids": [301], "max_tokens": 0},
    {"prompt_ids": [301], "max_tokens": "three"},
    {"prompt_ids": [301], "temperature": -1},
    {"prompt_ids": [301], "block_size": 0},
    {"prompt_ids": [301], "block_size": "abc"},
    {"prompt_ids": [301], "mode": "fast"},
    {"prompt_ids": [301], "tempreature": 1.0},
    {"prompt_ids": []},
    {"prompt_ids": [99999]},
    {"prompt_ids": [-1]},
    {"prompt_ids": ["a"]},
    {"prompt_ids": [True]},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": "hi"},
    {"messages": ["hi"]},
    {"messages": [{"role": "user", "content": 5}]},
    {"prompt": 5},
    {"prompt_ids": [301], "stop": [""]},
    "[" * 100_000,
    '{"prompt": "\\ud800"}',
]


def test_bad_lines_give_error_results_in_their_place(mix_folders: dict[str, Path]) -> None:
    good = {"id": "good", "prompt_ids": [301, 302], "max_tokens": 5}
    lines = [line for bad in BAD_LINES for line in (bad, good)]
    done = batch(mix_folders["target"], lines, "--drafter", mix_folders["oracle"])
    assert done.code == 0
    assert "Traceback" not in done.err
    records = done.records
    assert len(records) == len(lines)
    expected = records[1]["token_ids"]
    assert len(expected) == 5
    for bad, refused, answered in zip(BAD_LINES, records[0::2], records[1::2], strict=True):
        assert refused["finish_reason"] == "error", bad
        assert refused["error"], bad
        assert "\n" not in refused["error"]
        assert refused["token_ids"] == []
        assert (answered["id"], answered["token_ids"], answered["error"]) == ("good", expected, None)
    named = {"tempreature": "temperature", "fast": "static"}
    for asked, hint in named.items():
        said = [r["error"] for b, r in zip(BAD_LINES, records[0::2], strict=True) if asked in json.dumps(b)]
        assert all(hint in text for text in said)


def test_invalid_utf8_is_one_bad_line(mix_folders: dict[str, Path]) -> None:
    good = json.dumps({"id": 1, "prompt_ids": [301], "max_tokens": 2}).encode()
    given = b'{"prompt": "\xff\xfe"}\n' + good + b"\n\n" + good
    done = sparkchat("batch", mix_folders["target"], "--drafter", "none", stdin=given)
    assert done.code == 0, done.err
    assert [r["finish_reason"] for r in done.records] == ["error", "length", "length"]


def test_lines_are_answered_while_input_stays_open(mix_folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "sparkchat", "batch", str(mix_folders["target"]), "--drafter", "none"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(3):
        process.stdin.write(json.dumps({"id": n, "prompt_ids": [301], "max_tokens": 3}) + "\n")
        process.stdin.flush()
        assert parse_strict(process.stdout.readline())["id"] == n
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (("--block-size", "0"), 2, "block"),
        (("--block-size", "-1"), 2, "block"),
        (("--block-size", "abc"), 2, "abc"),
        (("--mode", "fast"), 2, "fast"),
        (("--max-tokens", "0"), 2, "max"),
        (("--no-such-option",), 2, "no-such-option"),
        (("--drafter", "/no/such/folder"), 3, "/no/such/folder"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(
    args: tuple[str, ...], code: int, named: str, mix_folders: dict[str, Path]
) -> None:
    drafter = () if "--drafter" in args else ("--drafter", str(mix_folders["oracle"]))
    done = sparkchat("run", mix_folders["target"], *drafter, *args, "--json", "hello")
    assert done.code == code, done.err
    assert named in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_damaged_weights_end_with_code_6_and_one_line(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for path in mix_folders["target"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[: 10_000 if path.suffix == ".safetensors" else None])
    done = batch(folder, [{"prompt_ids": [301]}], "--drafter", "none")
    assert done.code == 6
    assert len(done.err.strip().splitlines()) == 1
    assert "model.safetensors" in done.err
    assert done.out == ""


def test_profile_gives_model_drafter_cost_table_and_mode(mix_folders: dict[str, Path]) -> None:
    where = parse_strict(sparkchat("paths", "--json").out)
    profile = Path(where["profiles"]) / "mine.toml"
    # Rows beyond the first cost so much that nothing is worth verifying.
    write_profile(
        profile,
        mix_folders["target"],
        mix_folders["oracle"],
        rows=[1, 2, 6],
        step_ms=[1.0, 500.0, 1000.0],
        temperatures=[1.0] * 5,
        mode="compact",
    )
    line = {"prompt_ids": [301], "max_tokens": 12}
    results = batch("mine", [line, {**line, "mode": "static"}]).records
    compact, static = results
    assert compact["token_ids"] == static["token_ids"]
    assert (compact["mode"], static["mode"]) == ("compact", "static")
    assert compact["speculation"]["num_verified_draft_tokens"] == 0
    assert compact["speculation"]["num_steps"] == 11
    assert static["speculation"]["num_steps"] < 11


def test_one_answer_is_text_json_or_events(tmp_path: Path) -> None:
    played = tape.one_tape(b"Hi ", b"\xf0\x9f", b"\x91\x8b", b" there", b"\n")
    target = tape.write_tape(tmp_path / "tape", played)
    drafter = bigram.write_bigram_drafter(tmp_path / "d", played.table(), bigram.BigramDrafter())
    text = "Hi 👋 there\n"
    shared = ("run", target, "--drafter", drafter, "--mode", "static")
    plain = sparkchat(*shared, "hello")
    assert (plain.code, plain.out) == (0, text)
    result = parse_strict(sparkchat(*shared, "--json", "hello").out)
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    assert result["token_ids"] == list(played.ids[0])
    events = sparkchat(*shared, "--jsonl", "hello").records
    kinds = [e["event"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert "".join(e["text"] for e in events if e["event"] == "delta") == text
    assert [i for e in events if e["event"] == "delta" for i in e["token_ids"]] == result["token_ids"]
    refused = sparkchat(*shared, "--json", "--prompt-ids", "99999")
    assert refused.code == 2  # the engine's refusal of what was typed
    assert refused.err.count("\n") == 1
    assert "99999 is not a token" in refused.err
    assert parse_strict(refused.out)["finish_reason"] == "error"
