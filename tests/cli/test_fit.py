"""A model that cannot fit is refused with numbers before anything is fetched; drafters inside checkpoints are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli
from cli.mock_hub import Hub
from sparkchat import environment
from sparkchat.catalog import find_drafter, find_model, inner_drafter_kind
from sparkchat.config import RunConfig
from sparkchat.environment import Gpu, Memory
from sparkchat.errors import UsageError
from sparkchat.fit import Machine, this_machine
from sparkchat.paths import user_paths
from sparkchat.resolve import cost_device, has_thinking, resolve_options

Write = Callable[[str, str], Path]
NEEDS = {1: 100.0, 2: 60.0}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give this machine so many GPUs of so much memory, and so much main memory."""

    def give(num_gpus: int, gpu_gb: float = 0.0, memory_gb: float = 16.0) -> None:
        size = int(gpu_gb * 1e9)
        found = tuple(Gpu(i, "NVIDIA H200", size, size, "1") for i in range(num_gpus))
        monkeypatch.setattr(environment, "gpus", lambda: found)
        monkeypatch.setattr(environment, "torch_has_cuda", lambda: num_gpus > 0)
        monkeypatch.setattr(environment, "memory", lambda: Memory(int(memory_gb * 1e9), int(memory_gb * 1e9)))

    return give


@pytest.mark.parametrize(
    ("devices", "has_gpus", "count", "fits"),
    [
        ((141e9,), True, 1, True),
        ((99e9,), True, 1, False),
        ((99e9,), True, 2, False),
        ((99e9, 80e9), True, 2, True),
        ((99e9, 50e9), True, 2, False),
        ((99e9,) * 4, True, 4, None),
        ((128e9,), False, 1, True),
        ((), False, 1, None),
    ],
)
def test_each_device_must_hold_its_part(
    devices: tuple[float, ...], has_gpus: bool, count: int, fits: bool | None
) -> None:
    assert Machine(tuple(map(int, devices)), has_gpus).fits(NEEDS, count) is fits


def test_the_device_option_says_what_is_looked_at(machine: Callable[..., None]) -> None:
    machine(2, gpu_gb=141, memory_gb=64)
    assert this_machine("auto").describe() == "2 GPUs of 141 GB"
    assert this_machine("cuda:1").describe() == "1 GPU of 141 GB"
    assert this_machine("cpu").describe() == "no GPU that can be used, 64 GB of memory"
    machine(0, memory_gb=15.5)
    assert this_machine("auto").describe() == "no GPU that can be used, 15.5 GB of memory"


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-flash-dspark", "deepseek-v4-flash-preview"])
def test_a_model_that_cannot_fit_is_refused_with_numbers_and_nothing_is_fetched(
    name: str, machine: Callable[..., None], hub: Hub, main: Cli
) -> None:
    machine(1, gpu_gb=141)
    done = main("run", name, "hello")
    assert done.code == 4
    assert done.error.startswith(f"{name} needs 1 x 1")
    assert "8 x 2" in done.error and "this machine has 1 GPU of 141 GB" in done.error
    assert hub.requests == []


def test_what_is_not_here_and_may_not_be_fetched_is_not_found(machine: Callable[..., None], main: Cli) -> None:
    machine(0, memory_gb=16)
    done = main("run", "deepseek-v4-flash", "--offline", "hello")
    assert (done.code, "sparkchat pull deepseek-v4-flash" in done.error) == (3, True)


def test_batch_refuses_it_as_well(machine: Callable[..., None], hub: Hub, main: Cli) -> None:
    machine(0, memory_gb=16)
    done = main("batch", "deepseek-v4-flash")
    assert (done.code, hub.requests) == (4, [])
    assert "no GPU that can be used, 16 GB of memory" in done.error


def test_a_model_that_fits_goes_on_to_be_fetched(machine: Callable[..., None], hub: Hub, main: Cli) -> None:
    machine(1, gpu_gb=288)
    done = main("run", "deepseek-v4-flash", "hello")
    assert done.code != 4
    assert hub.requests


