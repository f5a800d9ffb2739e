"""Published FP8 checkpoints: float8_e4m3 codes with one scale a block load as the numbers they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from models.pairs import CPU, Pair, assert_close, make_theirs, random_ids, run_chunks, their_logits
from sparkchat.errors import DamagedFile, SparkchatError, UsageError
from sparkchat.models import load_target
from sparkchat.models.fused import MOST_SMALL_ROWS, product
from sparkchat.models.linear import Fp8Linear, PlainLinear, make_linear
from sparkchat.models.quant import GroupedWeight, Weight, block_scaled, dense, stack_rows, take_columns, take_rows
from sparkchat.models.weights import FolderSource

FP8 = torch.float8_e4m3fn
QUANTISED = re.compile(r"(self_attn|mlp)\.\w+_proj\.weight$")
KINDS: dict[str, tuple[str, tuple[int, int], torch.dtype]] = {
    "qwen3": ("qwen3", (8, 8), torch.bfloat16),
    "qwen3 scales in fp32": ("qwen3", (16, 16), torch.float32),
    "inputs that do not divide": ("qwen3", (16, 32), torch.bfloat16),
    "outputs that do not divide": ("llama", (7, 8), torch.float32),
    "qwen2, biased": ("qwen2", (8, 8), torch.bfloat16),
}


def quantised(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the float32 numbers they stand for, block by block."""
    rows, columns = block
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), dtype=dtype)
    codes, values = torch.zeros_like(weight, dtype=FP8), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / scales[i, j].float()).clamp(-448, 448).to(FP8)
            values[here] = codes[here].float() * scales[i, j].float()
    return codes, scales, values


def write_fp8(folder: Path, model_type: str, block: tuple[int, int], scale_dtype: torch.dtype, **changes: Any) -> Any:
    """Write a random model in FP8; returns transformers' own with the numbers that the codes stand for."""
    theirs = make_theirs(model_type, **changes)
    theirs.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if QUANTISED.search(name):
            stored[name], stored[f"{name}_scale_inv"], values[name] = quantised(weight, block, scale_dtype)
        else:
            stored[name] = weight.to(torch.bfloat16)
            values[name] = stored[name].float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    theirs.load_state_dict(values)
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        },
    )
    return theirs


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, build_once: Callable[..., Any]) -> Pair:
    model_type, block, dtype = KINDS[request.param]

    def build(folder: Path) -> Pair:
        theirs = write_fp8(folder, model_type, block, dtype)
        return Pair(theirs, load_target(folder, device=CPU, dtype=torch.float32), folder)

    return build_once(f"fp8-{request.param}", build)


