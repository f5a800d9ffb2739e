"""Writes a drafter in DeepSpec's folder layout: one model.safetensors without prefixes and a flat config.json."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sparkchat.models.dspark.config import DrafterConfig, to_json


def save_drafter(
    folder: Path, config: DrafterConfig, state_dict: dict[str, Tensor], *, max_context: int = 32768
) -> None:
    """Write ``state_dict`` under its own names (see section 7.3 of DeepSpec's layout: fc.weight, layers.{i}....).

    ``embed_tokens.weight`` and ``lm_head.weight`` may be left out: the target's are then used. With a reduced draft
    vocabulary ``d2t`` [Vd] int64 must be there: target id = draft id + d2t[draft id].
    """
    if (config.draft_vocab_size != config.vocab_size) != ("d2t" in state_dict):
        raise ValueError("d2t goes with a draft_vocab_size that differs from vocab_size")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state_dict.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    text = json.dumps(to_json(config, dtype, max_context), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
