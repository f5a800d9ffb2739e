"""Checkpoints in the published layout are read exactly, a rank's part at a time, and refused where they are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.deepseek_v4 import (
    FULL_SIZES,
    full_layout,
    parsed,
    random_weights,
    rounded_weights,
    shard_of,
    stored_weights,
    v4_config,
    write_shards,
    write_tiny_v4,
)
from sparkchat.errors import DamagedFile, ModelNotFound, SparkchatError, UsageError
from sparkchat.models.deepseek_v4.formats import Stored, dense
from sparkchat.models.deepseek_v4.headers import read_headers
from sparkchat.models.deepseek_v4.layout import trunk_layout
from sparkchat.models.deepseek_v4.weights import CheckpointSource, check_ranks, drafter_layout, stored_form

EXPERT = {
    "w1": ("I8", (2048, 2048), (2048, 128)),
    "w2": ("I8", (4096, 1024), (4096, 64)),
    "w3": ("I8", (2048, 2048), (2048, 128)),
}
SHARED = {
    "w1": ("F8_E4M3", (2048, 4096), (16, 32)),
    "w2": ("F8_E4M3", (4096, 2048), (32, 16)),
    "w3": ("F8_E4M3", (2048, 4096), (16, 32)),
}
ATTENTION = {
    "wq_a": ("F8_E4M3", (1024, 4096), (8, 32)),
    "wq_b": ("F8_E4M3", (32768, 1024), (256, 8)),
    "wkv": ("F8_E4M3", (512, 4096), (4, 32)),
    "wo_a": ("F8_E4M3", (8192, 4096), (64, 32)),
    "wo_b": ("F8_E4M3", (4096, 8192), (32, 64)),
}


def scaled(prefix: str, table: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (dtype, shape, scales) in table.items():
        found |= {f"{prefix}{name}.weight": (dtype, shape), f"{prefix}{name}.scale": ("F8_E8M0", scales)}
    return found


def published_layer(prefix: str) -> dict[str, Any]:
    """A window layer of DeepSeek-V4-Flash without its router's own tensor, from the headers of the release."""
    names: dict[str, Any] = scaled(f"{prefix}attn.", ATTENTION)
    for expert in range(256):
        names |= scaled(f"{prefix}ffn.experts.{expert}.", EXPERT)
    names |= scaled(f"{prefix}ffn.shared_experts.", SHARED)
    for kind in ("attn", "ffn"):
        names |= {
            f"{prefix}{kind}_norm.weight": ("BF16", (4096,)),
            f"{prefix}hc_{kind}_fn": ("F32", (24, 16384)),
            f"{prefix}hc_{kind}_base": ("F32", (24,)),
            f"{prefix}hc_{kind}_scale": ("F32", (3,)),
        }
    return names | {
        f"{prefix}attn.q_norm.weight": ("BF16", (1024,)),
        f"{prefix}attn.kv_norm.weight": ("BF16", (512,)),
        f"{prefix}attn.attn_sink": ("F32", (64,)),
        f"{prefix}ffn.gate.weight": ("BF16", (256, 4096)),
    }


def compressor(prefix: str, ratio: int, width: int, size: int) -> dict[str, Any]:
    return {
        f"{prefix}wkv.weight": ("BF16", (width, 4096)),
        f"{prefix}wgate.weight": ("BF16", (width, 4096)),
        f"{prefix}ape": ("F32", (ratio, width)),
        f"{prefix}norm.weight": ("BF16", (size,)),
    }


def hyper_head(prefix: str) -> dict[str, Any]:
    shapes = {"fn": (4, 16384), "base": (4,), "scale": (1,)}
    return {f"{prefix}hc_head_{name}": ("F32", shape) for name, shape in shapes.items()}


def published(names: dict[str, Any], layout: dict[str, Any], prefix: str) -> None:
    """Compare the stored forms under a prefix with those of the release."""
    ours = {n: (dtype, shape) for n, dtype, shape in stored_form(layout) if n.startswith(prefix)}
    assert ours == names


@pytest.fixture(scope="module")
def full_trunk() -> dict[str, Any]:
    return trunk_layout(parsed(v4_config(FULL_SIZES)))


def test_a_hash_routed_layer_has_the_published_tensors(full_trunk: dict[str, Any]) -> None:
    names = published_layer("layers.1.") | {"layers.1.ffn.gate.tid2eid": ("I64", (129280, 6))}
    published(names, full_trunk, "layers.1.")


