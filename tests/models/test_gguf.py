"""GGUF files run as transformers runs the weights they hold; damaged ones are refused in one line."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from models.gguf_files import gguf_name, rotary_restored, write_gguf
from models.pairs import CPU, assert_close, make_theirs, mean_error, random_ids, run_chunks
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.headers import UnreadableHeader, local_headers
from sparkchat.kernels import cpu
from sparkchat.models import load_target
from sparkchat.models.dense import DenseModel

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 96}
# Found before the tests' own folders hide it.
REAL_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkchat"


def write_pair(
    folder: Path, arch: str, kind: Kind, head_kind: Kind = Kind.Q8_0, tied: bool = True
) -> tuple[Path, PreTrainedModel]:
    """A GGUF file, and transformers' model with exactly the weights the file holds."""
    theirs = make_theirs(arch, tie_word_embeddings=tied, **SIZES)
    folder.mkdir(exist_ok=True)
    path = folder / "model.gguf"
    stored = write_gguf(path, theirs, kind, head_kind)
    missing, unexpected = theirs.load_state_dict(stored, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    return path, theirs


def all_logits(model: DenseModel, ids: Tensor, sizes: tuple[int, ...]) -> Tensor:
    cache = model.new_cache(1, 64, 64)
    return run_chunks(model, cache, cache.allocate(), ids, sizes)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.F32], ids=lambda k: k.name)
def test_dequantised_file_is_exact(tmp_path: Path, arch: str, kind: Kind) -> None:
    path, theirs = write_pair(tmp_path, arch, kind)
    ours = load_target(path, device=CPU, dtype=torch.float32)
    ids = random_ids(40)
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
    assert_close(all_logits(ours, ids, (22, 1)), wanted)
    assert ours.config.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_codes_stay_4_bit_on_the_cpu(tmp_path: Path, kind: Kind) -> None:
    path, theirs = write_pair(tmp_path, "llama", kind)
    ours = load_target(path, device=CPU)
    assert (ours.config.dtype_name, ours.config.linear_kernel) == (
        "q4_1",
        "q4-lanes" if cpu.is_supported() else "int4pack",
    )
    ids = random_ids(40)
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
    for sizes in ((40,), (1,)):
        assert mean_error(all_logits(ours, ids, sizes), wanted) < 0.03


def test_untied_head_and_other_formats(tmp_path: Path) -> None:
    path, theirs = write_pair(tmp_path, "llama", Kind.Q5_1, Kind.Q5_0, tied=False)
    ours = load_target(path, device=CPU, dtype=torch.float32)
    ids = random_ids(10)
    with torch.no_grad():
        assert_close(all_logits(ours, ids, (10,)), theirs(ids[None]).logits[0])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_pair(tmp_path, "llama", Kind.Q4_1)[0]


@pytest.mark.parametrize("keep", [0.0, 1e-4, 0.01, 0.02, 0.3, 0.9, 0.999])
def test_truncated_file(small: Path, keep: float) -> None:
    data = small.read_bytes()
    small.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(DamagedFile, match=r"model\.gguf") as caught:
        load_target(small, device=CPU)
    assert "\n" not in caught.value.message


def test_damaged_bytes_never_raise_anything_else(small: Path) -> None:
    """Every field of the header in turn becomes huge."""
    data = small.read_bytes()
    refused = 0
    for at in range(4, 1200, 3):
        small.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
        try:
            load_target(small, device=CPU)
        except SparkchatError:
            refused += 1
    assert refused > 100


def test_not_gguf_at_all(small: Path) -> None:
    small.write_bytes(b"<html>too many requests</html>" * 10)
    with pytest.raises(DamagedFile, match="no GGUF file"):
        load_target(small, device=CPU)


def test_a_tensor_that_is_there_twice_is_refused(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data.replace(b"blk.1.attn_norm", b"blk.0.attn_norm"))
    with pytest.raises(DamagedFile, match=r"blk.0.attn_norm.weight' twice"):
        load_target(small, device=CPU)


