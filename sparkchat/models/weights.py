"""Tensors by their Hugging Face names from safetensors files, checked; and how a layer's are fused and reordered.

Nothing is ever unpickled: a folder that holds only .bin or .pt files is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkchat.errors import DamagedFile, ModelNotFound, UsageError
from sparkchat.finite import short
from sparkchat.models.quant import GroupedWeight, Weight, block_scaled, stack_rows, take_columns, take_rows
from sparkchat.models.shape import DecoderShape

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
_FP8_NAN = 0x7F
"""Both codes of float8_e4m3fn that are no number have these bits set."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorSource(Protocol):
    """Checked tensors by name; what was taken is remembered."""

    has_paired_rotary: bool
    """Query and key rows already lie in rotary pairs (GGUF's llama)."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int, allow_nan: bool = False) -> Weight:
        """Return the tensor. Raises DamagedFile when it is missing, of another shape, or not finite.

        ``allow_nan``: where a number that is none harms only what uses it, it is left to be met at run time.
        """
        ...

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raise DamagedFile when tensors are left that nothing asked for."""
        ...


class FolderSource:
    """The safetensors of a Hugging Face folder, single or sharded by an index."""

    has_paired_rotary = False

    def __init__(self, folder: Path, fp8_block: tuple[int, int] | None = None) -> None:
        """``fp8_block``: outputs and inputs that share a scale, in a checkpoint whose weights are float8.

        Raises ModelNotFound, DamagedFile, or UsageError for pickled weights.
        """
        self._folder, self._fp8_block = folder, fp8_block
        self._taken: set[str] = set()
        self._files = {path: _open(path) for path in _weight_files(folder)}
        self._owner = _owners(folder, {path: file.keys() for path, file in self._files.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def names(self) -> set[str]:
        return set(self._owner)

    def dtype_of(self, name: str) -> str:
        """Return the stored format of a tensor by safetensors' name, F32 or BF16; empty when there is none."""
        return str(self._files[self._owner[name]].get_slice(name).get_dtype()) if name in self._owner else ""

    def take(self, name: str, *shape: int, allow_nan: bool = False) -> Weight:
        tensor = self._read(name)
        if tensor.dtype == FP8 and self._fp8_block is not None:
            return self._take_fp8(name, tensor, shape, self._fp8_block)
        if tensor.dtype not in FLOATS:
            raise UsageError(
                f"{self._owner[name]}: {name} is {_dtype_name(tensor)}; only float32, float16 and bfloat16 "
                "weights, and float8 in blocks, can be run, so choose another checkpoint"
            )
        check_shape(self._owner[name], name, tensor.shape, shape)
        return tensor if allow_nan else check_finite(self._owner[name], name, tensor)

    def _take_fp8(self, name: str, codes: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Weight:
        """Float8 codes with the scales of their blocks, which lie beside them as ``weight_scale_inv``."""
        where = self._owner[name]
        check_shape(where, name, codes.shape, shape)
        if codes.dim() != 2:
            raise DamagedFile(f"{where}: {name} is float8 and no matrix; fetch the file again")
        scale = self._read(f"{name}_scale_inv")
        if scale.dtype not in FLOATS:
            raise UsageError(
                f"{where}: {name}_scale_inv is {_dtype_name(scale)}; only floating-point scales can be used"
            )
        blocks = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        check_shape(where, f"{name}_scale_inv", scale.shape, blocks)
        check_finite(where, f"{name}_scale_inv", scale)
        if bool(((codes.view(torch.uint8) & _FP8_NAN) == _FP8_NAN).any()):
            raise DamagedFile(f"{where}: {name} holds NaN; fetch the file again")
        return block_scaled(codes, scale, block)

    def take_whole_numbers(self, name: str) -> Tensor:
        """Return a one-dimensional int64 tensor of any length."""
        tensor = self._read(name)
        if tensor.dim() != 1 or tensor.dtype not in (torch.int64, torch.int32):
            raise DamagedFile(f"{self._owner[name]}: {name} must be one row of whole numbers, is {_dtype_name(tensor)}")
        return tensor.long()

    def _read(self, name: str) -> Tensor:
        if name not in self._owner:
            raise DamagedFile(f"{self._folder}: the weights lack {name}; fetch the model again")
        self._taken.add(name)
        try:
            return self._files[self._owner[name]].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise DamagedFile(f"{self._owner[name]}: {name} cannot be read ({error}); fetch the file again") from error

    def finish(self, ignored: Iterable[str] = ()) -> None:
        left = sorted(n for n in set(self._owner) - self._taken - set(ignored) if not n.endswith("inv_freq"))
        refuse_left_over(self._folder, left)


def _open(path: Path):  # type: ignore[no-untyped-def]  # safetensors does not name the type
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DamagedFile(f"{path} is missing although the index names it; fetch the model again") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedFile(f"{path} is truncated or not safetensors ({error}); fetch it again") from error


def _weight_files(folder: Path) -> list[Path]:
    indexed = _indexed(folder)
    if indexed:
        return [folder / name for name in sorted(set(indexed.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(p.name for pattern in _PICKLED for p in folder.glob(pattern))
    if pickled:
        raise UsageError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run any code when opened; "
            "give a folder with .safetensors files"
        )
    raise ModelNotFound(f"{folder} has no .safetensors file; give a model folder or a .gguf file")


def _indexed(folder: Path) -> dict[str, str]:
    """Tensor name -> file name from the shard index; empty without one."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    table = read_json(path).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
        raise DamagedFile(f"{path} has no weight_map of tensor to file names; fetch it again")
    for name in table.values():
        # A name of 256 characters is one that no folder holds.
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable() or len(name) > 255:
            raise DamagedFile(f"{path} names the file {short(name)}, which is no .safetensors beside it")
    return table


def _owners(folder: Path, held: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Tensor name -> the file that it is read from. ``held``: the names in each file.

    Raises DamagedFile for a name of the index that no file holds, and for one that several hold where the index does
    not decide: any choice might be the wrong weights.
    """
    indexed, owners = _indexed(folder), dict[str, Path]()
    for path, names in held.items():
        for name in names:
            chosen = indexed.get(name)
            if name not in owners or path.name == chosen:
                owners[name] = path
            elif owners[name].name != chosen:
                raise DamagedFile(
                    f"{folder}: both {owners[name].name} and {path.name} hold {name}; keep the one that is the model's"
                )
    for name, file in indexed.items():
        if name not in owners:
            raise DamagedFile(f"{folder}: {file} lacks the tensor {name} that the index names; fetch it again")
    return owners


def read_json(path: Path) -> dict:
    """Return the object in a JSON file. Raises ModelNotFound when it is missing, DamagedFile when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path.parent} has no {path.name}; give a model folder or a .gguf file") from error
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedFile(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(data, dict):
        raise DamagedFile(f"{path} holds no JSON object; fetch it again")
    return data


def check_shape(where: Path, name: str, found: Iterable[int], wanted: Iterable[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise DamagedFile(f"{where}: {name} has shape {list(found)}, but the config asks for {list(wanted)}")


def check_finite(where: Path, name: str, tensor: Tensor) -> Tensor:
    # The sum is one cheap pass; only when it overflows or meets NaN are the values looked at one by one.
    if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
        raise DamagedFile(f"{where}: {name} holds NaN or infinity; fetch the file again")
    return tensor


def refuse_left_over(where: Path, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise DamagedFile(f"{where} has tensors this architecture does not know: {names[0]}{more}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def layer_weights(source: TensorSource, shape: DecoderShape, prefix: str) -> dict[str, Weight]:
    """Take a layer's tensors, named ``prefix`` + Hugging Face's names, and fuse them for DecoderLayer.

    Query heads go from [key head, group] order to [group, key head] (attention.py), and the dimensions of query and
    key heads into rotary pairs (rope.py); the inputs of ``o`` follow the heads.
    """
    d, q, kv, i = shape.hidden_size, shape.q_width, shape.kv_width, shape.intermediate_size

    def qkv(kind: str, *width: int) -> list[Weight]:
        return [source.take(f"{prefix}self_attn.{n}_proj.{kind}", rows, *width) for n, rows in _qkv_rows(q, kv)]

    # Only behind the check of their shapes is an order made in the config's sizes: damaged ones may ask for anything.
    projections = qkv("weight", d)
    heads = _head_order(shape)
    paired = torch.arange(shape.head_dim) if source.has_paired_rotary else rotary_pairs(shape.head_dim)
    q_rows = (heads[:, None] * shape.head_dim + paired).flatten()
    k_rows = (torch.arange(shape.num_kv_heads)[:, None] * shape.head_dim + paired).flatten()
    o_columns = (heads[:, None] * shape.head_dim + torch.arange(shape.head_dim)).flatten()

    def stacked(parts: list[Weight]) -> Weight:
        return stack_rows([take_rows(parts[0], q_rows), take_rows(parts[1], k_rows), parts[2]])

    def mlp(kind: str, *width: int) -> list[Weight]:
        return [source.take(f"{prefix}mlp.{n}_proj.{kind}", i, *width) for n in ("gate", "up")]

    weights = {
        "qkv.weight": stacked(projections),
        "o.weight": take_columns(source.take(f"{prefix}self_attn.o_proj.weight", d, q), o_columns),
        "gate_up.weight": stack_rows(mlp("weight", d)),
        "down.weight": source.take(f"{prefix}mlp.down_proj.weight", d, i),
        "input_norm.weight": source.take(f"{prefix}input_layernorm.weight", d),
        "post_norm.weight": source.take(f"{prefix}post_attention_layernorm.weight", d),
    }
    if shape.qkv_bias:
        weights["qkv.bias"] = stacked(qkv("bias"))
    if shape.o_bias:
        weights["o.bias"] = source.take(f"{prefix}self_attn.o_proj.bias", d)
    if shape.mlp_bias:
        weights |= {"gate_up.bias": stack_rows(mlp("bias")), "down.bias": source.take(f"{prefix}mlp.down_proj.bias", d)}
    if shape.qk_norm:
        norms = [source.take(f"{prefix}self_attn.{n}_norm.weight", shape.head_dim) for n in ("q", "k")]
        counts = (shape.num_heads, shape.num_kv_heads)
        assert not any(isinstance(n, GroupedWeight) for n in norms)
        weights["qk_norm.weight"] = torch.cat([n[paired].expand(c, -1) for n, c in zip(norms, counts, strict=True)])
    return weights


def _qkv_rows(q: int, kv: int) -> tuple[tuple[str, int], ...]:
    return (("q", q), ("k", kv), ("v", kv))


def _head_order(shape: DecoderShape) -> Tensor:
    """[H] old index of each query head in [group, key head] order."""
    return torch.arange(shape.num_heads).view(shape.num_kv_heads, shape.group_size).T.flatten()


def rotary_pairs(head_dim: int) -> Tensor:
    """[D] the half-split dimensions i, i + D/2 side by side."""
    return torch.arange(head_dim).view(2, -1).T.flatten()