def test_an_indexed_layer_has_the_published_tensors(full_trunk: dict[str, Any]) -> None:
    attn = "layers.2.attn."
    names = published_layer("layers.2.") | {"layers.2.ffn.gate.tid2eid": ("I64", (129280, 6))}
    names |= compressor(f"{attn}compressor.", 4, 1024, 512) | compressor(f"{attn}indexer.compressor.", 4, 256, 128)
    names |= scaled(f"{attn}indexer.", {"wq_b": ("F8_E4M3", (8192, 1024), (64, 8))})
    names[f"{attn}indexer.weights_proj.weight"] = ("BF16", (64, 4096))
    published(names, full_trunk, "layers.2.")


def test_a_heavily_compressed_layer_has_the_published_tensors(full_trunk: dict[str, Any]) -> None:
    names = published_layer("layers.3.") | {"layers.3.ffn.gate.bias": ("F32", (256,))}
    names |= compressor("layers.3.attn.compressor.", 128, 512, 512)
    published(names, full_trunk, "layers.3.")


def test_the_rest_of_the_trunk_has_the_published_tensors(full_trunk: dict[str, Any]) -> None:
    rest = {name: spec for name, spec in full_trunk.items() if not name.startswith("layers.")}
    table = ("BF16", (129280, 4096))
    names = {"embed.weight": table, "head.weight": table, "norm.weight": ("BF16", (4096,))} | hyper_head("")
    published(names, rest, "")


def test_the_drafter_has_the_published_tensors() -> None:
    layout = drafter_layout(parsed(v4_config(FULL_SIZES)))
    names: dict[str, Any] = {}
    for stage in range(3):
        names |= published_layer(f"mtp.{stage}.") | {f"mtp.{stage}.ffn.gate.bias": ("F32", (256,))}
    names |= scaled("mtp.0.", {"main_proj": ("F8_E4M3", (4096, 12288), (32, 96))}) | hyper_head("mtp.2.")
    names |= {
        "mtp.0.main_norm.weight": ("BF16", (4096,)),
        "mtp.2.norm.weight": ("BF16", (4096,)),
        "mtp.2.markov_head.markov_w1.weight": ("BF16", (129280, 256)),
        "mtp.2.markov_head.markov_w2.weight": ("BF16", (129280, 256)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 4352)),
    }
    published(names, layout, "mtp.")


def test_the_previews_block_has_the_published_tensors() -> None:
    layout = drafter_layout(parsed(v4_config(FULL_SIZES, drafter="mtp")))
    names = published_layer("mtp.0.") | {"mtp.0.ffn.gate.bias": ("F32", (256,))} | hyper_head("mtp.0.")
    square = ("F8_E4M3", (4096, 4096), (32, 32))
    names |= scaled("mtp.0.", {"e_proj": square, "h_proj": square})
    names |= {f"mtp.0.{name}.weight": ("BF16", (4096,)) for name in ("enorm", "hnorm", "norm")}
    assert len(names) == 1575
    published(names, layout, "mtp.")


def same(ours: Stored, wanted: torch.Tensor) -> bool:
    return torch.equal(dense(ours, wanted.dtype), wanted)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_v4(tmp_path_factory.mktemp("v4") / "tiny")


CONFIG = parsed(v4_config())
LAYOUT = full_layout(CONFIG)


def test_every_tensor_is_read_as_it_was_written(tiny: Path) -> None:
    source = CheckpointSource(tiny, CONFIG, LAYOUT)
    for name, wanted in rounded_weights(CONFIG, random_weights(CONFIG)).items():
        assert same(source.take(name), wanted), name
    source.finish()


def test_files_are_closed_once_read_and_only_one_layer_is_open(tiny: Path) -> None:
    source = CheckpointSource(tiny, CONFIG, LAYOUT)
    assert source.num_open == 0
    most = 0
    for name in sorted(LAYOUT, key=lambda name: shard_of(name, CONFIG)):
        source.take(name)
        most = max(most, source.num_open)
    assert most == 1
    assert source.num_open == 0


def test_a_target_alone_leaves_the_drafters_files_unread(tiny: Path, tmp_path: Path) -> None:
    trunk = trunk_layout(CONFIG)
    source = CheckpointSource(tiny, CONFIG, trunk)
    assert "mtp.0.main_norm.weight" not in source.layout
    for name in trunk:
        source.take(name)
    source.finish()


def test_what_a_loader_forgets_is_noticed(tiny: Path) -> None:
    source = CheckpointSource(tiny, CONFIG, LAYOUT)
    for name in LAYOUT:
        if name != "layers.3.attn.attn_sink":
            source.take(name)
    with pytest.raises(ValueError, match=r"1 tensors were not taken, first layers\.3\.attn\.attn_sink"):
        source.finish()


