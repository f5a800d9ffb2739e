"""What a model is made of, from the headers of its files alone: names, formats and shapes, on disk or over the network.

Reads safetensors folders and GGUF files with the standard library only, so that a memory plan needs neither torch nor
the weights.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Read = Callable[[int, int], bytes]
"""(offset, count) -> bytes of a file; fewer at its end."""

INDEX = "model.safetensors.index.json"
_LONGEST = 100 << 20
_LONGEST_AXIS = 1 << 48
_FIRST = 1 << 16
"""Bytes asked for at once: most headers of a shard are smaller."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}


class UnreadableHeader(Exception):
    """Not a header, or of a kind that is not known; the loader says what is wrong with it."""


@dataclass(frozen=True)
class Tensor:
    name: str
    """As Hugging Face names it."""
    dtype: str
    """By safetensors' name, or GGUF's (Q4_1)."""
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """As it is stored."""
        if self.dtype in GGUF_BLOCKS:
            size, values = GGUF_BLOCKS[self.dtype]
            return self.count // values * size
        return self.count * _BITS.get(self.dtype, 16) // 8


@dataclass(frozen=True)
class Headers:
    """A model without its weights."""

    config: dict[str, Any]
    """config.json; of a GGUF file the same keys, as far as they are needed."""
    tensors: tuple[Tensor, ...]

    @property
    def is_gguf(self) -> bool:
        return "gguf" in self.config


def local_headers(path: Path) -> Headers:
    """Of a model folder or a .gguf file. Raises UnreadableHeader."""
    try:
        if os.path.isfile(path):
            return read_gguf(_reader(path))
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        index = path / INDEX
        if os.path.isfile(index):
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [path / str(name) for name in names]
        else:
            files = sorted(path.glob("*.safetensors"))
        return folder_headers(config, [_reader(file) for file in files])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UnreadableHeader(f"{path}: {error}") from None


def folder_headers(config: Any, shards: Iterable[Read]) -> Headers:
    """Raises UnreadableHeader."""
    tensors = [tensor for read in shards for tensor in read_safetensors(read)]
    if not isinstance(config, dict) or not tensors:
        raise UnreadableHeader("no config, or no weights")
    return Headers(config, tuple(tensors))


def _reader(file: Path) -> Read:
    def read(offset: int, count: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(count)

    return read


def bytes_reader(data: bytes) -> Read:
    return lambda offset, count: data[offset : offset + count]


def safetensors_head(read: Read) -> bytes:
    """The length and the header of a file, as they stand in it. Raises UnreadableHeader."""
    data = read(0, _FIRST)
    if len(data) < 8:
        raise UnreadableHeader("not safetensors")
    (length,) = struct.unpack("<Q", data[:8])
    if length > _LONGEST:
        raise UnreadableHeader("not safetensors")
    return data[: 8 + length] + read(len(data), max(0, 8 + length - len(data)))


def read_safetensors(read: Read) -> list[Tensor]:
    """8 bytes of length, then a JSON object. Raises UnreadableHeader."""
    data = safetensors_head(read)
    try:
        entries = json.loads(data[8:])
        return [_tensor(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableHeader(f"not safetensors ({error})") from None


def _tensor(name: str, entry: dict[str, Any]) -> Tensor:
    """One entry. Raises ValueError for a size that is none: a plan made of it would be refused for its memory."""
    shape = entry["shape"]
    if not all(type(size) is int and 0 <= size < _LONGEST_AXIS for size in shape):
        raise ValueError(f"{name} has a size that is none")
    return Tensor(name, str(entry["dtype"]), tuple(shape))


GGUF_BLOCKS = {
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q5_0": (22, 32),
    "Q5_1": (24, 32),
    "Q8_0": (34, 32),
    "MXFP4": (17, 32),
    "Q2_K": (84, 256),
    "Q3_K": (110, 256),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
    "IQ1_S": (50, 256),
    "IQ1_M": (56, 256),
    "IQ2_XXS": (66, 256),
    "IQ2_XS": (74, 256),
    "IQ2_S": (82, 256),
    "IQ3_XXS": (98, 256),
    "IQ3_S": (110, 256),
    "IQ4_XS": (136, 256),
    "IQ4_NL": (18, 32),
    "TQ1_0": (54, 256),
    "TQ2_0": (66, 256),
}
"""Bytes and values of a block."""
_GGUF_KINDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    30: "BF16",
    39: "MXFP4",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    34: "TQ1_0",
    35: "TQ2_0",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
}
"""ggml's number of a format -> its name, of those that can be unpacked (models/gguf.py)."""
_GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_GGUF_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}
"""GGUF's key behind the architecture -> config.json's."""
_GGUF_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}