def test_where_more_devices_hold_it_their_number_is_named(machine: Callable[..., None], hub: Hub, main: Cli) -> None:
    machine(4, gpu_gb=141)
    done = main("run", "deepseek-v4-flash", "hello")
    assert (done.code, hub.requests) == (4, [])
    assert done.error.endswith("this machine has 4 GPUs of 141 GB; give --tp 2")
    done = main("run", "deepseek-v4-flash", "--tp", "2", "hello")
    assert done.code != 4
    assert hub.requests


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("deepseek-v4-flash", ("--tp", "4"), "--tp 4: NVIDIA GPUs to use: 2; give --tp 2 or fewer"),
        ("deepseek-v4-flash", ("--tp", "2", "--device", "cuda:1"), "--tp 2: NVIDIA GPUs to use: 1"),
        ("deepseek-v4-flash", ("--tp", "3"), "--tp 3: deepseek-v4-flash is shared by 1, 2, 4, 8 devices"),
        ("qwen3-8b", ("--tp", "2"), "--tp 2: qwen3-8b is not DeepSeek V4"),
    ],
)
def test_devices_that_are_not_there_or_cannot_share_are_refused(
    model: str, flags: tuple[str, ...], words: str, machine: Callable[..., None], hub: Hub, main: Cli
) -> None:
    machine(2, gpu_gb=141)
    done = main("run", model, *flags, "hello")
    assert (done.code, hub.requests) == (2, [])
    assert words in done.error


def test_a_cost_table_is_that_of_so_many_devices(machine: Callable[..., None]) -> None:
    machine(2, gpu_gb=141)
    for flags, name in (({}, "NVIDIA H200"), ({"tp": 2}, "2 x NVIDIA H200"), ({"tp": 2, "device": "cpu"}, "cpu")):
        assert cost_device(resolve_options(None, flags, {})) == name


def test_show_prints_the_plan(machine: Callable[..., None], main: Cli) -> None:
    machine(4, gpu_gb=141)
    done = main("show", "deepseek-v4-flash")
    assert done.code == 0
    lines = dict(line.split("  ", 1) for line in done.out.splitlines() if "  " in line)
    shown = {key: value.strip() for key, value in lines.items()}
    assert shown["memory"] == "1 x 174 GB, 2 x 91 GB, 4 x 49 GB, 8 x 29 GB (an estimate, by number of devices)"
    assert shown["machine"] == "4 GPUs of 141 GB, fits on 2 or 4"
    assert shown["drafter"] == "in the model's own checkpoint"
    report = main("show", "deepseek-v4-flash", "--json").json
    assert report["settings"]["model.min_memory_gb"]["value"] == {"1": 174.0, "2": 91.0, "4": 49.0, "8": 29.0}


def v4_folder(folder: Path, **keys: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **keys}))
    return folder


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"dspark_block_size": 5, "num_nextn_predict_layers": 1}, "dspark"),
        ({"num_nextn_predict_layers": 1}, "mtp"),
        ({"num_nextn_predict_layers": 0}, None),
        ({"model_type": "qwen3", "num_nextn_predict_layers": 1}, None),
    ],
)
def test_a_local_checkpoint_brings_its_own_drafter(keys: dict[str, object], kind: str | None, tmp_path: Path) -> None:
    folder = v4_folder(tmp_path / "v4", **keys)
    assert inner_drafter_kind(folder) == kind
    found = find_drafter(None, find_model(str(folder), user_paths()), user_paths())
    assert found.is_inner is found.is_present is (kind is not None)
    assert not find_drafter("none", find_model(str(folder), user_paths()), user_paths()).is_present


def test_the_inner_drafter_is_loaded_from_the_models_folder(
    main: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[RunConfig] = []

    def keep(config: RunConfig, *_: object) -> int:
        kept.append(config)
        return 0

    monkeypatch.setattr("sparkchat.ui.plain.run_one_shot", keep)
    folder = v4_folder(tmp_path / "v4", dspark_block_size=5)
    assert main("run", folder, "hello").code == 0
    assert main("run", folder, "--drafter", "none", "hello").code == 0
    assert [config.spec.drafter_path for config in kept] == [str(folder), None]
    assert kept[0].spec.model_path == str(folder)


def test_thinking_can_be_asked_of_a_local_checkpoint_without_a_template(tmp_path: Path, model_folder: Path) -> None:
    assert has_thinking(find_model(str(v4_folder(tmp_path / "v4")), user_paths()))
    assert not has_thinking(find_model(str(model_folder), user_paths()))


def test_a_profile_that_asks_for_another_drafter_than_there_is_is_refused(write_profile: Write, tmp_path: Path) -> None:
    folder = v4_folder(tmp_path / "v4", dspark_block_size=5)
    write_profile("mine", f"[model]\npath = '{folder}'\n[drafter]\nkind = 'mtp'\n")
    with pytest.raises(UsageError, match=r"asks for a mtp drafter .*, which carries a dspark"):
        find_drafter(None, find_model("mine", user_paths()), user_paths())
    with pytest.raises(UsageError, match=r"^shipped profile deepseek-v4-flash-preview asks for a mtp drafter"):
        find_drafter(None, find_model(str(folder), user_paths(), "deepseek-v4-flash-preview"), user_paths())
