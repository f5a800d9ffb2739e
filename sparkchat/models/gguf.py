"""GGUF files: a bounds-checked reader of the header, and the tensors of dense models under Hugging Face names.

Read here rather than with the gguf package's reader, which takes seconds over a vocabulary of 49,000 strings; its
unpacking of the rarer block formats is used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkchat.architectures import refuse_parts, refuse_unknown
from sparkchat.errors import DamagedFile, UsageError
from sparkchat.headers import misplaced
from sparkchat.models.base import ModelConfig
from sparkchat.models.hf_config import LARGEST
from sparkchat.models.quant import GROUP, GroupedWeight, Weight
from sparkchat.models.rope import RopeConfig
from sparkchat.models.shape import DecoderShape
from sparkchat.models.weights import check_finite, check_shape, refuse_left_over

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}
_FLAT = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """Slowest dimension first, as in torch."""
    kind: int
    """ggml type number"""
    offset: int
    """From the start of the tensor data."""


class GgufHeader:
    """Key-value pairs (arrays are skipped) and the tensor table."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path, self._data, self._at = path, data, 0
        if data[:4] != b"GGUF":
            raise DamagedFile(f"{path} is no GGUF file; fetch it again")
        self._at = 4
        version, num_tensors, num_fields = self._read("I"), self._read("Q"), self._read("Q")
        if version not in (2, 3):
            raise UsageError(f"{path} is GGUF version {version}; versions 2 and 3 are supported")
        self.fields: dict[str, Any] = {}
        for _ in range(self._count(num_fields)):
            name = self._string()
            self.fields[name] = self._value(self._read("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(self._count(num_tensors)):
            name, info = self._tensor()
            if name in self.tensors:
                raise DamagedFile(f"{path} holds the tensor {name[:64]!r} twice; fetch the file again")
            self.tensors[name] = info
        step = self.fields.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise DamagedFile(f"{path}: general.alignment is {step!r}; fetch the file again")
        self.data_start, self.step = -(-self._at // step) * step, step

    def _read(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size)
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _need(self, size: int) -> None:
        if self._at + size > len(self._data):
            raise DamagedFile(f"{self._path} ends inside its header; fetch it again")

    def _count(self, count: int) -> int:
        # Each entry takes more than a byte, so a larger count than bytes left is damage.
        self._need(count)
        return int(count)

    def _string(self) -> str:
        size = self._read("Q")
        self._need(size)
        text = self._data[self._at : self._at + size]
        self._at += size
        return bytes(text).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._read(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise DamagedFile(f"{self._path}: value type {kind} in the header is unknown; fetch the file again")
        self._skip_array()
        return None

    def _skip_array(self) -> None:
        kind, count = self._read("I"), self._count(self._read("Q"))
        if kind in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[kind])
            self._need(size)
            self._at += size
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            raise DamagedFile(f"{self._path}: arrays of type {kind} in the header are unknown; fetch the file again")

    def _skip_strings(self, count: int) -> None:
        # A vocabulary and its merges are 100,000 strings: no calls in this loop.
        data, at, end = self._data, self._at, len(self._data)
        read = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + read(data, at)[0]
        self._at = at
        self._need(0)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name, num_dims = self._string(), self._read("I")
        if not 1 <= num_dims <= 4:
            raise DamagedFile(f"{self._path}: tensor {name!r} has {num_dims} dimensions; fetch the file again")
        shape = tuple(self._read("Q") for _ in range(num_dims))[::-1]
        return name, TensorInfo(shape, self._read("I"), self._read("Q"))


class GgufSource:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        """Raises DamagedFile, or UsageError for an architecture that is not supported."""
        self._path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise DamagedFile(f"{path} is no GGUF file; fetch it again")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._header = GgufHeader(path, self._data)
        self._check_places()
        self._taken: set[str] = set()
        self.config = self._parse()
        # llama.cpp stores the queries and keys of its llama architecture in rotary pairs, those of qwen3 as they are.
        self.has_paired_rotary = self._header.fields["general.architecture"] == "llama"

    def _check_places(self) -> None:
        """Raise DamagedFile where a tensor reaches into the next one, or ends before it: its shape is not its own."""
        sizes = {name: _stored_bytes(info) for name, info in self._header.tensors.items()}
        if any(size is None for size in sizes.values()):
            return  # Of a format that is refused by its name when it is taken.
        places = {name: (info.offset, sizes[name] or 0) for name, info in self._header.tensors.items()}
        name = misplaced(places, self._header.step)
        if name is not None:
            raise DamagedFile(
                f"{self._path}: {name} does not begin where the tensor before it ends, so a shape in the header is "
                "wrong; fetch the file again"
            )

    def _parse(self) -> ModelConfig:
        fields = self._header.fields
        name = fields.get("general.architecture")
        refuse_unknown(name, self._path, is_gguf=True)
        self._refuse_unknown(name)
        heads = self._whole(f"{name}.attention.head_count")
        hidden = self._whole(f"{name}.embedding_length")
        head_dim = self._whole(f"{name}.attention.key_length", max(1, hidden // heads))
        rotated = fields.get(f"{name}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise UsageError(f"{self._path}: rotating {rotated} of {head_dim} dimensions of a head is not supported")
        kv_heads = self._whole(f"{name}.attention.head_count_kv", heads)
        if heads % kv_heads or head_dim % 2:
            raise DamagedFile(
                f"{self._path}: {heads} query heads over {kv_heads} key heads of {head_dim} do not divide"
            )
        layers = self._whole(f"{name}.block_count")
        decoder = DecoderShape(
            hidden_size=hidden,
            intermediate_size=self._whole(f"{name}.feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_eps=self._number(f"{name}.attention.layer_norm_rms_epsilon", 1e-6),
            rope=RopeConfig(theta=self._number(f"{name}.rope.freq_base", 10000.0)),
            qk_norm=name == "qwen3",
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            windows=(None,) * layers,
        )
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is None:
            raise DamagedFile(f"{self._path}: the tensor token_embd.weight is missing; fetch the file again")
        vocab = embedding.shape[0]
        if not 1 <= vocab <= LARGEST:
            raise DamagedFile(f"{self._path}: token_embd.weight has {vocab} rows, must be 1 to {LARGEST}")
        ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
        return ModelConfig(
            architecture=name,
            decoder=decoder,
            vocab_size=vocab,
            max_context=self._whole(f"{name}.context_length"),
            eos_token_ids=tuple(dict.fromkeys(e for e in ends if isinstance(e, int) and 0 <= e < vocab)),
            tie_word_embeddings="output.weight" not in self._header.tensors,
        )

    def _refuse_unknown(self, name: str) -> None:
        fields, tensors = self._header.fields, self._header.tensors
        scaling = fields.get(f"{name}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in tensors:
            raise UsageError(f"{self._path}: scaled rotary embeddings are not supported in GGUF files")
        if fields.get(f"{name}.attention.sliding_window"):
            raise UsageError(f"{self._path}: sliding windows are not supported in GGUF files")
        if fields.get(f"{name}.expert_count"):
            raise UsageError(f"{self._path}: mixtures of experts are not supported in GGUF files")
        refuse_parts(fields.get("split.count"), self._path)

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._header.fields.get(key, default)
        if not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise DamagedFile(f"{self._path}: {key} is {value!r}, must be a whole number from 1 to {LARGEST}")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._header.fields.get(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise DamagedFile(f"{self._path}: {key} is {value!r}, must be a positive number")
        # The header holds float32; its shortest decimal is the number that was meant.
        return float(str(np.float32(value)))

    def _stored_name(self, name: str) -> str:
        if name in _NAMES:
            return _NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        module, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._header.tensors

    def take(self, name: str, *shape: int, allow_nan: bool = False) -> Weight:
        stored = self._stored_name(name)
        info = self._header.tensors.get(stored)
        if info is None:
            raise DamagedFile(f"{self._path}: the tensor {stored} is missing; fetch the file again")
        check_shape(self._path, stored, info.shape, shape)
        self._taken.add(stored)
        weight = self._unpack(stored, info)
        if allow_nan:
            return weight
        if isinstance(weight, GroupedWeight):
            for part in (weight.scale, weight.shift):
                if part is not None:
                    check_finite(self._path, stored, part)
            return weight
        return check_finite(self._path, stored, weight)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        refuse_left_over(self._path, sorted(set(self._header.tensors) - self._taken - set(ignored)))

    def _bytes(self, stored: str, info: TensorInfo, size: int) -> np.ndarray:
        start = self._header.data_start + info.offset
        if start + size > len(self._data):
            raise DamagedFile(f"{self._path} is truncated: {stored} ends at byte {start + size}; fetch it again")
        return np.frombuffer(self._data, dtype=np.uint8, count=size, offset=start)

    def _unpack(self, stored: str, info: TensorInfo) -> Weight:
        count = math.prod(info.shape)
        if info.kind in _FLAT:
            dtype = _FLAT[info.kind]
            raw = self._bytes(stored, info, count * dtype.itemsize)
            return torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype).view(info.shape)
        if info.kind in _BLOCK_BYTES and len(info.shape) == 2 and info.shape[-1] % GROUP == 0:
            size = _BLOCK_BYTES[info.kind]
            raw = self._bytes(stored, info, count // GROUP * size)
            blocks = torch.from_numpy(raw.reshape(info.shape[0], -1, size).copy())
            return _grouped(info.kind, blocks)
        return self._unpack_rare(stored, info, count)

    def _unpack_rare(self, stored: str, info: TensorInfo, count: int) -> Tensor:
        """K-quants and the like, through the gguf package, to float32."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        try:
            kind = GGMLQuantizationType(info.kind)
            block, size = GGML_QUANT_SIZES[kind]
            if info.shape[-1] % block:
                raise DamagedFile(f"{self._path}: {stored} of {kind.name} has rows of {info.shape[-1]}; fetch it again")
            raw = self._bytes(stored, info, count // block * size)
            values = dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UsageError(f"{self._path}: {stored} is of GGUF type {info.kind}, which cannot be unpacked") from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _stored_bytes(info: TensorInfo) -> int | None:
    """Bytes of a tensor in the file; None where its format is unknown."""
    count = math.prod(info.shape)
    if info.kind in _FLAT:
        return count * _FLAT[info.kind].itemsize
    if info.kind in _BLOCK_BYTES:
        return count // GROUP * _BLOCK_BYTES[info.kind]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
    if info.kind not in sizes:
        return None
    block, size = sizes[info.kind]
    return count // block * size


def _grouped(kind: int, blocks: Tensor) -> GroupedWeight:
    """blocks [out, in/32, bytes] uint8 -> codes, scale, shift. A 4 bit byte holds codes i and i + 16."""

    def half(start: int) -> Tensor:
        return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1).float()

    rows = blocks.shape[0]
    scale = half(0)
    if kind == _Q8_0:
        return GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).reshape(rows, -1), scale, None)
    packed = blocks[..., 2:] if kind == _Q4_0 else blocks[..., 4:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1).reshape(rows, -1)
    shift = -8 * scale if kind == _Q4_0 else half(2)
    return GroupedWeight(codes, scale, shift)
