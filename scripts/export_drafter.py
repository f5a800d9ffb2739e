"""Writes a pair in the form that vLLM's loader and llama.cpp's converter expect.

    python scripts/export_drafter.py MODEL OUT [--drafter DIR]

MODEL is a .gguf file or a model folder. OUT/drafter is the drafter with the output rows of its own draft vocabulary:
both engines can share a whole output head with the target, but not a part of one, and our file leaves the rows out
because the target has them. OUT/target, for a .gguf, has the config.json and tokenizer that llama.cpp's converter
reads (which imports sentencepiece, although this tokenizer needs none of it):

    python convert_hf_to_gguf.py OUT/drafter --target-model-dir OUT/target --outtype q8_0 --outfile drafter.gguf
    llama-server -m MODEL -md drafter.gguf --spec-type draft-dspark --spec-draft-n-max 5
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparkchat.tokenizer import load_tokenizer
from sparkchat.train.weights import TargetShape, read_target

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path, default=ROOT / "sparkchat" / "drafters" / "smollm2-135m")
    options = parser.parse_args()
    shape, weights = read_target(options.model)
    write_drafter(options.drafter, weights, options.out / "drafter")
    print(options.out / "drafter")
    if options.model.is_file():
        write_target(options.model, shape, options.out / "target")
        print(options.out / "target")


def write_drafter(drafter: Path, weights: dict[str, torch.Tensor], out: Path) -> None:
    """The drafter's own tensors, and ``lm_head.weight`` [Vd, d] where a reduced vocabulary came without one."""
    tensors = load_file(drafter / "model.safetensors")
    if "d2t" in tensors and "lm_head.weight" not in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
        tensors["lm_head.weight"] = head[ids].to(tensors["fc.weight"].dtype).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(drafter / "config.json", out / "config.json")


def write_target(model: Path, shape: TargetShape, out: Path) -> None:
    """config.json and tokenizer of a GGUF file; no weights."""
    tokenizer = load_tokenizer(model).tokenizer
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.model_type]],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_context,
        "tie_word_embeddings": shape.tied,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
