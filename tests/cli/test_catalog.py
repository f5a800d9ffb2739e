"""What a MODEL argument means, and what is said when it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Cli
from sparkchat.catalog import DEFAULT_MODEL, find_drafter, find_model
from sparkchat.errors import DamagedFile, ModelNotFound, UsageError
from sparkchat.paths import user_paths
from sparkchat.profile import HubSource


def test_no_model_is_the_embedded_default() -> None:
    assert find_model(None, user_paths()).name == DEFAULT_MODEL


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:Qwen/Qwen3-0.6B", HubSource("Qwen/Qwen3-0.6B")),
        ("hf:Qwen/Qwen3-0.6B/", HubSource("Qwen/Qwen3-0.6B")),
        ("hf:org/repo@v1.0", HubSource("org/repo", "v1.0")),
        ("hf:org/repo@refs/pr/1", HubSource("org/repo", "refs/pr/1")),
        ("hf:org/repo/sub/x.Q4.gguf@abc", HubSource("org/repo", "abc", "sub/x.Q4.gguf")),
    ],
)
def test_hub_names(text: str, source: HubSource) -> None:
    assert find_model(text, user_paths()).sources == (source,)


@pytest.mark.parametrize(
    "text", ["hf:", "hf:repo", "hf:org/", "hf:org/re po", "hf:org/repo@", "hf:org/repo/x.bin", "hf:../x"]
)
def test_what_is_not_a_hub_name_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="hf:org/repo@revision"):
        find_model(text, user_paths())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("smollm2", "did you mean smollm2-135m?"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("qwen3-8", "did you mean qwen3-8b?"),
        ("gpt-9", "known: "),
        ("Qwen/Qwen3-8B", "type hf:Qwen/Qwen3-8B"),
        ("https://example.org/Qwen/Qwen3-8B", "type hf:Qwen/Qwen3-8B"),
        ("./nowhere", "no model folder or file ./nowhere"),
        ("", "model '' is unknown"),
        ("../../etc", "no model folder"),
        ("a name with spaces", "is unknown"),
    ],
)
def test_an_unknown_model_is_answered_with_what_to_type(main: Cli, text: str, words: str) -> None:
    done = main("show", text)
    assert (done.code, words in done.error) == (3, True), done.err


def test_control_characters_in_a_name_never_reach_the_terminal(main: Cli) -> None:
    done = main("show", "x\x1b[31m\nred")
    assert "\x1b" not in done.err
    assert done.code == 3 and done.error


def test_local_models(model_folder: Path, tmp_path: Path) -> None:
    assert find_model(str(model_folder), user_paths()).path == model_folder
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert find_model(str(gguf), user_paths()).path == gguf


def test_a_folder_beside_a_profile_of_the_same_name_needs_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text("{}")
    assert find_model("qwen3-8b", user_paths()).kind == "profile"
    assert find_model("./qwen3-8b", user_paths()).kind == "local"


def test_what_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        find_model(str(tmp_path), user_paths())
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(DamagedFile, match="not a GGUF file"):
        find_model(str(file), user_paths())
    profile = tmp_path / "mine.toml"
    profile.write_text("[run]\n")
    with pytest.raises(UsageError, match="give it as --profile"):
        find_model(str(profile), user_paths())


def test_drafters(model_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    model = find_model(str(model_folder), user_paths())
    assert find_drafter(str(drafter_folder), model, user_paths()).path == drafter_folder
    assert find_drafter("hf:org/d", model, user_paths()).sources == (HubSource("org/d"),)
    off = find_drafter("none", model, user_paths())
    assert not off.is_present and off.reason_off is not None
    assert find_drafter(None, model, user_paths()).reason_off is not None
    with pytest.raises(ModelNotFound, match="no drafter folder"):
        find_drafter(str(tmp_path / "nowhere"), model, user_paths())
