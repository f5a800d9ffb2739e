"""Names, types, shapes and places of all tensors of a safetensors folder, read from the headers alone.

Everything that can be wrong without looking at the data is found here: an index that disagrees with its files, a file
that is cut, a tensor whose bytes do not match its shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkchat.errors import DamagedFile, ModelNotFound
from sparkchat.models.deepseek_v4.formats import BYTES
from sparkchat.models.weights import read_json

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100 << 20
"""As safetensors itself allows."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    """By safetensors' name: I8, F8_E4M3, F8_E8M0, BF16, F32, I64, or one that V4 does not use."""
    shape: tuple[int, ...]
    file: Path
    num_bytes: int


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; the files are larger by their headers."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_headers(folder: Path) -> Headers:
    """Raises ModelNotFound without weights, DamagedFile naming the file or tensor that is wrong."""
    index = _read_index(folder)
    files = [folder / name for name in sorted(set(index.values()))] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} has no .safetensors file; give a model folder")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_file(file):
            if name in tensors:
                raise DamagedFile(f"{file}: {name} is in {tensors[name].file.name} as well; fetch the model again")
            tensors[name] = tensor
    if index:
        _compare(folder, index, tensors)
    return Headers(folder, tensors, tuple(files))


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
        raise DamagedFile(f"{path} has no weight_map of tensor to file names; fetch it again")
    for name in table.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DamagedFile(f"{path} names the file {name!r}, which is no .safetensors beside it")
    return table


def _compare(folder: Path, index: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise DamagedFile(f"{folder / file} lacks the tensor {name} that the index names; fetch it again")
    for name, tensor in tensors.items():
        if name not in index:
            raise DamagedFile(f"{tensor.file} holds the tensor {name}, which the index does not name; fetch both again")
    metadata = read_json(folder / INDEX).get("metadata")
    claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.num_bytes for tensor in tensors.values())
    if claimed is not None and claimed != found:
        raise DamagedFile(
            f"{folder / INDEX} says the tensors have {claimed} bytes, but they have {found}; fetch it again"
        )


def _read_file(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    header, start = _read_header(file)
    size = file.stat().st_size - start
    end = 0
    entries = sorted(
        ((name, _entry(file, name, raw)) for name, raw in header.items() if name != "__metadata__"),
        key=lambda entry: entry[1][2],
    )
    for name, (dtype, shape, begin, stop) in entries:
        want = BYTES[dtype] * math.prod(shape) if dtype in BYTES else stop - begin
        if begin != end or stop - begin != want:
            raise DamagedFile(
                f"{file}: {name} has {stop - begin} bytes at {begin}, not {want} at {end}; fetch it again"
            )
        if stop > size:
            raise DamagedFile(f"{file} is cut: {name} ends at byte {start + stop} of {start + size}; fetch it again")
        end = stop
        yield name, StoredTensor(dtype, shape, file, stop - begin)
    if end != size:
        raise DamagedFile(f"{file} has {size - end} bytes behind its last tensor; fetch it again")


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header's object and the offset of the data."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(LONGEST_HEADER, file.stat().st_size - 8):
                raise DamagedFile(
                    f"{file} is cut or no safetensors: its header cannot be {length} bytes; fetch it again"
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise DamagedFile(f"{file} is missing although the index names it; fetch the model again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{file} has no readable header ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise DamagedFile(f"{file} has no readable header (no object); fetch it again")
    return header, 8 + length


def _entry(file: Path, name: str, raw: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(type, shape, first byte, byte behind the last) of one tensor."""
    if isinstance(raw, dict):
        dtype, shape, offsets = (raw.get(key) for key in ("dtype", "shape", "data_offsets"))
        numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
        are_sizes = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
        if isinstance(dtype, str) and are_sizes and len(offsets) == 2 and offsets[0] <= offsets[1]:
            return dtype, tuple(shape), offsets[0], offsets[1]
    raise DamagedFile(f"{file}: the header's entry of {name} is no type, shape and place; fetch it again")
