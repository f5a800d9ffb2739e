"""Headers whose sizes are none: nothing is computed in them, and they never end in another error than their own."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.pairs import CPU, Pair, make_pair
from sparkchat.errors import DamagedFile
from sparkchat.headers import UnreadableHeader, bytes_reader, read_safetensors
from sparkchat.models import load_target


def header_of(shape: str) -> bytes:
    text = f'{{"w": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 8]}}}}'.encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "shape",
    [
        "[1e999]",
        "[Infinity]",
        "[2.5]",
        "[-2]",
        "[true]",
        '"2"',
        "null",
        "2",
        "[[2]]",
        "[1000000000000000000000000000000]",
    ],
)
def test_a_plan_is_made_of_no_impossible_header(shape: str) -> None:
    assert read_safetensors(bytes_reader(header_of("[2]")))[0].shape == (2,)
    with pytest.raises(UnreadableHeader):
        read_safetensors(bytes_reader(header_of(shape)))


@pytest.mark.parametrize("changes", [{"num_attention_heads": 1 << 24, "head_dim": 1 << 24}, {"head_dim": 1 << 24}])
def test_nothing_is_made_in_the_sizes_of_a_damaged_config(
    changes: dict[str, Any], build_once: Callable[..., Any], tmp_path: Path
) -> None:
    pair: Pair = build_once("models-refused", lambda folder: make_pair(folder, "qwen3"))
    config = json.loads((pair.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(pair.folder / "model.safetensors")
    with pytest.raises(DamagedFile, match=r"q_proj.weight has shape"):
        load_target(tmp_path, device=CPU)


@pytest.mark.parametrize(
    "name", ["a\0b.safetensors", "\ud800.safetensors", "a\nb.safetensors", "a" * 300 + ".safetensors"]
)
def test_a_shard_that_no_folder_can_hold_is_named_in_few_words(
    name: str, build_once: Callable[..., Any], tmp_path: Path
) -> None:
    pair: Pair = build_once("models-refused", lambda folder: make_pair(folder, "qwen3"))
    (tmp_path / "config.json").symlink_to(pair.folder / "config.json")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(DamagedFile, match=r"which is no \.safetensors beside it") as caught:
        load_target(tmp_path, device=CPU)
    assert caught.value.message.isprintable() and len(caught.value.message) < 300
