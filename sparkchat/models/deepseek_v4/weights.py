"""The tensors of a checkpoint, checked against its config, and read a rank's part at a time.

Headers are checked before any data is read. Data is read tensor by tensor; a file is opened when its first tensor is
asked for and closed with its last, so that a loader that goes through the layers holds one layer's file at a time.

A rank of a tensor-parallel group gets: its heads of wq_b and the sinks, its output groups of wo_a and the matching
inputs of wo_b, a slice of the width of every expert, and its part of the vocabulary in the embedding, the output head
and the Markov head's W2. Everything else is whole on every rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.models.deepseek_v4.config import DeepseekV4Config
from sparkchat.models.deepseek_v4.formats import (
    FP4_BLOCK,
    FP8_BLOCK,
    ScaledWeight,
    Stored,
    cut_scales,
    has_bad_numbers,
)
from sparkchat.models.deepseek_v4.headers import Headers, StoredTensor, read_headers
from sparkchat.models.deepseek_v4.layout import Layout, TensorSpec, hyper_head_layout, layer_layout, trunk_layout

DRAFTER_PREFIX = "mtp."
_PLAIN = {"bf16": "BF16", "f32": "F32", "i64": "I64"}
_SPLIT_ROWS = re.compile(
    r"(embed|head|.*\.attn\.(wq_b|wo_a)|.*\.ffn\.(shared_experts|experts\.\d+)\.w[13]|.*\.markov_w2)\.weight"
    r"|.*\.attn_sink"
)
_SPLIT_COLUMNS = re.compile(r".*\.(attn\.wo_b|ffn\.(shared_experts|experts\.\d+)\.w2)\.weight")


def drafter_layout(config: DeepseekV4Config) -> Layout:
    """Everything under ``mtp.*``; empty where the config names no drafter."""
    if config.dspark is None:
        return _mtp_layout(config) if config.num_mtp_layers else {}
    d, rank, vocab = config.hidden_size, config.dspark.markov_rank, config.vocab_size
    num_stages = len(config.dspark.target_layer_ids)
    layout: Layout = {
        "mtp.0.main_proj.weight": TensorSpec((d, num_stages * d), "fp8"),
        "mtp.0.main_norm.weight": TensorSpec((d,), "bf16"),
    }
    for stage in range(num_stages):
        layout |= layer_layout(config, f"mtp.{stage}.", 0, is_hashed=False)
    last = f"mtp.{num_stages - 1}."
    return layout | {
        f"{last}norm.weight": TensorSpec((d,), "bf16"),
        **hyper_head_layout(config, last),
        f"{last}markov_head.markov_w1.weight": TensorSpec((vocab, rank), "bf16"),
        f"{last}markov_head.markov_w2.weight": TensorSpec((vocab, rank), "bf16"),
        f"{last}confidence_head.proj.weight": TensorSpec((1, d + rank), "bf16"),
    }


def _mtp_layout(config: DeepseekV4Config) -> Layout:
    """The classic block that predicts one token further (preview)."""
    d, layout = config.hidden_size, Layout()
    for block in range(config.num_mtp_layers):
        prefix = f"mtp.{block}."
        layout |= layer_layout(config, prefix, 0, is_hashed=False) | hyper_head_layout(config, prefix)
        layout |= {f"{prefix}{name}.weight": TensorSpec((d, d), "fp8") for name in ("e_proj", "h_proj")}
        layout |= {f"{prefix}{name}.weight": TensorSpec((d,), "bf16") for name in ("enorm", "hnorm", "norm")}
    return layout


def scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def stored_form(layout: Layout) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors' type, shape) of every stored tensor, scales included."""
    for name, spec in layout.items():
        if spec.storage in _PLAIN:
            yield name, _PLAIN[spec.storage], spec.shape
            continue
        rows, columns = spec.shape
        is_fp4 = spec.storage == "fp4"
        block = FP4_BLOCK if is_fp4 else FP8_BLOCK
        yield name, "I8" if is_fp4 else "F8_E4M3", (rows, columns // 2) if is_fp4 else spec.shape
        yield scale_name(name), "F8_E8M0", (-(-rows // block[0]), -(-columns // block[1]))


def check_headers(headers: Headers, config: DeepseekV4Config, *, with_drafter: bool) -> None:
    """Raise DamagedFile naming the first tensor that is missing, unexpected, or of another type or shape.

    The drafter's tensors may be absent altogether unless ``with_drafter``.
    """
    wanted = {name: (dtype, shape) for name, dtype, shape in stored_form(trunk_layout(config))}
    drafter = {name: (dtype, shape) for name, dtype, shape in stored_form(drafter_layout(config))}
    has_drafter = any(name in headers.tensors for name in drafter)
    if with_drafter or has_drafter:
        wanted |= drafter
    for name, (dtype, shape) in wanted.items():
        found = headers.tensors.get(name)
        if found is None:
            way = ", or give --drafter none" if name in drafter and not has_drafter else ""
            raise DamagedFile(f"{headers.folder}: the weights lack {name}; fetch the model again{way}")
        _check_form(found, name, dtype, shape)
    left = sorted(name for name in headers.tensors if name not in wanted)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise DamagedFile(
            f"{headers.tensors[left[0]].file}: the tensor {left[0]}{more} is none of those the config asks for; "
            "fetch the model again"
        )


def _check_form(found: StoredTensor, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if found.dtype != dtype:
        raise DamagedFile(f"{found.file}: {name} is stored as {found.dtype}, must be {dtype}; fetch the file again")
    if found.shape != shape:
        raise DamagedFile(
            f"{found.file}: {name} has shape {list(found.shape)}, but the config asks for {list(shape)}; "
            "fetch the file again"
        )


@dataclass(frozen=True)
class Part:
    """What a rank takes of one tensor: ``start:stop`` of an axis of its logical shape."""

    axis: int
    start: int
    stop: int


def split_axis(name: str) -> int | None:
    """The axis along which ranks share a tensor; None where every rank holds it whole."""
    return 0 if _SPLIT_ROWS.fullmatch(name) else 1 if _SPLIT_COLUMNS.fullmatch(name) else None


def part_of(name: str, shape: tuple[int, ...], rank: int, num_ranks: int) -> Part | None:
    """The slice of ``name`` for a rank; None for all of it. Ranks get equal slices (see ``check_ranks``)."""
    axis = split_axis(name) if num_ranks > 1 else None
    if axis is None:
        return None
    size = shape[axis] // num_ranks
    return Part(axis, rank * size, (rank + 1) * size)


def check_ranks(config: DeepseekV4Config, num_ranks: int) -> None:
    """Raise UsageError where the model does not divide into so many equal parts."""
    sizes = {
        "attention heads": config.num_heads,
        "output groups": config.o_groups,
        "tokens of the vocabulary": config.vocab_size,
        # Two codes to a byte; a block whose scale is for several ranks gives it to each.
        "pairs of an expert's width": config.expert_width // 2,
    }
    for what, size in sizes.items():
        if size % num_ranks:
            raise UsageError(
                f"{num_ranks} devices cannot share the model's {size} {what} equally; give a number that can"
            )


class CheckpointSource:
    """Checked tensors by name, for one rank."""

    def __init__(self, folder: Path, config: DeepseekV4Config, layout: Layout, *, rank: int = 0, num_ranks: int = 1):
        """``layout``: what will be taken, all or a part of the checkpoint.

        Raises DamagedFile, ModelNotFound, or UsageError where ``num_ranks`` does not divide the model.
        """
        check_ranks(config, num_ranks)
        self.headers = read_headers(folder)
        check_headers(self.headers, config, with_drafter=any(name.startswith(DRAFTER_PREFIX) for name in layout))
        self.layout: Mapping[str, TensorSpec] = layout
        self._rank, self._num_ranks = rank, num_ranks
        self._left = Counter(self.headers.tensors[name].file for name, _, _ in stored_form(layout))
        self._taken: set[str] = set()
        self._open: dict[Path, Any] = {}

    @property
    def num_open(self) -> int:
        """Files open now."""
        return len(self._open)

    def take(self, name: str) -> Stored:
        """This rank's part of a tensor: a plain one, or codes with their scales.

        Raises DamagedFile when it cannot be read or holds NaN or infinity.
        """
        spec = self.layout[name]
        part = part_of(name, spec.shape, self._rank, self._num_ranks)
        if spec.storage in _PLAIN:
            return self._read(name, part)
        is_fp4 = spec.storage == "fp4"
        codes = self._read(name, _halved(part) if is_fp4 else part)
        scales, block = self._read(scale_name(name), None), FP4_BLOCK if is_fp4 else FP8_BLOCK
        if part is not None:
            scales, block = cut_scales(scales, block, part.axis, part.start, part.stop)
        return ScaledWeight(codes, scales, block)

    def finish(self) -> None:
        """Raise ValueError when tensors of the layout are left: the model that asked for them forgot some."""
        left = sorted(name for name in self.layout if name not in self._taken)
        if left:
            raise ValueError(f"{len(left)} tensors were not taken, first {left[0]}")

    def _read(self, name: str, part: Part | None) -> Tensor:
        file = self.headers.tensors[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            # Indexing copies, so nothing keeps the file's pages.
            tensor = self._open[file].get_slice(name)[_index_of(part)]
        except (SafetensorError, RuntimeError, OSError) as error:
            raise DamagedFile(f"{file}: {name} cannot be read ({error}); fetch the file again") from error
        if name not in self._taken:
            self._taken.add(name)
            self._left[file] -= 1
        if not self._left[file]:
            del self._open[file]
        tensor = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
        if has_bad_numbers(tensor):
            raise DamagedFile(f"{file}: {name} holds NaN or infinity; fetch the file again")
        return tensor


def _index_of(part: Part | None) -> tuple[slice, ...]:
    if part is None:
        return (slice(None),)
    return (*[slice(None)] * part.axis, slice(part.start, part.stop))


def _halved(part: Part | None) -> Part | None:
    """In bytes of two codes where inputs are cut."""
    return part if part is None or part.axis == 0 else Part(1, part.start // 2, part.stop // 2)
