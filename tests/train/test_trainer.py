"""Whole runs on a toy: losses fall, cycles resume, the drafter folder is what its readers expect."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparkchat.cli.train import _lengths, _loss_sampling, train
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.checkpoint import STATE_FILE
from sparkchat.train.config import OPTIMIZERS, DataPlan, DrafterShape, Recipe
from sparkchat.train.data import FRESH, TrainingData, prepare_data
from sparkchat.train.run import TrainingRun, run_training
from sparkchat.train.step import AgreementMeter
from sparkchat.train.target import Target
from sparkchat.train.trainer import Trainer, schedule
from sparkchat.train.writer import background_writer

SHAPE = DrafterShape(num_layers=2, block_size=4, markov_rank=8, draft_vocab_size=128, num_taps=3)
PLAN = DataPlan(tokens=1024, wave_tokens=1024, lengths=(64,), held_out_rows=4, held_out_length=64, num_questions=64)
RECIPE = Recipe(max_steps=2, tokens_per_batch=256, slots_per_sequence=512, learning_rate=3e-3)


@pytest.fixture(scope="module")
def data(target: Target, tokens: ChatTokens, tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    return prepare_data(target, tokens, PLAN, tmp_path_factory.mktemp("data"), lambda _: None)


def make_trainer(target: Target, tokens: ChatTokens, data: TrainingData, out: Path, recipe: Recipe = RECIPE) -> Trainer:
    return Trainer(target, tokens, data, SHAPE, recipe, out, lambda _: None)


@pytest.mark.parametrize(
    ("sampling", "optimizer"), [(((1.0, 1.0),), "adamw"), (((0.7, 1.0), (0.5, 1.1)), "adamw"), (((1.0, 1.0),), "muon")]
)
def test_loss_falls_on_a_fixed_batch(
    target: Target,
    tokens: ChatTokens,
    data: TrainingData,
    tmp_path: Path,
    sampling: tuple[tuple[float, float], ...],
    optimizer: str,
) -> None:
    learning_rate = 2e-2 if optimizer == "muon" else 3e-3
    recipe = dataclasses.replace(RECIPE, loss_sampling=sampling, optimizer=optimizer, learning_rate=learning_rate)
    trainer = make_trainer(target, tokens, data, tmp_path, recipe)
    batch = next(iter(trainer.stream))
    meter = AgreementMeter.empty(SHAPE.block_size, "cpu")
    totals = [trainer.step(batch, 0.1, meter)[0].item() for _ in range(12)]
    assert all(torch.tensor(totals).isfinite())
    assert totals[-1] < 0.7 * totals[0]


def test_only_the_drafter_is_trained(target: Target, tokens: ChatTokens, data: TrainingData, tmp_path: Path) -> None:
    before = target.embedding.clone(), target.layers[2].qkv.clone()
    trainer = make_trainer(target, tokens, data, tmp_path)
    old = {name: value.detach().clone() for name, value in trainer.drafter.named_parameters()}
    trainer.run()
    assert torch.equal(before[0], target.embedding) and torch.equal(before[1], target.layers[2].qkv)
    still = [name for name, value in trainer.drafter.named_parameters() if torch.equal(value, old[name])]
    assert still == []


def test_exported_folder_has_the_published_layout(
    target: Target, tokens: ChatTokens, data: TrainingData, tmp_path: Path
) -> None:
    trained = make_trainer(target, tokens, data, tmp_path).run()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["target_layer_ids"] == [1, 2, 3]
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (4, 3, 128)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["fc.weight"].shape == (32, 96)
    assert weights["markov_head.markov_w1.weight"].shape == (target.shape.vocab_size, 8)
    assert weights["markov_head.markov_w2.weight"].shape == (128, 8)
    assert weights["confidence_head.proj.weight"].shape == (1, 40)
    assert weights["layers.1.self_attn.k_norm.weight"].shape == (8,)
    assert "embed_tokens.weight" not in weights and "lm_head.weight" not in weights
    assert {value.dtype for name, value in weights.items() if name != "d2t"} == {torch.bfloat16}
    ids = torch.arange(128) + weights["d2t"]
    assert torch.equal(ids, trained.head.draft_to_target)
    assert set(tokens.special) <= set(ids.tolist())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_cycle_resumes_where_the_last_one_ended(
    target: Target, tokens: ChatTokens, data: TrainingData, tmp_path: Path, optimizer: str
) -> None:
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer)
    trainer = make_trainer(target, tokens, data, tmp_path, recipe)
    first = trainer.run()
    second = make_trainer(target, tokens, data, tmp_path, recipe)
    assert (second.num_steps, second.cycle) == (2, 1)
    moments, old_moments = second.optimizer.state_tensors(), trainer.optimizer.state_tensors()
    assert moments.keys() == old_moments.keys() and all(
        torch.equal(moments[name], old_moments[name]) for name in moments
    )
    assert ("muon/fc.weight/momentum_buffer" in moments) is (optimizer == "muon")
    for (name, old), new in zip(first.drafter.named_parameters(), second.drafter.parameters(), strict=True):
        assert torch.equal(old, new), name
    assert torch.equal(first.drafter.feature_scale, second.drafter.feature_scale)
    assert second.run().num_steps == 4
    with pytest.raises(UsageError, match="another shape"):
        Trainer(target, tokens, data, dataclasses.replace(SHAPE, markov_rank=4), RECIPE, tmp_path, lambda _: None)
    other = dataclasses.replace(recipe, optimizer="adamw" if optimizer == "muon" else "muon")
    with pytest.raises(UsageError, match="another optimiser"):
        make_trainer(target, tokens, data, tmp_path, other)
    (tmp_path / STATE_FILE).write_bytes(b"not a state")
    with pytest.raises(DamagedFile, match=STATE_FILE):
        make_trainer(target, tokens, data, tmp_path)


def test_a_finished_drafter_can_be_the_start(
    target: Target, tokens: ChatTokens, data: TrainingData, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    first = make_trainer(target, tokens, data, tmp_path / "first").run()
    recipe = dataclasses.replace(RECIPE, start_from=tmp_path / "first")
    second = make_trainer(target, tokens, data, tmp_path / "second", recipe)
    assert torch.equal(first.head.draft_to_target, second.head.draft_to_target)
    features = torch.randn(2, 5, 96)
    torch.testing.assert_close(first.drafter.context(features), second.drafter.context(features), atol=0.02, rtol=0.02)


def run_of(toy_folder: Path, out: Path, **changes: object) -> TrainingRun:
    settings = {"target": toy_folder, "out": out, "data": out / "data", "device": "cpu", "shape": SHAPE, "plan": PLAN}
    return TrainingRun(**{**settings, "recipe": RECIPE, "eval_prompts": 2, "eval_tokens": 8, **changes})


def test_a_whole_run_measures_what_it_trained(toy_folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    assert run_training(run_of(toy_folder, tmp_path), lines.append) == tmp_path
    results = json.loads((tmp_path / "acceptance.json").read_text())
    assert [r["setting"]["name"] for r in results][:4] == ["t0.7", "preset", "t1.0", "t0"]
    for result in results:
        assert 0 <= result["acceptance_length"] <= SHAPE.block_size + 1
        assert result["survival"] == sorted(result["survival"], reverse=True)
        assert (tmp_path / f"confidence-{result['setting']['name']}.npz").is_file()
    assert any("trained 2 steps" in line for line in lines)


def test_conversations_written_on_a_second_device_are_trained_on(
    toy_folder: Path, tokens: ChatTokens, target: Target, tmp_path: Path
) -> None:
    with background_writer(toy_folder, "cpu", PLAN, tmp_path):
        deadline = time.monotonic() + 60
        while len(list((tmp_path / FRESH).glob("*.npz"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    data = prepare_data(target, tokens, PLAN, tmp_path, lambda _: None)
    fresh = sorted((tmp_path / FRESH).glob("*.npz"))
    assert len(fresh) >= 2
    trainer = make_trainer(target, tokens, data, tmp_path)
    assert len(trainer.stream.waves) == len(data.training) + len(fresh)
    seen = {row.numpy().tobytes() for wave in trainer.stream.waves for row in wave.ids.int()}
    assert len(seen) > 0.8 * sum(len(wave.ids) for wave in trainer.stream.waves), "waves repeat each other"


def test_the_command_trains(toy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command = make_command(toy_folder, tmp_path)
    run_command(steps=1)
    assert (tmp_path / "model.safetensors").is_file()
    assert f"--drafter {tmp_path}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="give one of them"):
        run_command(steps=1, minutes=1.0)


def make_command(toy_folder: Path, out: Path) -> Callable[..., None]:
    def call(**changes: object) -> None:
        small = {"tokens": 256, "wave_tokens": 256, "row_lengths": "64", "held_out_rows": 2, "taps": 3}
        tiny = {"draft_vocab": 64, "markov_rank": 4, "batch_tokens": 128, "eval_prompts": 0, "device": "cpu"}
        train(**{"target": str(toy_folder), "out": out, **small, **tiny, **changes})

    return call


@pytest.mark.parametrize("text", ["", "x", "0.7/", "0.7/1/2", "0.7,,1"])
def test_bad_loss_temperatures_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--loss-temperature"):
        _loss_sampling(text)


def test_option_lists_are_read() -> None:
    assert _loss_sampling("0.7,0.5/1.1") == ((0.7, 1.0), (0.5, 1.1))
    assert _lengths("512, 1024") == (512, 1024)
    with pytest.raises(UsageError, match="--row-lengths"):
        _lengths("512,8")


def test_settings_that_cannot_work_are_refused() -> None:
    for bad in ({"minutes": 0.0}, {"loss_sampling": ((0.0, 1.0),)}, {"short_block_share": 1.5}):
        with pytest.raises(UsageError):
            Recipe(**bad)
    with pytest.raises(UsageError, match="block_size"):
        DrafterShape(block_size=0)


@pytest.mark.parametrize(
    ("shape", "start_from", "said"),
    [
        ({"num_taps": 30}, None, "30 taps of a target"),
        ({"mask_token_id": 10**6}, None, "--mask-token-id 1000000 is not a token"),
        ({}, Path("/no/drafter"), "--start-from /no/drafter holds no"),
    ],
)
def test_what_does_not_fit_the_target_is_said_before_anything_is_written(
    shape: dict[str, int], start_from: Path | None, said: str, toy_folder: Path, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPE, start_from=start_from)
    run = TrainingRun(
        toy_folder,
        tmp_path,
        tmp_path / "data",
        "cpu",
        dataclasses.replace(SHAPE, **shape),
        PLAN,
        recipe,
        eval_prompts=0,
    )
    with pytest.raises(SparkchatError, match=said):
        run_training(run, lambda _: None)
    assert not (tmp_path / "data").exists()


def test_a_missing_gpu_is_said(toy_folder: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match="--device cuda"):
        run_training(run_of(toy_folder, tmp_path, device="cuda"), lambda _: None)


def test_schedule_warms_up_and_ends_at_zero() -> None:
    assert schedule(0.0, 0.04) < 0.05
    assert schedule(0.04, 0.04) == pytest.approx(1.0)
    assert schedule(1.0, 0.04) == pytest.approx(0.0)
