"""Damaged or mismatched files are named in one line; numbers that are none never turn into text or into bad JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.harness import MODES, Outcome, Runner, assert_same, open_runner, random_prompts
from fixtures import bigram, mix
from fixtures.checkpoint import write_json

OpenRunner = Callable[..., Runner]
ALL_MODES = ("off", *MODES)


def copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def edit_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | changes)


NORM = "model.layers.0.input_layernorm.weight"
BREAKS: dict[str, Callable[[Path], None]] = {
    "weights half there": lambda f: truncate(f / "model.safetensors", 0.5),
    "last byte missing": lambda f: truncate(f / "model.safetensors", 1 - 1e-6),
    "empty weights": lambda f: truncate(f / "model.safetensors", 0),
    "header of a giant": lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
    "weights are text": lambda f: (f / "model.safetensors").write_text("<html>429</html>" * 10),
    "tensor missing": lambda f: edit_tensor(f, NORM, lambda t: None),
    "tensor of another shape": lambda f: edit_tensor(f, NORM, lambda t: t[:-1].clone()),
    "config cut": lambda f: truncate(f / "config.json", 0.5),
    "config is a list": lambda f: (f / "config.json").write_text("[]"),
    "config without sizes": lambda f: (f / "config.json").write_text('{"model_type": "qwen3"}'),
    "more layers than weights": lambda f: edit_config(f, num_hidden_layers=9, layer_types=["full_attention"] * 9),
    "shard not there": lambda f: write_json(
        f / "model.safetensors.index.json", {"weight_map": {NORM: "model-00001-of-00002.safetensors"}}
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_target_is_refused_in_one_line(name: str, tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import DamagedFile

    folder = copied(mix_folders["target"], tmp_path / "broken")
    if name == "shard not there":
        (folder / "model.safetensors").unlink()
    BREAKS[name](folder)
    with pytest.raises(DamagedFile) as caught:
        open_runner(folder)
    assert "broken" in caught.value.message or "safetensors" in caught.value.message or "config" in caught.value.message


@pytest.mark.parametrize("name", ["weights half there", "empty weights", "config cut", "config is a list"])
def test_broken_drafter_is_refused_in_one_line(name: str, tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import DamagedFile

    folder = copied(mix_folders["oracle"], tmp_path / "broken")
    BREAKS[name](folder)
    with pytest.raises(DamagedFile):
        open_runner(mix_folders["target"], folder)


def test_broken_tokenizer_is_refused(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import SparkchatError

    folder = copied(mix_folders["target"], tmp_path / "broken")
    truncate(folder / "tokenizer.json", 0.5)
    with pytest.raises(SparkchatError) as caught:
        open_runner(folder)
    assert "token" in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}, {"architectures": [], "model_type": "qwen3x"}],
    ids=str,
)
def test_unknown_architecture_is_named(changes: dict[str, Any], tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import SparkchatError

    folder = copied(mix_folders["target"], tmp_path / "other")
    edit_config(folder, **changes)
    with pytest.raises(SparkchatError, match=r"(?i)nosuch|architectures"):
        open_runner(folder)


MISMATCHES: dict[str, dict[str, Any]] = {
    "layer that the target lacks": {"target_layer_ids": [0, 9]},
    "layers out of order": {"target_layer_ids": [2, 0]},
    "mask token outside the vocabulary": {"mask_token_id": 5000},
    "other target depth": {"num_target_layers": 36},
    "unknown head": {"markov_head_type": "quantum"},
    "not a drafter": {"architectures": ["Qwen3ForCausalLM"], "target_layer_ids": None, "block_size": None},
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_drafter_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    from sparkchat.errors import SparkchatError

    table = mix.mix_table()
    target = mix.write_mix(tmp_path / "target", table)
    changes = bigram.BigramDrafter(config_changes=MISMATCHES[name])
    drafter = bigram.write_bigram_drafter(
        tmp_path / "drafter", table, changes, shape=mix.MIX_SHAPE, target_layers=(0, 2)
    )
    with pytest.raises(SparkchatError):
        open_runner(target, drafter)


def test_drafter_of_another_model_is_refused_with_the_sizes(tiny_pair: Any, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import SparkchatError

    for target, drafter in ((mix_folders["target"], tiny_pair.drafter), (tiny_pair.target, mix_folders["oracle"])):
        with pytest.raises(SparkchatError, match=r"64.*576|576.*64"):
            open_runner(target, drafter)


def test_nan_in_the_head_is_an_error_and_no_text(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import DamagedFile

    folder = copied(mix_folders["target"], tmp_path / "nan")

    def spoil(head: torch.Tensor) -> torch.Tensor:
        head[333, 7] = float("nan")
        return head

    edit_tensor(folder, "lm_head.weight", spoil)
    try:
        opened = open_runner(folder, mix_folders["oracle"])
    except DamagedFile:
        return
    for outcome in opened.watch({"prompt_ids": [301], "mode": mode, "max_tokens": 5} for mode in ALL_MODES):
        assert outcome.result["finish_reason"] == "error"
        assert "not numbers" in outcome.result["error"] or "NaN" in outcome.result["error"]
        assert outcome.ids == []
        check_strict(outcome)


def test_nan_of_one_embedding_ends_its_request_and_no_other(tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    folder = copied(mix_folders["target"], tmp_path / "nan")
    bad_token = 77

    def spoil(embedding: torch.Tensor) -> torch.Tensor:
        embedding[bad_token] = float("inf")
        return embedding

    edit_tensor(folder, "model.embed_tokens.weight", spoil)
    opened = open_runner(folder, mix_folders["oracle"])
    good = {"prompt_ids": [301, 302], "mode": "static", "max_tokens": 20}
    first, second, third = opened.watch([good, {**good, "prompt_ids": [301, bad_token]}, good])
    assert second.result["finish_reason"] == "error"
    assert second.ids == []
    assert first.ids == third.ids == open_runner(mix_folders["target"]).ids([{**good, "mode": "off"}])[0]
    # The rows that held the damage are used again and hold none of it.
    assert [o.ids for o in opened.watch([good] * 8)] == [first.ids] * 8


def check_strict(outcome: Outcome) -> None:
    for event in outcome.events:
        json.dumps(event, allow_nan=False)


CONFIDENCE = "confidence_head.proj.weight"
SPOILED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "confidence is nan": (CONFIDENCE, lambda t: torch.full_like(t, float("nan"))),
    "confidence is infinite": (CONFIDENCE, lambda t: torch.full_like(t, float("inf"))),
    "confidence overflows": (CONFIDENCE, lambda t: torch.full_like(t, 1e30)),
    "confidence underflows": (CONFIDENCE, lambda t: torch.full_like(t, -1e30)),
    "draft law is nan": ("markov_head.markov_w2.weight", lambda t: torch.full_like(t, float("nan"))),
    "draft law overflows": ("markov_head.markov_w2.weight", lambda t: t * 1e38),
    "drafter norm is nan": ("norm.weight", lambda t: torch.full_like(t, float("nan"))),
}
FINITE = ("confidence overflows", "confidence underflows")


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_drafter_never_changes_a_token(name: str, tmp_path: Path, mix_folders: dict[str, Path]) -> None:
    from sparkchat.errors import DamagedFile

    drafter = copied(mix_folders["oracle"], tmp_path / "spoiled")
    edit_tensor(drafter, *SPOILED[name])
    target, prompts = mix_folders["target"], random_prompts(3, 20)
    if name in FINITE:
        opened = open_runner(target, drafter)
    else:
        try:
            opened = open_runner(target, drafter)
        except DamagedFile:
            return
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        plain = opened.ids({"prompt_ids": p, "mode": "off", "max_tokens": 25, **options} for p in prompts)
        for mode in MODES:
            for prompt, ids, outcome in zip(
                prompts,
                plain,
                opened.watch({"prompt_ids": p, "mode": mode, "max_tokens": 25, **options} for p in prompts),
                strict=True,
            ):
                check_strict(outcome)
                if outcome.result["finish_reason"] == "error":
                    # Weights that are no numbers may be refused; numbers, however large, have to work.
                    assert name not in FINITE, outcome.result["error"]
                    assert "drafter" in outcome.result["error"]
                elif not options:
                    assert_same(target, [prompt], [outcome.ids], [ids])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_every_event_is_strict_json_under_hard_filters(
    mode: str, mix_folders: dict[str, Path], runner: OpenRunner
) -> None:
    lines = [
        {"prompt_ids": [301], "mode": mode, "max_tokens": n, "temperature": t, "top_k": 1, "top_p": 0.1, "seed": 1}
        for t in (0.0, 1.0)
        for n in (1, 2, 20)
    ]
    lines.append({"prompt_ids": [301], "mode": mode, "max_tokens": 5, "temperature": 1e-6, "seed": 1})
    for kind in ("oracle", "anti"):
        for outcome in runner(mix_folders["target"], mix_folders[kind]).watch(lines):
            assert outcome.result["error"] is None
            check_strict(outcome)
            if outcome.result["speculation"]["num_steps"] == 0:
                assert outcome.result["speculation"]["mean_acceptance_length"] is None
                assert outcome.result["timing"]["tokens_per_second"] is None
