"""Pipes, sockets, devices and folders in place of files: named in a line, never waited for, never read without end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # The name of a socket may have a hundred characters.
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def put_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = [put_pipe, put_socket, put_endless_device]
Put = Callable[[Path], None]
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the socket is bound by way of /proc")


@pytest.mark.parametrize("put", ODD)
def test_in_the_profiles_folder(put: Put, main: Cli, profiles: Path) -> None:
    put(profiles / "odd.toml")
    listed = main("list")
    assert listed.code == 0, listed.err
    assert "smollm2-135m" in listed.out
    for command in ("show", "verify"):
        done = main(command, "odd")
        assert (done.code, "odd.toml is a pipe, socket or device" in done.error) == (2, True), done.err


@pytest.mark.parametrize("put", ODD)
@pytest.mark.parametrize("option", [(), ("--drafter",)])
def test_as_a_model_or_a_drafter(put: Put, option: tuple[str, ...], main: Cli, model_folder: Path) -> None:
    odd = model_folder.parent / "odd"
    put(odd)
    model = (model_folder,) if option else ()
    done = main("run", *model, *option, odd, "hi")
    assert (done.code, "odd is a pipe, socket or device" in done.error) == (6, True), done.err


@pytest.mark.parametrize("put", ODD)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_inside_a_model_folder(put: Put, name: str, main: Cli, model_folder: Path) -> None:
    (model_folder / name).unlink(missing_ok=True)
    put(model_folder / name)
    for command in (("run", model_folder, "hi"), ("show", model_folder), ("verify", model_folder)):
        done = main(*command)
        assert (done.code, f"{name} in" in done.error) == (6, True), (command, done.err)


def test_a_profile_of_the_users_own_may_come_through_a_pipe(main: Cli, model_folder: Path, tmp_path: Path) -> None:
    """As the shell's <(...) gives it; one without end is no profile."""
    pipe = tmp_path / "given.toml"
    os.mkfifo(pipe)
    text = f'[model]\npath = "{model_folder}"\nlabel = "Through a pipe"\n'
    writer = threading.Thread(target=lambda: pipe.write_text(text), daemon=True)
    writer.start()
    done = main("show", "--profile", pipe)
    writer.join(10)
    assert done.code == 0 and "Through a pipe" in done.out, done.err
    endless = main("show", "--profile", "/dev/zero")
    assert (endless.code, "device" in endless.error) == (2, True), endless.err
    large = tmp_path / "large.toml"
    with large.open("wb") as file:
        file.truncate(20 << 20)
    assert "larger than 16 MiB" in main("show", "--profile", large).error


@pytest.mark.parametrize(
    ("words", "code"),
    [(("list",), 0), (("show", "smollm2-135m"), 0), (("doctor", "--offline"), 0), (("verify", "smollm2-135m"), 3)],
)
def test_folders_that_cannot_be_entered_are_empty_ones(
    main: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int
) -> None:
    """A name too long stands for a closed home, which root (in whose name tests may run) enters: Path raises alike."""
    for name in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", "/" + "a" * 300)
    done = main(*words)
    assert done.code == code, done.err
    assert "smollm2-135m" in done.out + done.err or "doctor" in words


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "a" * 3000, "/" + "a" * 3000, "what is " + "a" * 3000])
@pytest.mark.parametrize(
    "words", [("run", "NAME", "hi"), ("show", "NAME"), ("run", "MODEL", "hi", "--drafter", "NAME")]
)
def test_names_that_no_file_can_have_are_not_found(
    main: Cli, model_folder: Path, words: tuple[str, ...], name: str
) -> None:
    done = main(*({"MODEL": str(model_folder), "NAME": name}.get(word, word) for word in words))
    assert done.code in (2, 3), done.error


def test_a_profile_of_anybodys_home_breaks_itself_alone(main: Cli, write_profile: Callable[[str, str], Path]) -> None:
    write_profile("theirs", """[model]\npath = "~nobody-of-that-name/x"\n""")
    listed = main("list")
    assert listed.code == 0 and "smollm2-135m" in listed.out and "broken" in listed.out


@pytest.mark.parametrize(
    "text",
    [
        """[[model.sources]]\nkind = "hub"\nrepo = "../../etc"\n""",
        """[drafter]\npackaged = "../../etc"\n""",
        """[[model.sources]]\nkind = "wheel"\npackage = "../x"\nversion = "1"\n""",
        """[[model.sources]]\nkind = "wheel"\npackage = "x"\nversion = "/etc"\n""",
    ],
)
def test_names_that_become_folders_lead_nowhere_else(
    main: Cli, write_profile: Callable[[str, str], Path], text: str
) -> None:
    write_profile("wild", text)
    done = main("rm", "wild")
    assert (done.code, "give" in done.error and ("../" in done.error or "/etc" in done.error)) == (2, True)
