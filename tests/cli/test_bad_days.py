"""A hub that lies, stalls, throttles or forbids; proxies; caches that are shared; a disk that is full."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import Cli, child_environment, command, model_files, wait_for
from cli.mock_hub import GOOD_TOKEN, Hub, Repo, start_hub
from cli.test_hub import parts, pulled
from sparkchat.catalog import parse_hub_name
from sparkchat.cli.progress import STALL_SECONDS, LineProgress, Meter, _StallWatch, describe_transfer
from sparkchat.paths import user_paths
from sparkchat.snapshot import cached, repo_folder

WEIGHTS = "model.safetensors"


def test_a_throttled_listing_has_its_own_message(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].busy, hub.repos["org/model"].retry_after = [429] * 9, 300
    done = main("pull", "hf:org/model")
    assert done.code == 69
    assert "limits how often" in done.error and "wait 300 s" in done.error and "HF_TOKEN" in done.error
    assert sum(path.startswith("/api/models/") for _, path, _ in hub.requests) == 1


def test_a_throttled_file_is_waited_for_as_asked(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].busy_files, hub.repos["org/model"].retry_after = [429, 503], 1
    start = time.monotonic()
    done = main("pull", "hf:org/model")
    assert done.code == 0
    assert time.monotonic() - start >= 2
    assert "answers with error 429; asking again in 1 s" in done.err


def test_a_file_that_stays_throttled_ends_with_what_to_do(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].busy_files, hub.repos["org/model"].retry_after = [429] * 9, 0
    done = main("pull", "hf:org/model")
    assert (done.code, "limits how often" in done.err.splitlines()[-1]) == (69, True)


def test_trouble_of_the_hub_is_told_apart_from_a_throttle(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].busy, hub.repos["org/model"].retry_after = [503] * 9, 0
    done = main("pull", "hf:org/model")
    assert (done.code, "trouble of its own (error 503" in done.error) == (69, True)


@pytest.mark.parametrize(("token", "words"), [(None, "log in"), (GOOD_TOKEN, "lacks the right")])
def test_a_forbidden_repository_is_no_missing_one(
    main: Cli, hub: Hub, token: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.repos["org/model"].forbidden = True
    done = main("pull", "hf:org/model")
    assert done.code == 77
    assert "forbids reading hf:org/model" in done.error and words in done.error


def test_a_request_for_access_that_is_not_answered_yet(main: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_known_without_access")
    hub.repos["org/model"] = Repo(model_files(), gated=True, awaits_review=True)
    done = main("pull", "hf:org/model")
    assert (done.code, "awaits its owner's answer" in done.error) == (77, True)


def test_more_bytes_than_announced_are_refused_at_once(main: Cli, hub: Hub, own_folders: Path) -> None:
    hub.repos["org/model"].announced[WEIGHTS] = 1000
    done = main("pull", "hf:org/model")
    assert (done.code, "sends more of model.safetensors" in done.err) == (6, True)
    assert not list((own_folders / "hf").rglob(WEIGHTS))


def test_fewer_bytes_than_announced_end_after_a_few_tries(main: Cli, hub: Hub, own_folders: Path) -> None:
    repo = hub.repos["org/model"]
    repo.announced[WEIGHTS] = len(repo.files[WEIGHTS]) + 1
    done = main("pull", "hf:org/model")
    assert (done.code, "although the hub announced" in done.err.splitlines()[-1]) == (6, True)
    assert len(hub.ranges(WEIGHTS)) == 4
    assert parts(own_folders) == []
    assert not list((own_folders / "hf").rglob(WEIGHTS))


def test_a_byte_too_few_below_a_right_header_is_asked_for_again(main: Cli, hub: Hub) -> None:
    repo = hub.repos["org/model"]
    repo.short[WEIGHTS] = 1
    assert main("pull", "hf:org/model").code == 69
    repo.short.clear()
    hub.requests.clear()
    assert (pulled(main) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert hub.ranges(WEIGHTS) == [f"bytes={len(repo.files[WEIGHTS]) - 1}-"]


def test_another_range_than_asked_for_is_never_appended(main: Cli, hub: Hub, own_folders: Path) -> None:
    repo = hub.repos["org/model"]
    repo.cut_after[WEIGHTS], repo.shifted = [100_000], True
    done = main("pull", "hf:org/model")
    assert (done.code, "another part of the file" in done.err.splitlines()[-1]) == (69, True)
    assert [p.stat().st_size for p in parts(own_folders)] == [100_000]


def test_a_part_that_was_spoiled_on_disk_is_fetched_afresh(main: Cli, hub: Hub, own_folders: Path) -> None:
    repo = hub.repos["org/model"]
    repo.cut_after[WEIGHTS] = [100_000, *[0] * 9]
    assert main("pull", "hf:org/model").code == 69
    repo.cut_after.clear()
    (part,) = parts(own_folders)
    part.write_bytes(bytes(100_000))
    assert (pulled(main) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


def test_a_file_that_changes_between_two_tries_of_one_run_is_no_mixture(main: Cli, hub: Hub, own_folders: Path) -> None:
    repo = hub.repos["org/model"]
    repo.cut_after[WEIGHTS] = [100_000]
    repo.changes_to[WEIGHTS] = repo.files[WEIGHTS][:-1000] + bytes(1000)
    done = main("pull", "hf:org/model")
    assert (done.code, "wrong checksum" in done.err) == (6, True)
    assert not list((own_folders / "hf").rglob(WEIGHTS)) and parts(own_folders) == []
    assert (pulled(main) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


def test_a_token_goes_to_the_hub_and_not_where_it_sends_us(
    main: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    other, server = start_hub({"org/model": hub.repos["org/model"]})
    try:
        hub.repos["org/model"].blobs_at = None
        other.repos["org/model"] = Repo(hub.repos["org/model"].files)
        hub.repos["org/model"].blobs_at = other.url.replace("127.0.0.1", "localhost")
        assert (pulled(main) / WEIGHTS).read_bytes() == other.repos["org/model"].files[WEIGHTS]
    finally:
        server.shutdown()
        server.server_close()
    assert {token for _, token in hub.tokens} == {GOOD_TOKEN}
    assert other.tokens and {token for _, token in other.tokens} == {None}


def test_a_proxy_is_used(cli: Cli, hub: Hub) -> None:
    """The mock hub stands in for the proxy: a request by way of one names the whole address."""
    env = {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": hub.url, "http_proxy": hub.url, "NO_PROXY": ""}
    done = cli("pull", "hf:org/model", "--json", env=env)
    assert done.code == 0, done.err
    assert hub.ranges(WEIGHTS) == [None]


def test_a_proxy_that_does_not_answer_is_named_without_its_password(cli: Cli) -> None:
    proxy = "http://me:geheim@127.0.0.1:9"
    env = {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": ""}
    done = cli("pull", "hf:org/model", env=env)
    assert done.code == 69
    assert "the proxy http://127.0.0.1:9" in done.error and "geheim" not in done.err


def test_a_connection_that_brings_nothing_is_given_up_and_the_file_asked_for_again(cli: Cli, hub: Hub) -> None:
    hub.repos["org/model"].hold = hold = threading.Event()

    def let_go() -> None:
        deadline = time.monotonic() + 30
        while len(hub.ranges("config.json")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        hold.set()

    threading.Thread(target=let_go, daemon=True).start()
    done = cli("pull", "hf:org/model", env={"HF_HUB_DOWNLOAD_TIMEOUT": "1"})
    assert done.code == 0, done.err
    assert len(hub.ranges("config.json")) > 1


def test_the_stall_notice_comes_once_for_each_silence(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    watch = _StallWatch(LineProgress(), lambda: now[0])
    watch.update("it", 10, 100)
    watch.close()
    for moment, notices in ((STALL_SECONDS - 0.1, 0), (STALL_SECONDS, 1), (60.0, 1)):
        now[0] = moment
        watch.look()
        assert capsys.readouterr().err.count("nothing has come of it") == (notices if moment != 60.0 else 0)
    watch._thread = threading.Thread()  # no second watcher
    watch.update("it", 20, 100)
    now[0] += STALL_SECONDS
    watch.look()
    assert "still waiting" in capsys.readouterr().err
    watch.update("it", 100, 100)
    now[0] += 100
    watch.look()
    assert "nothing has come" not in capsys.readouterr().err


def test_rate_and_time_left_are_those_of_the_last_seconds() -> None:
    meter = Meter()
    assert describe_transfer("x", 0, 100, meter) == "fetching x: 0 B of 100 B"
    for second in range(61):
        meter.add(float(second), second * 1_000_000 if second < 40 else 40_000_000 + (second - 40) * 2_000_000)
    assert meter.rate() == 2_000_000
    text = describe_transfer("x", 80_000_000, 800_000_000, meter)
    assert text == "fetching x: 80.0 MB of 800.0 MB, 2.0 MB/s, 6 min left"
    meter.add(61.0, 0)
    assert meter.rate() is None
    assert describe_transfer("x", 5, None, Meter()) == "fetching x: 5 B"


def test_a_pull_without_a_terminal_says_rate_and_time_left(
    main: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.cli.progress._SECONDS_BETWEEN_LINES", 0.3)
    hub.repos["org/model"].slow = 0.2
    done = main("pull", "hf:org/model")
    assert any("/s, " in line and line.endswith(" left") for line in done.err.splitlines()), done.err


def test_caches_of_their_own_with_one_hub_cache_share_the_work(hub: Hub, tmp_path: Path) -> None:
    hold = hub.repos["org/model"].hold = threading.Event()

    def start(name: str) -> subprocess.Popen[str]:
        env = child_environment(XDG_CACHE_HOME=str(tmp_path / name))
        return subprocess.Popen(
            command("pull", "hf:org/model"), env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )

    first = start("one")
    wait_for(lambda: hub.ranges("config.json"))
    second = start("two")
    assert "another sparkchat is fetching" in second.stderr.readline()
    refused = subprocess.run(
        command("rm", "hf:org/model"), env=child_environment(), capture_output=True, text=True, check=False
    )
    assert (refused.returncode, "stop it first" in refused.stderr) == (1, True)
    hold.set()
    assert [run.wait(40) for run in (first, second)] == [0, 0]
    assert len(hub.ranges(WEIGHTS)) == 1


def test_rm_keeps_other_revisions_and_bytes_they_share(main: Cli, hub: Hub) -> None:
    repo = hub.repos["org/model"]
    old = pulled(main)
    repo.commit, repo.files["config.json"] = "b" * 40, b'{"model_type": "qwen3"}'
    assert main("pull", f"hf:org/model@{repo.commit}").code == 0
    assert main("rm", "hf:org/model").code == 0
    assert not old.exists()
    paths, source = user_paths(), parse_hub_name(f"hf:org/model@{repo.commit}")
    kept = cached(source, paths)
    assert kept is not None and (kept / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    blobs = list((repo_folder(source, paths) / "blobs").iterdir())
    assert len(blobs) == 3
    assert main("verify", f"hf:org/model@{repo.commit}").code == 0


@pytest.mark.parametrize("missing", ["config.json", WEIGHTS])
def test_a_snapshot_that_another_tool_began_is_completed(main: Cli, hub: Hub, missing: str) -> None:
    folder = pulled(main)
    (folder / missing).unlink()
    assert main("run", "--offline", "hf:org/model", "hi").code == 3
    assert pulled(main) == folder
    assert (folder / missing).read_bytes() == hub.repos["org/model"].files[missing]


@pytest.mark.parametrize("text", ["", "a" * 12, "\x00\xff"])
def test_a_branch_file_that_was_cut_is_written_again(main: Cli, hub: Hub, text: str) -> None:
    folder = pulled(main)
    ref = folder.parents[1] / "refs" / "main"
    ref.write_text(text, encoding="latin-1")
    assert main("run", "--offline", "hf:org/model", "hi").code == 3
    assert pulled(main) == folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "sparkchat-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_too_small_a_disk_is_refused_before_the_first_byte(
    main: Cli, hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/model"] = Repo(model_files(20_000_000))
    monkeypatch.setenv("HF_HOME", str(small_disk))
    done = main("pull", "hf:org/model")
    assert done.code == 5
    assert "needs 36.8 MB of disk" in done.error and "25.2 MB free" in done.error and "HF_HOME" in done.error
    assert hub.ranges("config.json") == []
    dry = main("pull", "hf:org/model", "--dry-run")
    assert (dry.code, "DOES NOT FIT" in dry.out) == (5, True)


def test_a_disk_that_fills_up_on_the_way_keeps_no_useless_bytes(
    main: Cli, hub: Hub, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkchat.hub.ensure_space", lambda *_: None)
    hub.repos["org/model"] = Repo(model_files(40_000_000))
    monkeypatch.setenv("HF_HOME", str(small_disk))
    done = main("pull", "hf:org/model")
    last = done.err.splitlines()[-1]
    assert (done.code, "is full" in last, "has been removed" in last) == (5, True, True)
    assert not list(small_disk.rglob("*.sparkchat-part"))
    assert sum(f.stat().st_size for f in small_disk.rglob("*") if f.is_file()) < 1000
    hub.repos["org/model"] = Repo(model_files(1_000_000))
    assert main("pull", "hf:org/model").code == 0
