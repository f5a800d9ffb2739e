"""Fetching from the hub: whole or not at all, resumed where it was cut, and plain words for every refusal."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cli.conftest import Cli, child_environment, command, model_files, safetensors_bytes, wait_for
from cli.mock_hub import GOOD_TOKEN, Hub, Repo, sha256

BAD_TOKEN = "hf_badbadbadbadbadbadbadbadbadbadbad"


def parts(own_folders: Path) -> list[Path]:
    return list((own_folders / "hf").rglob("*.sparkchat-part"))


def pulled(main: Cli) -> Path:
    done = main("pull", "hf:org/model", "--json")
    assert done.code == 0, done.err
    return Path(done.json["model"]["path"])


def test_a_model_is_fetched_without_what_it_does_not_need(main: Cli, hub: Hub) -> None:
    folder = pulled(main)
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == hub.repos["org/model"].files["model.safetensors"]


def test_the_cache_is_the_one_that_hugging_face_tools_use(main: Cli, hub: Hub, own_folders: Path) -> None:
    pulled(main)
    code = "from huggingface_hub import snapshot_download as s; print(s('org/model', local_files_only=True))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=child_environment()
    )
    assert Path(found.stdout.strip()).is_dir(), found.stderr
    assert own_folders in Path(found.stdout.strip()).parents


def test_a_complete_model_asks_nothing_of_the_network(main: Cli, hub: Hub) -> None:
    first = pulled(main)
    hub.requests.clear()
    assert pulled(main) == first
    assert hub.requests == []


def test_a_cut_file_goes_on_where_it_stopped(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].cut_after["model.safetensors"] = [180_000]
    folder = pulled(main)
    ranges = hub.ranges("model.safetensors")
    assert ranges[0] is None and ranges[1] is not None and ranges[1].startswith("bytes=1")
    assert sha256((folder / "model.safetensors").read_bytes()) == sha256(
        hub.repos["org/model"].files["model.safetensors"]
    )


def test_a_hub_that_stops_sending_leaves_a_part_that_the_next_try_uses(main: Cli, hub: Hub, own_folders: Path) -> None:
    hub.repos["org/model"].cut_after["model.safetensors"] = [100_000, *[0] * 20]
    done = main("pull", "hf:org/model")
    assert done.code == 69
    assert "kept in" in done.err.splitlines()[-1]
    assert [p.stat().st_size for p in parts(own_folders)] == [100_000]
    assert main("run", "--offline", "hf:org/model", "hi").code == 3
    hub.repos["org/model"].cut_after.clear()
    hub.requests.clear()
    pulled(main)
    assert hub.ranges("model.safetensors") == ["bytes=100000-"]
    assert parts(own_folders) == []


def test_a_server_without_ranges_starts_the_file_afresh(main: Cli, hub: Hub) -> None:
    repo = hub.repos["org/model"]
    repo.ignores_range, repo.cut_after["model.safetensors"] = True, [100_000]
    assert (pulled(main) / "model.safetensors").read_bytes() == repo.files["model.safetensors"]


def test_a_file_that_changed_between_tries_is_never_appended_to(main: Cli, hub: Hub, own_folders: Path) -> None:
    repo = hub.repos["org/model"]
    repo.cut_after["model.safetensors"] = [100_000, *[0] * 20]
    assert main("pull", "hf:org/model").code == 69
    repo.cut_after.clear()
    repo.commit = "b" * 40
    repo.files["model.safetensors"] = safetensors_bytes(250_000)[::1]
    hub.requests.clear()
    assert (pulled(main) / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert hub.ranges("model.safetensors") == [None]
    assert parts(own_folders) == []


def test_wrong_bytes_are_refused_and_removed(main: Cli, hub: Hub, own_folders: Path) -> None:
    hub.repos["org/model"].wrong_bytes.add("model.safetensors")
    done = main("pull", "hf:org/model")
    assert done.code == 6
    assert "wrong checksum" in done.err
    assert parts(own_folders) == []
    assert not list((own_folders / "hf").rglob("model.safetensors"))


def test_a_busy_hub_is_asked_again(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].busy = [429, 503]
    pulled(main)


def test_a_listing_without_sizes_is_completed_file_by_file(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].sizes_in_listing = False
    assert (pulled(main) / "model.safetensors").read_bytes() == hub.repos["org/model"].files["model.safetensors"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_ended_fetch_is_not_taken_as_complete(main: Cli, hub: Hub, how: signal.Signals, own_folders: Path) -> None:
    hub.repos["org/model"].slow = 0.2
    process = subprocess.Popen(command("pull", "hf:org/model"), env=child_environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not any(p.stat().st_size > 1000 for p in parts(own_folders)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    code = process.wait(20)
    assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[how]
    assert main("run", "--offline", "hf:org/model", "hi").code == 3
    hub.repos["org/model"].slow = 0.0
    hub.requests.clear()
    assert (pulled(main) / "model.safetensors").read_bytes() == hub.repos["org/model"].files["model.safetensors"]
    assert hub.ranges("model.safetensors")[0] is not None


def test_two_processes_share_the_work(hub: Hub) -> None:
    hold = hub.repos["org/model"].hold = threading.Event()

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command("pull", "hf:org/model"),
            env=child_environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    first = start()
    wait_for(lambda: hub.ranges("config.json"))
    second = start()
    assert "another sparkchat is fetching" in second.stderr.readline()
    hold.set()
    assert [run.wait(40) for run in (first, second)] == [0, 0]
    assert len(hub.ranges("model.safetensors")) == 1


def test_a_cut_file_in_the_cache_is_found_and_mended(main: Cli, hub: Hub) -> None:
    folder = pulled(main)
    blob = (folder / "model.safetensors").resolve()
    os.truncate(blob, 1000)
    done = main("run", "hf:org/model", "hi")
    assert (done.code, "cut short" in done.error) == (6, True)
    pulled(main)
    assert main("verify", "hf:org/model").code == 0


def test_verify_finds_a_flipped_byte(main: Cli, hub: Hub) -> None:
    blob = (pulled(main) / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    done = main("verify", "hf:org/model", "--json")
    assert done.code == 6
    assert {Path(f["path"]).name: f["verdict"] for f in done.json["files"]}["model.safetensors"] == "damaged"


def test_rm_removes_the_model_and_its_leftovers(main: Cli, hub: Hub, own_folders: Path) -> None:
    hub.repos["org/model"].cut_after["model.safetensors"] = [100_000, *[0] * 20]
    main("pull", "hf:org/model")
    assert main("rm", "hf:org/model").code == 0
    assert not list((own_folders / "hf").rglob("*safetensors*"))
    assert main("rm", "hf:org/model").code == 3


def test_dry_run_names_the_bytes_and_fetches_none(main: Cli, hub: Hub) -> None:
    done = main("pull", "hf:org/model", "--dry-run", "--json")
    files = model_files()
    assert done.json["fetch_bytes"] == sum(
        len(files[n]) for n in ("config.json", "tokenizer.json", "model.safetensors")
    )
    assert done.json["disk_fits"] is True
    assert all(asked is not None for asked in hub.ranges("model.safetensors"))


@pytest.mark.parametrize(
    ("name", "token", "code", "words"),
    [
        ("org/missing", None, 3, ("org/missing", "does not exist, or is private", "log in")),
        ("org/missing", GOOD_TOKEN, 3, ("org/missing", "does not exist, or your token may not see it")),
        ("org/missing", BAD_TOKEN, 77, ("org/missing", "refuses your token")),
        ("org/gated", None, 77, ("org/gated", "gated", "accept its terms", "log in")),
        ("org/gated", "hf_known_without_access", 77, ("org/gated", "your token has no access")),
        ("org/private", None, 3, ("org/private", "or is private")),
        (
            "org/model",
            BAD_TOKEN,
            77,
            ("org/model", "refuses your token", "is public", "HF_HUB_DISABLE_IMPLICIT_TOKEN=1"),
        ),
        ("org/model@nope", None, 3, ("no revision 'nope'",)),
        ("org/nothing", None, 3, ("org/nothing", "no .safetensors weights")),
    ],
)
def test_every_refusal_says_which_case_it_is(
    main: Cli,
    hub: Hub,
    name: str,
    token: str | None,
    code: int,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repos |= {
        "org/gated": Repo(model_files(), gated=True),
        "org/private": Repo(model_files(), private=True),
        "org/nothing": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
    }
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    done = main("pull", f"hf:{name}")
    assert done.code == code, done.err
    for word in words:
        assert word in done.error
    assert token is None or token[3:10] not in done.err + done.out


def test_a_public_model_works_without_the_refused_token_as_advised(cli: Cli, hub: Hub) -> None:
    env = {"HF_TOKEN": BAD_TOKEN, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    assert cli("pull", "hf:org/model", env=env).code == 0


def test_a_good_token_opens_what_is_private_and_gated(main: Cli, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", GOOD_TOKEN)
    hub.repos["org/gated"] = Repo(model_files(), gated=True)
    assert main("pull", "hf:org/gated").code == 0


def test_a_renamed_repository_is_followed(main: Cli, hub: Hub) -> None:
    hub.renamed["org/old"] = "org/model"
    assert main("pull", "hf:org/old", "--dry-run").code == 0


@pytest.mark.parametrize(("typed", "near"), [("org/modle", "org/model"), ("Qwen/Qwen3-4", "Qwen/Qwen3-4B")])
def test_a_near_miss_names_what_is_on_disk_or_known(main: Cli, hub: Hub, typed: str, near: str) -> None:
    pulled(main)
    done = main("pull", f"hf:{typed}")
    assert (done.code, f"did you mean hf:{near}?" in done.error) == (3, True)


def test_no_network_is_told_apart_from_not_found(main: Cli) -> None:
    done = main("pull", "hf:org/model")
    assert (done.code, "does not answer" in done.error) == (69, True)


def test_a_silent_hub_is_given_up_after_a_few_seconds(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        start = time.monotonic()
        done = cli("pull", "hf:org/model", env={"HF_ENDPOINT": f"http://127.0.0.1:{listening.getsockname()[1]}"})
    assert done.code == 69
    assert time.monotonic() - start < 9


def test_a_file_name_that_leaves_the_folder_is_refused(main: Cli, hub: Hub, own_folders: Path) -> None:
    hub.repos["org/evil"] = Repo({"config.json": b"{}", "../../evil.gguf": b"GGUF"})
    assert main("pull", "hf:org/evil/../../evil.gguf").code in (2, 3, 6)
    assert not list(own_folders.rglob("evil.gguf"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:org/model", "holds GGUF files and no other weights; give one of its files, e.g. hf:org/model/m-Q4_0.gguf"),
        ("hf:org/model/m-Q8.gguf", "holds no m-Q8.gguf; give one of its files, e.g. hf:org/model/m-Q8_0.gguf"),
    ],
)
def test_a_repository_of_gguf_files_names_one(main: Cli, hub: Hub, name: str, words: str) -> None:
    hub.repos["org/model"] = Repo({"m-Q4_0.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF"})
    done = main("pull", name)
    assert (done.code, words in done.error) == (3, True), done.err


def test_a_disk_without_links_holds_the_files_themselves(
    main: Cli, hub: Hub, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(link: Path, target: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    done = main("pull", "hf:org/model")
    assert done.code == 0, done.err
    weights = next((own_folders / "hf").rglob("model.safetensors"))
    assert not weights.is_symlink() and weights.read_bytes() == hub.repos["org/model"].files["model.safetensors"]
    weights.unlink()
    num_requests = len(hub.requests)
    assert main("pull", "hf:org/model").code == 0
    asked = [path for method, path, _ in hub.requests[num_requests:] if "/resolve/" in path]
    assert [path.rpartition("/")[2] for path in asked] == ["model.safetensors"], "the others are there"
    assert main("rm", "hf:org/model").code == 0
    assert not list((own_folders / "hf").rglob("*.safetensors"))


def test_pull_brings_a_tokenizer_that_another_tool_left_out(main: Cli, hub: Hub, own_folders: Path) -> None:
    assert main("pull", "hf:org/model").code == 0
    link = next((own_folders / "hf").rglob("tokenizer.json"))
    content = link.read_bytes()
    link.resolve().unlink()
    link.unlink()
    hub.repos["org/model"].forbidden = True
    assert main("pull", "hf:org/model").code == 0, "a drafter has none: where the hub does not tell, nothing is missing"
    hub.repos["org/model"].forbidden = False
    num_requests = len(hub.requests)
    assert main("pull", "hf:org/model").code == 0
    assert link.read_bytes() == content
    asked = [path for method, path, _ in hub.requests[num_requests:] if "/resolve/" in path]
    assert [path.rpartition("/")[2] for path in asked] == ["tokenizer.json"]
