"""What benchmarks/v4_decode.py runs: shapes of V4-Flash with either drafter, or tiny ones; and what they must read."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from sparkchat.models.deepseek_v4.layout import Layout, trunk_layout
from sparkchat.models.deepseek_v4.load_plan import packed_bytes
from sparkchat.models.deepseek_v4.loading import read_v4_config
from sparkchat.models.deepseek_v4.weights import drafter_layout

SHAPES = Path(__file__).resolve().parents[1] / "sparkchat" / "shapes" / "deepseek-v4-flash"
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 4,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "compress_ratios": [4, 16, 0],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_hash_layers": 0,
    "max_position_embeddings": 4096,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [1],
}


def write(folder: Path, *, is_tiny: bool) -> tuple[Path, Path]:
    """Folders with a config.json each: with DSpark's three stages, and with the preview's MTP block."""
    config = json.loads((SHAPES / "config.json").read_text(encoding="utf-8")) | (TINY if is_tiny else {})
    stages = len(config["dspark_target_layer_ids"])
    preview = {k: v for k, v in config.items() if not k.startswith("dspark_")}
    preview["compress_ratios"] = [*config["compress_ratios"][:-stages], 0]
    found = []
    for name, content in (("dspark", config), ("mtp", preview)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
        found.append(folder / name)
    return found[0], found[1]


def floors(folder: Path, block: int, gpus: int, bandwidth: float) -> dict[str, float]:
    """Milliseconds that reading takes at ``bandwidth`` TB/s of each GPU, with all of it shared evenly.

    A step of one row, the verification of a block, and its draft. Experts of several rows are those that even routing
    is expected to hit.
    """
    config = read_v4_config(folder)
    trunk, drafter = trunk_layout(config), drafter_layout(config)

    def read(layout: Layout, rows: int) -> float:
        experts = {n: spec for n, spec in layout.items() if ".ffn.experts." in n}
        tables = ("embed.weight", "tid2eid", "markov_w1.weight")
        always = packed_bytes({n: s for n, s in layout.items() if n not in experts and not n.endswith(tables)})
        each = packed_bytes(experts) / config.num_experts
        return always + each * experts_expected(folder, rows)

    head = packed_bytes({"head.weight": trunk["head.weight"]})
    markov = sum(packed_bytes({n: s}) for n, s in drafter.items() if n.endswith("markov_w2.weight"))
    # The draft reads the output head once for its block, and W2 once for every draft.
    draft = read(drafter, block) + head + (block - 1) * markov
    per_ms = gpus * bandwidth * 1e9
    found = {"step": read(trunk, 1), "verify": read(trunk, block + 1), "draft": draft}
    found["round"] = found["verify"] + found["draft"]
    return {name: size / per_ms for name, size in found.items()}


def experts_expected(folder: Path, rows: int) -> float:
    """Experts of a layer that so many rows are sent to, by even routing."""
    config = read_v4_config(folder)
    return config.num_experts * (1.0 - (1.0 - config.num_experts_per_token / config.num_experts) ** rows)


def read_bandwidth() -> float:
    """TB/s of reading 8 GiB once on one GPU; the best of several passes."""
    from gpu_timing import read_bandwidth as measured

    return max(measured() for _ in range(3)) / 1e12


def machine(commit: str | None) -> dict[str, Any]:
    if commit is None:
        root = str(Path(__file__).resolve().parents[1])
        asked = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    is_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if is_gpu else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