def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(pair: Pair) -> None:
    ids = random_ids(40)
    cache = pair.ours.new_cache(1, 64, 40)
    assert_close(run_chunks(pair.ours, cache, cache.allocate(), ids, (33, 1, 6)), their_logits(pair, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_are_those_that_transformers_reads(dtype: torch.dtype) -> None:
    codes, scale, _ = quantised(torch.randn(96, 80, generator=torch.Generator().manual_seed(3)), (16, 16), dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(dense(block_scaled(codes, scale, (16, 16))), theirs)


def test_by_itself_it_runs_in_bfloat16_on_the_cpu(pair: Pair) -> None:
    assert load_target(pair.folder, device=CPU).config.dtype_name == "bfloat16"


def test_blocks_of_128_stay_codes_when_heads_and_projections_move() -> None:
    """As for a published Qwen3: heads of 128, so whole groups move."""
    torch.manual_seed(0)
    codes, scale, values = quantised(torch.randn(256, 384), (128, 128), torch.bfloat16)
    weight = block_scaled(codes, scale, (128, 128))
    assert isinstance(weight, GroupedWeight) and weight.group == 128 and weight.codes.dtype == FP8
    assert torch.equal(weight.dense(), values)
    heads = torch.tensor([2, 0, 1])[:, None] * 128 + torch.arange(128)
    moved = take_columns(weight, heads.flatten())
    assert isinstance(moved, GroupedWeight) and torch.equal(moved.dense(), values[:, heads.flatten()])
    rows = torch.randperm(256)
    both = stack_rows([take_rows(weight, rows), weight])
    assert isinstance(both, GroupedWeight) and torch.equal(both.dense(), torch.cat([values[rows], values]))


def published_block(seed: int = 0) -> tuple[Weight, Tensor]:
    """A weight [256, 384] with blocks of 128, and its numbers."""
    codes, scale, values = quantised(
        torch.randn(256, 384, generator=torch.Generator().manual_seed(seed)), (128, 128), torch.bfloat16
    )
    return block_scaled(codes, scale, (128, 128)), values


@pytest.mark.parametrize("epilogue", ["none", "silu_mul", "partials"])
@pytest.mark.parametrize("rows", [1, 5, MOST_SMALL_ROWS + 1])
def test_codes_are_multiplied_as_they_are_on_a_gpu(epilogue: str, rows: int) -> None:
    """The kernel's reference takes codes and block scales; many rows take the unpacked weight."""
    weight, values = published_block()
    linear = Fp8Linear.of(weight, torch.ones(256), CPU)
    assert linear is not None and linear.weight.dtype == FP8 and linear.scales is not None
    assert linear.scales.shape == (2, 3) and linear.dtype == torch.bfloat16
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = exact = x.float() @ values.T + 1
    got = product(x, linear, epilogue, torch.float32 if epilogue == "none" else None).float()
    if epilogue == "partials" and got.dim() == 3:
        got = got.sum(dim=0)
    if epilogue == "silu_mul":
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    assert (got - exact).norm() / exact.norm() < 0.01
    assert (linear(x).float() - plain).norm() / plain.norm() < 0.01


def test_heads_that_move_whole_keep_their_blocks_and_others_are_unpacked() -> None:
    weight, values = published_block()
    inside = (torch.tensor([1, 0])[:, None] * 128 + torch.randperm(128)).flatten()
    moved = Fp8Linear.of(take_rows(weight, inside), None, CPU)
    assert moved is not None
    eye = torch.eye(384, dtype=torch.bfloat16)
    assert torch.equal(moved(eye).T, values[inside].bfloat16())
    assert Fp8Linear.of(take_rows(weight, torch.arange(256).roll(64)), None, CPU) is None
    assert Fp8Linear.of(torch.ones(128, 128), None, CPU) is None
    small = block_scaled(torch.ones(16, 16).to(FP8), torch.ones(2, 2), (8, 8))
    assert Fp8Linear.of(small, None, CPU) is None


def test_float8_stays_where_it_can_be_multiplied() -> None:
    weight, _ = published_block()
    elsewhere = torch.device("meta")  # any device that is no CPU
    assert isinstance(make_linear(weight, None, device=elsewhere, dtype=torch.bfloat16), PlainLinear)
    assert not isinstance(make_linear(weight, None, device=elsewhere, dtype=torch.bfloat16), Fp8Linear)
    assert not isinstance(make_linear(weight, None, device=CPU, dtype=None), Fp8Linear)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
SPOILED: list[tuple[type[SparkchatError], str, Callable[[dict[str, Tensor]], Any]]] = [
    (DamagedFile, f"lack {UP}_scale_inv", lambda t: t.pop(f"{UP}_scale_inv")),
    (DamagedFile, "scale_inv has shape", lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 2)})),
    (DamagedFile, "scale_inv holds NaN", lambda t: t[f"{UP}_scale_inv"].fill_(float("inf"))),
    (DamagedFile, f"{UP} holds NaN", lambda t: t[UP].view(torch.uint8)[3, 3].fill_(0xFF)),
    (DamagedFile, "float8 and no matrix", lambda t: t.update({"model.norm.weight": torch.ones(48).to(FP8)})),
    (DamagedFile, f"{UP} has shape", lambda t: t.update({UP: t[UP][:-8].contiguous()})),
    (DamagedFile, "does not know", lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)})),
    (UsageError, "only floating-point scales", lambda t: t.update({f"{UP}_scale_inv": torch.ones(10, 6).byte()})),
]


@pytest.mark.parametrize(("kind", "words", "change"), SPOILED, ids=[words for _, words, _ in SPOILED])
def test_a_spoiled_checkpoint_is_refused(
    kind: type[SparkchatError], words: str, change: Callable[[dict[str, Tensor]], Any], tmp_path: Path
) -> None:
    write_fp8(tmp_path, "qwen3", (8, 8), torch.float32)
    spoil(tmp_path, change)
    with pytest.raises(kind, match=re.escape(words)):
        load_target(tmp_path, device=CPU)


def test_float8_without_a_word_of_it_in_the_config_is_refused(tmp_path: Path) -> None:
    write_fp8(tmp_path, "qwen3", (8, 8), torch.float32)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        load_target(tmp_path, device=CPU)
    assert FolderSource(tmp_path).dtype_of(UP) == "F8_E4M3"