class _Cursor:
    """Reads a stream of little-endian values through ``Read``, a megabyte at a time."""

    def __init__(self, read: Read) -> None:
        self._read, self._data, self._at = read, b"", 0
        self._end = 0

    def take(self, count: int) -> bytes:
        if count > _LONGEST or self._end > _LONGEST:
            raise UnreadableHeader("not GGUF")
        while len(self._data) - self._at < count:
            more = self._read(self._end, max(1 << 20, count))
            if not more:
                raise UnreadableHeader("the file ends within its header")
            self._end += len(more)
            self._data, self._at = self._data[self._at :] + more, 0
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A value; of a list only its length is kept."""
        if kind == _GGUF_TEXT:
            return self.text()
        if kind == _GGUF_ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _GGUF_NUMBERS:
                self.take(struct.calcsize("<" + _GGUF_NUMBERS[inner]) * count)
            else:
                for _ in range(count):
                    self.value(inner)
            return count
        if kind not in _GGUF_NUMBERS:
            raise UnreadableHeader(f"GGUF value of kind {kind}")
        return self.number(_GGUF_NUMBERS[kind])


def read_gguf(read: Read) -> Headers:
    """Raises UnreadableHeader, also for formats of weights that are not planned for."""
    cursor = _Cursor(read)
    if cursor.take(4) != b"GGUF" or cursor.number("I") not in (2, 3):
        raise UnreadableHeader("not GGUF")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        values[key] = cursor.value(cursor.number("I"))
    tensors, starts = [], {}
    for _ in range(num_tensors):
        tensor, starts[tensor.name] = _gguf_tensor(cursor)
        tensors.append(tensor)
    step = values.get("general.alignment", 32)
    if (
        not isinstance(step, int)
        or step < 1
        or misplaced({t.name: (starts[t.name], t.num_bytes) for t in tensors}, step)
    ):
        raise UnreadableHeader("not GGUF: its tensors do not lie one behind the other")
    family = str(values.get("general.architecture", ""))
    config = {ours: values[f"{family}.{key}"] for key, ours in _GGUF_KEYS.items() if f"{family}.{key}" in values}
    config |= {"gguf": family, "model_type": family, "num_parts": values.get("split.count")}
    config["tie_word_embeddings"] = all(tensor.name != "lm_head.weight" for tensor in tensors)
    return Headers(config, tuple(tensors))


def misplaced(places: dict[str, tuple[int, int]], step: int) -> str | None:
    """The first tensor of a GGUF file that does not begin where the one before it ends, rounded up to ``step``.

    ``places``: start and size in bytes by name. So it tells a wrong shape or format of any tensor by its neighbours.
    """
    end = 0
    for name, (start, size) in sorted(places.items(), key=lambda item: item[1]):
        if start != end:
            return name
        end = -(-(start + size) // step) * step
    return None


def _gguf_tensor(cursor: _Cursor) -> tuple[Tensor, int]:
    """A tensor, and where it starts."""
    name = cursor.text()
    num_axes = cursor.number("I")
    if num_axes > 8:
        raise UnreadableHeader("not GGUF")
    shape = tuple(cursor.number("Q") for _ in range(num_axes))[::-1]
    kind, start = cursor.number("I"), cursor.number("Q")
    if kind not in _GGUF_KINDS:
        raise UnreadableHeader(f"{name}: weights of GGUF kind {kind}")
    return Tensor(_GGUF_NAMES.get(name, name), _GGUF_KINDS[kind], shape), start
