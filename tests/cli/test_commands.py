"""The commands as a script sees them: exit codes, one line on stderr, data alone on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparkchat
from cli.conftest import Cli, child_environment, command
from sparkchat.paths import user_paths


def test_version_and_help(main: Cli) -> None:
    assert main("--version").out == f"sparkchat {sparkchat.__version__}\n"
    overview = main("--help")
    assert overview.code == 0
    for name in ("run", "batch", "list", "show", "pull", "rm", "verify", "doctor", "paths", "trace"):
        assert f"  {name} " in overview.out
    assert main().out == overview.out


@pytest.mark.parametrize("name", ["replay", "chat"])
def test_a_command_that_does_not_exist_is_said(main: Cli, name: str) -> None:
    done = main(name)
    assert (done.code, f"No such command '{name}'" in done.error) == (2, True)


@pytest.mark.parametrize(
    "args",
    [
        ("nope",),
        ("paths", "--jsn"),
        ("run", "--block-size", "abc"),
        ("run", "--temperature"),
        ("batch",),
        ("trace",),
        ("trace", "verify"),
        ("show", "a", "b"),
    ],
)
def test_usage_errors_are_one_line_with_exit_code_2(main: Cli, args: tuple[str, ...]) -> None:
    done = main(*args)
    assert done.code == 2
    assert done.out == ""
    assert "see `sparkchat" in done.error


def test_paths_names_every_folder_and_creates_none(main: Cli, own_folders: Path) -> None:
    folders = main("paths", "--json").json
    assert folders["profiles"] == str(own_folders / "config" / "sparkchat" / "profiles")
    assert set(folders) >= {"config", "data", "state", "cache", "profiles", "traces", "logs", "models", "hub_cache"}
    assert "cpu_kernels" in folders
    assert not Path(folders["profiles"]).exists()
    assert [line.split()[0] for line in main("paths").out.splitlines()] == list(folders)


@pytest.mark.parametrize("variables", [{}, {"HF_HOME": "/x/hf"}, {"HF_HUB_CACHE": "~/y"}, {"HF_HOME": None}])
def test_the_hub_cache_is_where_hugging_face_says(cli: Cli, variables: dict[str, str | None]) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    import sys

    env = child_environment(**variables)
    theirs = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert cli("paths", "--json", env=variables).json["hub_cache"] == theirs


def test_doctor_reports_without_changing_anything(main: Cli, own_folders: Path) -> None:
    report = main("doctor", "--json", "--offline").json
    assert report["packages"]["torch"] and report["python"]
    assert report["sources"]["hub"].startswith("not asked")
    assert report["folders"]["cache"]["writable"] is True
    assert report["default_model"]["state"] == "not fetched yet"
    assert not list((own_folders / "cache").iterdir())
    assert "versions" in main("doctor", "--offline").out


def test_doctor_says_when_the_hub_does_not_answer(main: Cli) -> None:
    assert "does not answer" in main("doctor", "--json").json["sources"]["hub"]


@pytest.mark.parametrize("switch", ["flag", "SPARKCHAT_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_and_not_cached_is_code_3_with_what_to_type(cli: Cli, switch: str) -> None:
    args = ["run", "smollm2-135m", "hi"] + (["--offline"] if switch == "flag" else [])
    done = cli(*args, env={} if switch == "flag" else {switch: "1"})
    assert done.code == 3
    assert "sparkchat pull smollm2-135m" in done.error


def test_debug_shows_the_traceback_and_stays_off_otherwise(cli: Cli) -> None:
    assert "Traceback" not in cli("show", "nope").err
    for args in (("--debug", "show", "nope"), ("show", "nope", "--debug")):
        done = cli(*args)
        assert done.code == 3
        assert "Traceback" in done.err and done.err.splitlines()[-1].startswith("sparkchat: model 'nope'")
    assert "Traceback" in cli("show", "nope", env={"SPARKCHAT_DEBUG": "1"}).err


def test_a_bug_is_one_line_too(main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkchat.cli.doctor.user_paths", lambda: 1 / 0)
    done = main("paths")
    assert (done.code, "internal error, ZeroDivisionError" in done.error) == (1, True)


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command("list", "--json"),
        stdout=write,
        stderr=subprocess.PIPE,
        env=child_environment(),
        check=False,
        timeout=30,
    )
    os.close(write)
    assert done.stderr == b""


@pytest.mark.parametrize("streams", [(1,), (0, 1, 2)])
def test_a_stream_that_is_closed_takes_no_other_files_number(streams: tuple[int, ...]) -> None:
    closed = " ".join(f"{number}>&-" for number in streams)
    asked = (
        "import os, sys; from sparkchat.cli.main import main; code = main(['list']); "
        "sys.exit(code or 9 * (os.open('/', os.O_RDONLY) < 3))"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, asked],
        capture_output=True,
        env=child_environment(),
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) is (1 not in streams)


def test_a_full_disk_behind_stdout_is_code_5_in_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command("list"), stdout=full, stderr=subprocess.PIPE, env=child_environment(), check=False, timeout=30
        )
    assert done.returncode == 5
    assert done.stderr.count(b"\n") == 1 and b"no space is left" in done.stderr


def test_a_terminal_that_cannot_show_a_character_gets_a_question_mark(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "mod\u00e8le\u4e2d"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = cli("show", folder, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.code == 0
    assert "mod?le?" in done.out


def test_json_is_utf_8_whatever_the_encoding_of_the_terminal(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "mod\u00e8le\u4e2d"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = cli("show", folder, "--json", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.code, done.json["name"]) == (0, str(folder))


def test_an_unwritable_cache_is_one_line(cli: Cli) -> None:
    done = cli("pull", "smollm2-135m", env={"XDG_CACHE_HOME": "/proc/nope"})
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert "cannot write to the cache folder" in last and "XDG_CACHE_HOME" in last
    assert "Traceback" not in done.err


def test_rm_leaves_a_users_own_files_alone(main: Cli, model_folder: Path) -> None:
    done = main("rm", model_folder)
    assert (done.code, "your own file" in done.error) == (1, True)
    assert (model_folder / "config.json").is_file()


def test_verify_of_nothing_is_code_3(main: Cli) -> None:
    assert main("verify", "smollm2-135m").code == 3


def test_verify_of_a_folder_finds_what_is_gone_cut_or_no_json(main: Cli, tmp_path: Path) -> None:
    def files(**parts: bytes) -> dict[str, bytes]:
        shard = b"\x02" + bytes(7) + b"{}"
        index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()
        whole = {"config.json": b"{}", "model.safetensors.index.json": index}
        return whole | {"1.safetensors": shard, "2.safetensors": shard} | parts

    for name, data, code in (
        ("config.json", b"{}", 0),
        ("2.safetensors", None, 6),
        ("1.safetensors", b"\x02", 6),
        ("config.json", b'{"a"', 6),
        ("model.safetensors.index.json", b"{", 6),
    ):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for file, content in files(**{name: data}).items():
            if content is not None:
                (folder / file).write_bytes(content)
        done = main("verify", folder, "--json")
        assert done.code == code, name
        bad = [Path(item["path"]).name for item in done.json["files"] if item["verdict"] == "damaged"]
        assert bad == ([name] if code else [])


HEADER = {
    "type": "header",
    "schema": "sparkchat.trace/1",
    "model": "m",
    "drafter": None,
    "block_size": None,
}


def test_trace_commands_read_a_file(main: Cli, tmp_path: Path) -> None:
    file = tmp_path / "s.spark.jsonl"
    file.write_text(json.dumps(HEADER) + "\n")
    assert main("trace", "summary", file, "--json").json["num_turns"] == 0
    assert main("trace", "verify", file, "--json").json["ok"] is True
    assert len(main("trace", "verify", file, file, "--json").json) == 2
    assert "all checks hold" in main("trace", "verify", file).out


def test_trace_verify_fails_with_code_6(main: Cli, tmp_path: Path) -> None:
    file = tmp_path / "s.spark.jsonl"
    file.write_text(json.dumps(HEADER) + "\n{broken\n" + json.dumps({"type": "later"}) + "\n")
    done = main("trace", "verify", file)
    assert (done.code, "1 of 1 traces fail" in done.error) == (6, True)


def test_a_trace_that_is_not_there(main: Cli, tmp_path: Path) -> None:
    assert main("trace", "summary", tmp_path / "x").code == 2


def test_nothing_above_left_files_in_the_package() -> None:
    assert user_paths().shipped_profiles.is_dir()