SPLIT_ROWS = (
    "embed.weight",
    "head.weight",
    "attn.wq_b.weight",
    "attn.wo_a.weight",
    "attn.attn_sink",
    "markov_w2.weight",
)
SPLIT_EXPERTS = ("w1.weight", "w3.weight")
SPLIT_COLUMNS = ("attn.wo_b.weight", "w2.weight")


def part_axis(name: str) -> int | None:
    if "indexer" in name or "markov_w1" in name:
        return None
    if name.endswith(SPLIT_ROWS) or (".ffn." in name and name.endswith(SPLIT_EXPERTS)):
        return 0
    return 1 if name.endswith(SPLIT_COLUMNS) and "markov" not in name else None


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_together_hold_every_shared_tensor_once(tiny: Path, num_ranks: int) -> None:
    ranks = [CheckpointSource(tiny, CONFIG, LAYOUT, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for name, wanted in rounded_weights(CONFIG, random_weights(CONFIG)).items():
        parts = [dense(rank.take(name), wanted.dtype) for rank in ranks]
        axis = part_axis(name)
        if axis is None:
            assert all(torch.equal(part, wanted) for part in parts), name
        else:
            assert all(part.shape[axis] * num_ranks == wanted.shape[axis] for part in parts), name
            assert torch.equal(torch.cat(parts, axis), wanted), name


def test_ranks_may_cut_through_the_blocks_that_share_a_scale(tmp_path: Path) -> None:
    """48 numbers of an expert's width over 4 ranks: 12 each, and scales for 32."""
    config = parsed(v4_config(moe_intermediate_size=48))
    folder, wanted = write_tiny_v4(tmp_path, moe_intermediate_size=48), rounded_weights(config, random_weights(config))
    layout = full_layout(config)
    ranks = [CheckpointSource(folder, config, layout, rank=rank, num_ranks=4) for rank in range(4)]
    for name in (
        "layers.1.ffn.experts.3.w1.weight",
        "mtp.2.ffn.experts.0.w2.weight",
        "layers.0.ffn.shared_experts.w2.weight",
    ):
        parts = [dense(rank.take(name)) for rank in ranks]
        assert torch.equal(torch.cat(parts, part_axis(name)), wanted[name])
    with pytest.raises(UsageError, match="4 devices cannot share the model's 25 pairs of an expert's width"):
        check_ranks(parsed(v4_config(moe_intermediate_size=50)), 4)


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(UsageError, match="3 devices cannot share the model's 4 attention heads"):
        CheckpointSource(tiny, CONFIG, LAYOUT, num_ranks=3)


Change = Callable[[dict[str, torch.Tensor]], None]


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def with_tensor(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensor)


def poisoned(name: str, byte: int) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.uint8).view(-1)[:4] = byte

    return change


DAMAGE: dict[str, tuple[str, Change]] = {
    "expert scale missing": (
        "lack layers.1.ffn.experts.3.w2.scale",
        without("layers.1.ffn.experts.3.w2.scale"),
    ),
    "router bias missing": ("lack layers.2.ffn.gate.bias", without("layers.2.ffn.gate.bias")),
    "hash table missing": ("lack layers.0.ffn.gate.tid2eid", without("layers.0.ffn.gate.tid2eid")),
    "drafter tensor missing": ("lack mtp.1.attn.wkv.weight", without("mtp.1.attn.wkv.weight")),
    "unexpected tensor": (
        "the tensor layers.4.attn.indexer.wq_b.weight is none",
        with_tensor("layers.4.attn.indexer.wq_b.weight", torch.zeros(32, 32).to(torch.float8_e4m3fn)),
    ),
    "unexpected drafter stage": (
        "the tensor mtp.3.norm.weight is none",
        with_tensor("mtp.3.norm.weight", torch.zeros(64, dtype=torch.bfloat16)),
    ),
    "norm of another shape": (
        r"layers.2.attn.kv_norm.weight has shape \[31\], but the config asks for \[32\]",
        with_tensor("layers.2.attn.kv_norm.weight", torch.zeros(31, dtype=torch.bfloat16)),
    ),
    "experts not packed": (
        "experts.0.w1.weight is stored as F8_E4M3, must be I8",
        with_tensor("layers.0.ffn.experts.0.w1.weight", torch.zeros(128, 64).to(torch.float8_e4m3fn)),
    ),
    "scales in fp32": (
        "attn.wq_a.scale is stored as F32, must be F8_E8M0",
        with_tensor("layers.0.attn.wq_a.scale", torch.ones(1, 1)),
    ),
    "sink in bf16": (
        "attn_sink is stored as BF16, must be F32",
        with_tensor("layers.0.attn.attn_sink", torch.zeros(4, dtype=torch.bfloat16)),
    ),
    "fp8 code that is no number": ("attn.wq_b.weight holds NaN", poisoned("layers.3.attn.wq_b.weight", 0x7F)),
    "scale that is no number": ("experts.5.w3.scale holds NaN", poisoned("layers.1.ffn.experts.5.w3.scale", 0xFF)),
    "bf16 that is no number": ("head.weight holds NaN", poisoned("head.weight", 0xFF)),
    "fp32 that is no number": ("mtp.2.hc_attn_base holds NaN", poisoned("mtp.2.hc_attn_base", 0xFF)),
}


def load_all(folder: Path) -> None:
    source = CheckpointSource(folder, CONFIG, LAYOUT)
    for name in LAYOUT:
        source.take(name)


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return stored_weights(CONFIG, random_weights(CONFIG))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_tensor_is_refused_by_name(kind: str, stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    words, change = DAMAGE[kind]
    stored = dict(stored)
    change(stored)
    write_shards(tmp_path, CONFIG, stored)
    with pytest.raises(DamagedFile, match=words) as caught:
        load_all(tmp_path)
    assert caught.value.exit_code == 6
    assert str(tmp_path) in str(caught.value)


def broken(folder: Path, what: str) -> None:
    """Damage the files of a whole checkpoint."""
    third, index = sorted(folder.glob("*.safetensors"))[2], folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    if what == "cut":
        third.write_bytes(third.read_bytes()[:-100])
    elif what == "longer":
        third.write_bytes(third.read_bytes() + b"\0" * 8)
    elif what == "empty":
        third.write_bytes(b"")
    elif what == "header":
        third.write_bytes(third.read_bytes()[:8] + b"{" * 200 + third.read_bytes()[208:])
    elif what == "header length":
        third.write_bytes(b"\xff" * 8 + third.read_bytes()[8:])
    elif what == "gone":
        third.unlink()
    elif what == "moved":
        save_file(load_file(third) | {"norm.weight": torch.zeros(64, dtype=torch.bfloat16)}, third)
    elif what == "not indexed":
        del table["weight_map"]["norm.weight"]
        index.write_text(json.dumps(table))
    elif what == "total":
        table["metadata"]["total_size"] += 1
        index.write_text(json.dumps(table))
    elif what == "outside":
        table["weight_map"]["norm.weight"] = "../x.safetensors"
        index.write_text(json.dumps(table))
    else:
        index.write_text("[1]")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut", "is cut: layers.1"),
        ("longer", "8 bytes behind its last tensor"),
        ("empty", "is cut or no safetensors"),
        ("header", "no readable header"),
        ("header length", "is cut or no safetensors"),
        ("gone", "is missing although the index names it"),
        ("moved", "norm.weight is in"),
        ("not indexed", "norm.weight, which the index does not name"),
        ("total", "says the tensors have"),
        ("outside", "no .safetensors beside it"),
        ("index", "holds no JSON object"),
    ],
)
def test_a_damaged_file_is_refused(what: str, words: str, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "v4")
    broken(folder, what)
    with pytest.raises(DamagedFile, match=words):
        load_all(folder)


def test_a_header_that_lies_about_a_tensor_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "v4")
    file = sorted(folder.glob("*.safetensors"))[0]
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for old, new in ((b"[512,64]", b"[512,65]"), (b'"BF16"', b'"F32" ')):
        file.write_bytes(data[:8] + data[8 : 8 + length].replace(old, new) + data[8 + length :])
        with pytest.raises(DamagedFile, match=r"embed\.weight has 65536 bytes at 0, not"):
            read_headers(folder)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no \.safetensors file"):
        read_headers(tmp_path)


def test_a_checkpoint_without_its_drafter_still_gives_the_target(
    stored: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_shards(tmp_path, CONFIG, {n: w for n, w in stored.items() if not n.startswith("mtp.")})
    CheckpointSource(tmp_path, CONFIG, trunk_layout(CONFIG))
    with pytest.raises(SparkchatError, match=r"lack mtp\.0\.main_proj\.weight; .*, or give --drafter none"):
        CheckpointSource(tmp_path, CONFIG, LAYOUT)
