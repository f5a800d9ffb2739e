"""What a captured step of DeepSeek V4 launches on a GPU: kernels in its layers, and what torch does around them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fixtures.deepseek_v4 import TINY_SIZES, v4_config
from kernels.census import Launch, census
from sparkchat.engine.captured.build import build_decoder
from sparkchat.engine.captured.graphs import EagerStages
from sparkchat.engine.captured.laws import Draws
from sparkchat.engine.captured.step import CapturedStep
from sparkchat.engine.loading import load_pair
from sparkchat.params import LoadSpec

SIZES: dict[str, Any] = {
    **TINY_SIZES,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "moe_intermediate_size": 256,
    "dspark_markov_rank": 64,
}
"""The least that the kernels' tiles take."""
AROUND = 8
"""Most operations of torch in a verification or a draft, around its layers."""


@contextmanager
def opened_step(folder: Path) -> Iterator[CapturedStep]:
    """The step as a GPU runs it; nothing is computed."""

    def always(device: torch.device, dtype: torch.dtype) -> bool:
        return True

    spec = {"device": "cpu", "dtype": "bfloat16", "context": 200, "concurrency": 2, "graphs": True, "threads": 1}
    zeros = torch.zeros
    with ExitStack() as stack:
        for module in ("models.deepseek_v4.packed", "models.deepseek_v4.gate", "models.deepseek_v4.tile_products"):
            stack.enter_context(mock.patch(f"sparkchat.{module}.has_kernels", always))
        stack.enter_context(mock.patch("sparkchat.engine.captured.build.has_kernels", always))
        stack.enter_context(mock.patch("sparkchat.models.deepseek_v4.loading.UNPACKED_BYTES", 0))
        stack.enter_context(mock.patch("torch.backends.mkldnn.is_available", lambda: False))
        pair, _ = load_pair(LoadSpec("v4", str(folder), str(folder), dummy_weights=True, **spec), lambda event: None)  # type: ignore[arg-type]
        # Kernels are chosen by where tensors lie; what was never computed must still be a possible token.
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True, create=True))
        step: Any = build_decoder(pair, 2, pair.block_size, EagerStages(), is_fused=True)._step
        step._enters = True
        stack.enter_context(mock.patch("torch.empty", lambda *sizes, **options: zeros(*sizes, **options)))
        yield step


def launches(folder: Path, layers: int) -> tuple[list[Launch], list[Launch]]:
    """Of a verification and of a draft, without what stands for allocations here."""
    ratios, taps = [0, *[4, 16] * 2][:layers], [layers - 1]
    sizes = {**SIZES, "num_hidden_layers": layers, "compress_ratios": ratios, "dspark_target_layer_ids": taps}
    folder.mkdir()
    config = v4_config(sizes)
    config["compress_ratios"] = [*ratios, 0]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with opened_step(folder) as step:
        found = [census(lambda: step.verify(6, Draws.SAMPLED, False)), census(lambda: step.draft(1, Draws.SAMPLED))]
    verified, drafted = ([one for one in each if one.name != "zeros"] for each in found)
    return verified, drafted


def test_layers_launch_kernels_alone(tmp_path: Path) -> None:
    """Two layers more are kernels more, and nothing of torch; a sparse one is 14 launches, a dense one 12."""
    (few, drafted), (more, drafted_again) = (launches(tmp_path / str(layers), layers) for layers in (1, 3))
    torchs = [Counter(one.name for one in each if not one.is_ours) for each in (few, more, drafted, drafted_again)]
    assert torchs[0] == torchs[1] and torchs[2] == torchs[3]
    assert 0 < torchs[0].total() <= AROUND and torchs[2].total() <= AROUND
    added = Counter(one.name for one in more) - Counter(one.name for one in few)
    assert added["_connect_streams"] == 4 and added["_mix_experts"] == added["_attend_latents"] == 2
    assert added.total() <= 14 + 12 and added["_joint_product"] == 2
    assert sum(one.is_ours for one in drafted) < len(few)