def test_old_version_is_named(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data[:4] + struct.pack("<I", 1) + data[8:])
    with pytest.raises(UsageError, match="version 1"):
        load_target(small, device=CPU)


def test_unknown_architecture_is_named(small: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data.replace(b"llama", b"alpac"))
    with pytest.raises(UsageError, match="'alpac' is not supported; known: llama, qwen3"):
        load_target(small, device=CPU)


@pytest.mark.parametrize("rows", [0, 95, 97, 1 << 58, 1 << 62])
def test_a_table_of_another_length_than_its_bytes_is_refused(small: Path, rows: int) -> None:
    """One row more would be read out of the next tensor, without a word."""
    data, name = small.read_bytes(), b"token_embd.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 12
    assert data[at : at + 8] == struct.pack("<Q", SIZES["vocab_size"])
    small.write_bytes(data[:at] + struct.pack("<Q", rows) + data[at + 8 :])
    with pytest.raises(DamagedFile, match="does not begin where the tensor before it ends"):
        load_target(small, device=CPU)
    with pytest.raises(UnreadableHeader):
        local_headers(small)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("llama.rope.dimension_count", 16, "rotating 16 of 32 dimensions of a head"),
        ("split.count", 3, "is one of 3 parts; join them"),
    ],
)
def test_what_a_field_more_says_is_heeded(small: Path, name: str, value: int, words: str) -> None:
    """In the place of the width of a head, which many files leave out: it is the hidden size over the heads."""
    data, key = small.read_bytes(), b"llama.attention.key_length"
    start = data.index(struct.pack("<Q", len(key)) + key)
    field = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<II", 4, value)
    changed = bytearray(data[:start] + field + data[start + 8 + len(key) + 8 :])
    hidden = changed.index(b"llama.embedding_length") + len(b"llama.embedding_length") + 4
    changed[hidden : hidden + 4] = struct.pack("<I", 128)
    small.write_bytes(bytes(changed))
    with pytest.raises(UsageError, match=words):
        load_target(small, device=CPU)


def test_not_a_number_in_a_scale(small: Path) -> None:
    tensor = next(t for t in GGUFReader(small).tensors if t.name == "blk.0.ffn_up.weight")
    data = bytearray(small.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\xff\x7f"
    small.write_bytes(bytes(data))
    with pytest.raises(DamagedFile, match=r"blk\.0\.ffn_up\.weight holds NaN"):
        load_target(small, device=CPU)


def read_with_transformers(path: Path) -> PreTrainedModel:
    """The file through the gguf package's reader and unpacking, in transformers' Llama."""
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    weights = {tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    for name, parameter in model.named_parameters():
        weight = weights[gguf_name(name)]
        if "q_proj" in name or "k_proj" in name:
            weight = rotary_restored(weight, heads if "q_proj" in name else kv_heads)
        parameter.data = weight.float().clone()
    model.tie_weights()
    return model


@pytest.mark.model
def test_the_embedded_default_model() -> None:
    """SmolLM2-135M in Q4_1: fp32 equals transformers on the same weights, 4 bit stays close to it."""
    found = sorted(REAL_CACHE.glob("models/**/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not found:
        pytest.skip(f"SmolLM2-135M-Instruct.Q4_1.gguf is not in {REAL_CACHE}; run: sparkchat pull smollm2-135m")
    ids = torch.tensor([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407])
    with torch.no_grad():
        wanted = read_with_transformers(found[0])(ids[None]).logits[0]
    exact = load_target(found[0], device=CPU, dtype=torch.float32)
    assert_close(all_logits(exact, ids, (10, 1)), wanted)
    packed = load_target(found[0], device=CPU)
    assert packed.config.eos_token_ids == (2,)
    for sizes in ((17,), (1,)):
        logits = all_logits(packed, ids, sizes)
        assert mean_error(logits, wanted) < 0.02
        assert (logits.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9
