"""``list`` shows what lies in the cache, and ``rm`` takes nothing that something else uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli, model_files
from cli.mock_hub import COMMIT, Hub, Repo

Write = Callable[[str, str], Path]


def listed(main: Cli) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in main("list", "--json").json}


@pytest.mark.parametrize(("asked", "shown"), [("", ""), ("@" + COMMIT, "@" + COMMIT)])
def test_a_fetched_repository_is_listed_by_the_name_that_runs_it(
    main: Cli, hub: Hub, asked: str, shown: str, own_folders: Path
) -> None:
    assert main("pull", f"hf:org/model{asked}").code == 0
    (own_folders / "hf" / "hub" / "models--org--no-model" / "snapshots" / COMMIT).mkdir(parents=True)
    name = f"hf:org/model{shown}"
    assert [key for key in listed(main) if key.startswith("hf:")] == [name]
    assert listed(main)[name] == "on disk"
    assert main("rm", name).code == 0
    assert not any(key.startswith("hf:") for key in listed(main))


def test_a_repository_that_a_profile_names_is_listed_once(main: Cli, hub: Hub, write_profile: Write) -> None:
    write_profile("mine", "[[model.sources]]\nkind = 'hub'\nrepo = 'org/model'\n")
    assert main("pull", "mine").code == 0
    assert listed(main)["mine"] == "on disk" and "hf:org/model" not in listed(main)


def test_a_model_that_is_cut_short_is_listed_as_broken(main: Cli, hub: Hub) -> None:
    assert main("pull", "hf:org/model").code == 0
    folder = Path(next(e for e in main("list", "--json").json if e["name"] == "hf:org/model")["files"][0]).parent
    (folder / "model.safetensors").resolve().write_bytes(b"short")
    assert listed(main)["hf:org/model"].startswith("broken: model.safetensors")


def test_a_drafter_that_another_profile_uses_stays(main: Cli, hub: Hub, write_profile: Write) -> None:
    for number in (1, 2):
        hub.repos[f"org/target{number}"] = Repo(model_files())
        write_profile(
            f"pair{number}",
            f"""
            [[model.sources]]
            kind = 'hub'
            repo = 'org/target{number}'
            [[drafter.sources]]
            kind = 'hub'
            repo = 'org/model'
            """,
        )
        assert main("pull", f"pair{number}").code == 0
    done = main("rm", "pair1")
    assert (done.code, "hf:org/model@main, unpinned stays, because pair2 uses it" in done.err) == (0, True)
    assert (listed(main)["pair1"], listed(main)["pair2"]) == ("not fetched", "on disk")
    assert main("pull", "--dry-run", "pair2", "--json").json["fetch_bytes"] == 0
    done = main("rm", "pair2")
    assert (done.code, "stays" in done.err) == (0, False)
    assert main("pull", "--dry-run", "pair2", "--json").json["fetch_bytes"] > 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_pull_mends_small_files_that_were_spoiled(main: Cli, hub: Hub, name: str) -> None:
    assert main("pull", "hf:org/model").code == 0
    folder = Path(main("show", "hf:org/model", "--json").json["path"])
    (folder / name).resolve().write_bytes(b"{")
    hub.requests.clear()
    done = main("pull", "hf:org/model")
    assert (done.code, f"{name} does not have its checksum" in done.err) == (0, True)
    assert (folder / name).read_bytes() == hub.repos["org/model"].files[name]
    assert hub.ranges(name) == [None] and hub.ranges("model.safetensors") == []
    assert main("verify", "hf:org/model").code == 0


def test_pull_mends_a_single_file_that_was_cut(main: Cli, hub: Hub) -> None:
    hub.repos["org/model"].files["model.gguf"] = b"GGUF" + bytes(5000)
    assert main("pull", "hf:org/model/model.gguf").code == 0
    file = Path(main("show", "hf:org/model/model.gguf", "--json").json["path"])
    file.resolve().write_bytes(b"GGUF")
    assert main("pull", "hf:org/model/model.gguf").code == 0
    assert file.read_bytes() == hub.repos["org/model"].files["model.gguf"]


def test_verify_finds_weights_of_ones_own_that_are_cut(main: Cli, model_folder: Path) -> None:
    whole = model_files()["model.safetensors"]
    (model_folder / "model.safetensors").write_bytes(whole)
    assert main("verify", model_folder).code == 0
    (model_folder / "model.safetensors").write_bytes(whole[:-1])
    done = main("verify", model_folder)
    assert (done.code, "copy it again" in done.error) == (6, True)


@pytest.mark.parametrize(("commit", "etag"), [("../../x", None), (COMMIT, "../../../x"), (COMMIT, ".hidden")])
def test_names_that_a_hub_makes_up_never_become_paths(
    main: Cli, hub: Hub, commit: str, etag: str | None, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/model"].commit = commit
    if etag is not None:
        monkeypatch.setattr("cli.mock_hub.sha256", lambda _: etag)
    done = main("pull", "hf:org/model")
    assert done.code in (6, 69), done.err
    assert not [file for file in own_folders.rglob("x*") if file.is_file()]
