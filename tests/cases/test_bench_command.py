"""``sparkchat bench`` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.harness import parse_strict, sparkchat
from fixtures.profiles import write_profile

ARMS = ["off", "static", "compact", "compact-no-table", "cap-accept"]


def test_every_arm_is_timed_at_every_concurrency(mix_folders: dict[str, Path], tmp_path: Path) -> None:
    # Steps that cost nearly the same: what compact plans does not depend on this machine.
    profile = Path(parse_strict(sparkchat("paths", "--json").out)["profiles"]) / "mine.toml"
    write_profile(
        profile,
        mix_folders["target"],
        mix_folders["oracle"],
        rows=[1, 6, 12],
        step_ms=[1.0, 1.1, 1.2],
        temperatures=[1.0] * 5,
        mode="compact",
    )
    options = ("--prompts", "2", "--tokens", "32", "--concurrency", "2,1", "--out", tmp_path, "--context", "400")
    done = sparkchat("bench", "mine", *options, "--temperature", "0", "--seconds", "0")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[1].split()[:2] == ["TOGETHER", "ARM"]
    assert [line.split()[1] for line in lines[2:-2]] == ARMS * 2
    assert [line.split(":")[0] for line in lines[-2:]] == ["1 together", "2 together"]
    assert all("of the best fixed length" in line and "predicted" in line for line in lines[-2:])
    report = parse_strict((tmp_path / "bench.json").read_text())
    assert (report["schema"], report["arms"]) == ("sparkchat.bench/1", ARMS)
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    assert (tmp_path / "bench.png").exists() or "PNG" in done.err
    assert [(row["concurrency"], row["arm"]) for row in report["results"]] == [(n, arm) for n in (1, 2) for arm in ARMS]
    assert {name: found["difference"] for name, found in report["equality"].items()} == dict.fromkeys(ARMS[1:])
    for row in report["results"]:
        # Two rounds; the first step of each is where the time begins. The first request may be ahead of the second.
        assert row["arm"] != "off" or 0.8 <= row["tokens"] / (2 * 30 * row["concurrency"]) <= 1.0
        assert (row["rounds"], row["together"], row["expected_tokens"]) == (2, row["concurrency"], None)
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["tokens_per_second"] > 0
        assert row["speed_up"] > 0
        assert (row["acceptance_length"] > 1.5) == (row["arm"] != "off")
        assert (row["step_time_error"] is not None) == (row["arm"] == "compact")
    assert {(found["requests"], found["arm"]) for found in report["step_times"]} == {(1, "compact"), (2, "compact")}
    assert report["tokens_by"] == "drawn"
    assert (report["cost_table"]["source"], report["cost_table"]["rows"]) == ("profile", [1, 6, 12])
    assert [(bar["concurrency"], bar["fixed_arms"]) for bar in report["bars"]] == [
        (n, ["off", "static"]) for n in (1, 2)
    ]
    by_arm = {row["arm"]: row for row in report["results"] if row["concurrency"] == 1}
    assert by_arm["static"]["trimmed_rows"] == 0
    assert by_arm["off"]["speed_up"] == 1.0


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--concurrency", "1,x"), "--concurrency '1,x'"),
        (("--concurrency", "0"), "--concurrency '0'"),
        (("--tokens", "1"), "--tokens"),
        (("--seconds", "nan"), "--seconds nan"),
        (("--out", "/dev/null/x"), "no folder"),
    ],
)
def test_what_cannot_be_timed_is_refused(args: tuple[str, ...], word: str, mix_folders: dict[str, Path]) -> None:
    done = sparkchat("bench", mix_folders["target"], "--drafter", mix_folders["half"], "--context", "400", *args)
    assert (done.code, done.out) == (2, "")
    assert word in done.err
    assert done.err.count("\n") == 1
