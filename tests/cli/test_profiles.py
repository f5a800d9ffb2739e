"""Profiles: every key is checked, every value says where it came from, and the order of the layers holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli
from sparkchat.catalog import find_drafter, find_model, load_profile, profile_files
from sparkchat.errors import SparkchatError, UsageError
from sparkchat.params import Correction, CostTable
from sparkchat.paths import user_paths
from sparkchat.profile import HubSource, WheelSource, read_profile
from sparkchat.resolve import corrections_of, resolve_options

Write = Callable[[str, str], Path]


def test_every_shipped_profile_is_valid_and_pinned() -> None:
    names = list(profile_files(user_paths()))
    assert "smollm2-135m" in names
    for name in names:
        profile = load_profile(name, user_paths())
        assert profile is not None
        assert profile.get("model.label") and profile.get("model.licence")
        for source in (*profile.get("model.sources"), *profile.get("drafter.sources", ())):
            assert isinstance(source, WheelSource) or (isinstance(source, HubSource) and source.is_pinned), source


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "width", "heads", "num_tables"),
    [("4b", 2560, 36, 9728, 32, 1), ("8b", 4096, 36, 12288, 32, 2), ("14b", 5120, 40, 17408, 40, 2)],
)
def test_qwen_and_its_drafters_have_the_sizes_of_their_shapes(
    name: str, hidden: int, layers: int, width: int, heads: int, num_tables: int, main: Cli
) -> None:
    d, vocab, rank = hidden, 151936, 256
    layer = 2 * d * heads * 128 + 2 * d * 8 * 128 + 2 * 128 + 3 * d * width + 2 * d
    target = num_tables * vocab * d + layers * layer + d
    drafter = 2 * vocab * d + 5 * d * d + 5 * layer + 2 * d + 2 * vocab * rank + d + rank + 1
    profile = load_profile(f"qwen3-{name}", user_paths())
    assert profile is not None
    sizes = [profile.get(f"{part}.sources")[0].size for part in ("model", "drafter")]
    assert sizes == [2 * target, 2 * drafter]
    listed = {entry["name"]: entry["pinned_bytes"] for entry in main("list", "--json").json}
    assert listed[f"qwen3-{name}"] == 2 * target
    assert f", {2 * drafter / 1e9:.1f} GB" in main("show", f"qwen3-{name}").out


def test_the_embedded_model_prefers_the_small_file_and_sends_no_system_text() -> None:
    profile = load_profile("smollm2-135m", user_paths())
    assert profile is not None
    first, second, *_ = profile.get("model.sources")
    assert first.sha256 == second.sha256 and first.size == second.size
    template = profile.get("model.chat_template")
    from jinja2 import Template

    text = Template(template).render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[modle]\npath = 'x'", ("'modle'", "did you mean 'model'")),
        ("[run]\ntemprature = 1.0", ("'temprature'", "[run]", "did you mean 'temperature'")),
        ("[speculation]\ntemperature = [1.0]", ("did you mean 'temperatures'",)),
        ("[speculation.cost_table.cpu]\nrow = [1]\nstep_ms = [1.0]", ("'row'", "did you mean 'rows'")),
        ("[run]\nmode = 'fast'", ("'mode'", "'fast'", "off, static, compact, cap-accept")),
        ("[run]\ntemperature = 'hot'", ("'temperature'", "'hot'", "a finite number")),
        ("[run]\ntemperature = nan", ("'temperature'", "a finite number")),
        (f"[run]\ntemperature = {10**400}", ("'temperature'", "a finite number")),
        (f"[run]\nseed = 1{'0' * 5000}", ("not valid TOML",)),
        ("run = " + "[" * 100_000, ("not valid TOML",)),
        (f"[model]\npath = 'a'\nmin_memory_gb = {10**400}", ("'min_memory_gb'", "gigabytes")),
        ("[model]\npath = 'a'\nmin_memory_gb = inf", ("'min_memory_gb'", "gigabytes")),
        ("[model.min_memory_gb]\n'²' = 3", ("'min_memory_gb'", "gigabytes")),
        ("[run]\ntop_p = 2.0", ("top_p 2.0", "at most 1")),
        ("[run]\nthink = 1", ("'think'", "true or false")),
        ("[run]\nmax_tokens = 0", ("max_tokens 0", "1 or more")),
        ("[run]\ncontext = true", ("'context'", "a whole number")),
        ("model = 3", ("'model' must be a table", "[model]")),
        ("[model]\npath = ''", ("'path'", "not empty")),
        ("[model]\npath = 'a'\n[[model.sources]]\nkind = 'hub'\nrepo = 'a/b'", ("path and sources", "one of them")),
        ("[[model.sources]]\nkind = 'torrent'", ("'torrent'", "hub, wheel")),
        ("[[model.sources]]\nkind = 'hub'\nrepo = 'a/b'\nsha256 = 'zz'", ("sha256", "64 lower-case")),
        ("[[model.sources]]\nkind = 'wheel'\npackage = 'p'", ("version", "missing")),
        ("[drafter]\nkind = 'eagle'", ("'eagle'", "dspark, mtp")),
        ("[drafter]\nblock_size = 0", ("'block_size'", "1 or more")),
        ("[speculation]\ntemperatures = [1.0, 0.0]", ("'temperatures'", "above 0")),
        ("[speculation]\ntemperatures = []", ("'temperatures'", "one per draft position")),
        ("[speculation]\nrefine = 1", ("'refine'", "true or false")),
        ("[speculation]\ncalibration = 3", ("[speculation.calibration.warm]",)),
        ("[speculation.calibration.worm]\ntemperatures = [1.0]\nshifts = [0.0]", ("'worm'", "did you mean 'warm'")),
        ("[speculation.calibration.warm]\ntemperatures = [1.0]", ("warm", "temperatures and shifts")),
        ("[speculation.calibration.warm]\ntemperatures = [1.0]\nshifts = []", ("1 temperatures and 0 shifts",)),
        ("[speculation.calibration.warm]\ntemperatures = [0.0]\nshifts = [0.1]", ("above 0",)),
        ("[speculation.calibration.warm]\ntemperatures = [1.0]\nshifts = [nan]", ("finite",)),
        ("[speculation.calibration.warm]\ntemperatures = [1.0]\nshifts = [0.1]\nscale = [1]", ("'scale'",)),
        ("[speculation]\ncost_table = 3", ("[speculation.cost_table.cpu]",)),
        ("[speculation.cost_table]\ncpu = [1]", ("cpu", "rows and step_ms")),
        ("[speculation.cost_table.cpu]\nrows = [1, 2]\nstep_ms = [1.0]", ("2 rows and 1 step_ms",)),
        ("[speculation.cost_table.cpu]\nrows = [2, 1]\nstep_ms = [1.0, 2.0]", ("increase",)),
        ("[speculation.cost_table.cpu]\nrows = [0, 1]\nstep_ms = [1.0, 2.0]", ("start at 1",)),
        ("[speculation.cost_table.cpu]\nrows = [1.5]\nstep_ms = [1.0]", ("rows", "whole numbers")),
        ("[speculation.cost_table.cpu]\nrows = [1]\nstep_ms = [inf]", ("step_ms", "above 0")),
        ("[speculation.cost_table.cpu]\nrows = []\nstep_ms = []", ("no rows", "at least one")),
        ("[run", ("not valid TOML",)),
    ],
)
def test_a_wrong_profile_is_refused_in_one_line(
    write_profile: Write, main: Cli, text: str, words: tuple[str, ...]
) -> None:
    file = write_profile("mine", text)
    done = main("show", "mine")
    assert done.code == 2
    for word in (str(file), *words):
        assert word in done.error


def test_bytes_that_are_not_text_are_refused(profiles: Path, main: Cli) -> None:
    (profiles / "mine.toml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in main("show", "mine").error


def test_one_broken_profile_does_not_hide_the_others(write_profile: Write, main: Cli) -> None:
    write_profile("broken", "[run")
    names = {entry["name"]: entry["state"] for entry in main("list", "--json").json}
    assert names["broken"].startswith("broken: ")
    assert names["smollm2-135m"] == "not fetched"


def test_paths_in_a_profile_are_relative_to_it(write_profile: Write, profiles: Path) -> None:
    (profiles / "weights").mkdir()
    (profiles / "weights" / "config.json").write_text("{}")
    (profiles / "draft").mkdir()
    (profiles / "draft" / "config.json").write_text("{}")
    write_profile("mine", "[model]\npath = 'weights'\n[drafter]\npath = 'draft'\n")
    model = find_model("mine", user_paths())
    assert model.path == profiles / "weights"
    assert find_drafter(None, model, user_paths()).path == profiles / "draft"


def test_cost_tables_are_kept_by_device_name(write_profile: Write) -> None:
    file = write_profile(
        "mine",
        """
        [speculation]
        temperatures = [1, 1.5]
        [speculation.cost_table.cpu]
        rows = [1, 2, 3]
        step_ms = [1.0, 2.0, 2.2]
        [speculation.cost_table."NVIDIA H200"]
        rows = [1]
        step_ms = [1]
        """,
    )
    values = read_profile(file, "user").values
    assert values["speculation.cost_table.cpu"] == CostTable((1, 2, 3), (1.0, 2.0, 2.2))
    assert values["speculation.cost_table.NVIDIA H200"] == CostTable((1,), (1.0,))
    assert values["speculation.temperatures"] == (1.0, 1.5)


def test_a_user_profile_lies_over_the_shipped_one_key_by_key(write_profile: Write, model_folder: Path) -> None:
    file = write_profile("smollm2-135m", f"[model]\npath = '{model_folder}'\n[run]\ntemperature = 0.1\n")
    profile = load_profile("smollm2-135m", user_paths())
    assert profile is not None
    assert profile.settings["run.temperature"].source == f"profile {file}"
    assert profile.settings["run.top_p"].source == "shipped profile smollm2-135m"
    assert profile.get("model.path") == model_folder
    assert profile.get("model.sources") is None


def settings(main: Cli, name: str) -> dict[str, tuple[object, str]]:
    report = main("show", name, "--resolved", "--json").json
    return {key: (entry["value"], entry["source"]) for key, entry in report["settings"].items()}


def test_resolved_names_the_source_of_every_value(
    main: Cli, write_profile: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_profile("smollm2-135m", "[run]\ntop_p = 0.8\nmode = 'compact'\n[drafter]\nblock_size = 3\n")
    monkeypatch.setenv("SPARKCHAT_MODE", "static")
    monkeypatch.setenv("SPARKCHAT_LOGIT_BIAS", "5=1.5,7=-2")
    found = settings(main, "smollm2-135m")
    assert found["temperature"] == (0.5, "shipped profile smollm2-135m")
    assert found["top_p"] == (0.8, f"profile {file}")
    assert found["block_size"] == (3, f"profile {file}")
    assert found["mode"] == ("static", "environment SPARKCHAT_MODE")
    assert found["logit_bias"] == ([[5, 1.5], [7, -2.0]], "environment SPARKCHAT_LOGIT_BIAS")
    assert found["min_p"] == (0.0, "default")
    assert all(source for _, source in found.values())


def test_refinement_is_off_and_a_profile_turns_it_on(main: Cli, write_profile: Write) -> None:
    assert settings(main, "smollm2-135m")["refine"] == (False, "default")
    text = "[speculation]\nrefine = true\n[speculation.calibration.hot]\ntemperatures = [2.0]\nshifts = [-0.5]\n"
    file = write_profile("smollm2-135m", text)
    found = settings(main, "smollm2-135m")
    assert found["refine"] == (True, f"profile {file}")
    own = {"temperatures": [2.0], "shifts": [-0.5]}
    assert found["speculation.calibration.hot"] == (own, f"profile {file}")
    assert found["speculation.calibration.warm"][1] == "shipped profile smollm2-135m"
    # Refused where there is nothing to plan.
    assert "--refine is for plans" in main("run", "smollm2-135m", "--refine", "--mode", "static", "hi").error
    assert "needs a drafter" in main("run", "smollm2-135m", "--refine", "--drafter", "none", "hi").error


def test_a_users_corrections_win_over_shipped_ones_kind_by_kind(main: Cli, write_profile: Write) -> None:
    text = "[speculation.calibration.hot]\ntemperatures = [2.0]\nshifts = [-0.5]\n"
    write_profile("smollm2-135m", text)
    profile = load_profile("smollm2-135m", user_paths())
    given = corrections_of(resolve_options(profile, {}, {}))
    assert given["calibration"] == {"hot": Correction((2.0,), (-0.5,))}
    shipped = {"greedy", "greedy-penalised", "warm", "warm-filtered", "hot-filtered", "cool-filtered-penalised"}
    assert set(given["shipped_calibration"]) == shipped
    # Shipped ones belong to the shipped drafter.
    assert set(corrections_of(resolve_options(profile, {"drafter": "other"}, {}))) == {"calibration"}
    write_profile("smollm2-135m", "[drafter]\npath = 'other'\n")
    assert corrections_of(resolve_options(load_profile("smollm2-135m", user_paths()), {}, {})) == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SPARKCHAT_TEMPERATURE", "warm"),
        ("SPARKCHAT_MODE", "fast"),
        ("SPARKCHAT_IGNORE_EOS", "maybe"),
        ("SPARKCHAT_TOP_K", "1.5"),
        ("SPARKCHAT_VERBOSE", "loud"),
        ("SPARKCHAT_COLOR", "blue"),
    ],
)
def test_a_wrong_variable_is_named(
    main: Cli, model_folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = main("run", model_folder, "--drafter", "none", "--prompt-ids", "1")
    assert (done.code, variable in done.error, value in done.error) == (2, True, True)


def test_a_misspelt_variable_is_pointed_out(main: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKCHAT_TEMPRATURE", "1")
    monkeypatch.setenv("SPARKCHAT_TRACE", "chat.spark.jsonl")
    monkeypatch.setenv("SPARKCHAT_HARNESS", "1")
    done = main("paths")
    assert done.code == 0
    assert "did you mean SPARKCHAT_TEMPERATURE" in done.err and "type --trace" in done.err
    assert "HARNESS" not in done.err


def test_a_profile_that_names_no_model_is_refused(write_profile: Write) -> None:
    write_profile("mine", "[run]\ntemperature = 1.0")
    with pytest.raises(UsageError, match=r"names no model; give it \[model\] path"):
        find_model("mine", user_paths())


def test_an_mtp_drafter_is_refused_rather_than_ignored(write_profile: Write, model_folder: Path) -> None:
    write_profile("mine", f"[model]\npath = '{model_folder}'\n[drafter]\nkind = 'mtp'\n")
    with pytest.raises(SparkchatError, match="mtp drafter"):
        find_drafter(None, find_model("mine", user_paths()), user_paths())


PAIR = """
[model]
path = 'weights'
label = 'Mine'
thinking = false
[drafter]
path = 'draft'
block_size = 4
[run]
temperature = 0.25
"""


@pytest.fixture
def pair_profile(write_profile: Write, profiles: Path) -> Path:
    for name in ("weights", "draft"):
        (profiles / name).mkdir()
        (profiles / name / "config.json").write_text("{}")
    return write_profile("mine", PAIR)


def test_a_profile_beside_a_model_keeps_the_models_files(pair_profile: Path, model_folder: Path) -> None:
    model = find_model(str(model_folder), user_paths(), "mine")
    assert (model.kind, model.path, model.profile is not None) == ("local", model_folder, True)
    assert model.profile is not None and model.profile.get("model.label") is None
    assert model.profile.get("model.thinking") is False
    assert find_drafter(None, model, user_paths()).path == pair_profile.parent / "draft"


def test_a_profile_alone_is_the_model(pair_profile: Path) -> None:
    by_name, by_file = (find_model(None, user_paths(), text) for text in ("mine", str(pair_profile)))
    assert by_name.path == by_file.path == pair_profile.parent / "weights"
    assert find_drafter(None, by_file, user_paths()).path == pair_profile.parent / "draft"


def test_a_profile_is_laid_over_another_key_by_key(pair_profile: Path, main: Cli) -> None:
    shown = main("show", "qwen3-8b", "--profile", "mine", "--resolved", "--json").json["settings"]
    assert shown["temperature"] == {"value": 0.25, "source": f"profile {pair_profile}"}
    assert shown["top_k"] == {"value": 20, "source": "shipped profile qwen3-8b"}
    assert shown["block_size"]["value"] == 4
    assert shown["model.label"]["value"] == "Qwen3-8B"
    assert shown["drafter.path"]["value"] == str(pair_profile.parent / "draft") and "drafter.sources" not in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-8", ("--profile qwen3-8 is unknown", "did you mean qwen3-8b?", ".toml")),
        ("zzz", ("--profile zzz is unknown", "known:", "smollm2-135m")),
        ("./none.toml", ("none.toml", "cannot be read")),
    ],
)
def test_an_unknown_profile_names_the_nearest(main: Cli, name: str, words: tuple[str, ...]) -> None:
    done = main("show", "smollm2-135m", "--profile", name)
    assert done.code == 2
    for word in words:
        assert word in done.error


def test_a_profile_without_a_drafter_leaves_that_to_the_model(
    write_profile: Write, model_folder: Path, main: Cli
) -> None:
    write_profile("calm", "[run]\ntemperature = 0.1\n")
    model = find_model(str(model_folder), user_paths(), "calm")
    assert find_drafter(None, model, user_paths()).reason_off is not None
    assert main("show", "--profile", "calm").code == 2
    report = main("show", model_folder, "--profile", "calm", "--resolved", "--json").json
    assert report["settings"]["temperature"]["value"] == 0.1
    assert "no drafter" in report["reason_off"]


def test_a_profiles_folder_that_cannot_be_read_is_told_not_passed_over(
    main: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = user_paths().profiles
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "._mine.toml").write_bytes(b"\0\0")  # what some file managers leave beside a file is no profile
    assert "._mine" not in profile_files(user_paths())

    listed = os.listdir

    def refuse(place: Path) -> list[str]:
        if Path(place) == folder:
            raise PermissionError(13, "Permission denied")
        return listed(place)

    monkeypatch.setattr(os, "listdir", refuse)  # whoever runs tests may read everything
    done = main("show", "smollm2-135m")
    assert done.code == 2
    assert f"profiles folder {folder} cannot be read (Permission denied)" in done.err
    assert f"profiles folder {folder}" in main("doctor").out
