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
