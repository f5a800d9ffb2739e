"""A tiny random target with a ChatML tokenizer, written as a model folder."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 2, 8, 48, 6


def write_toy_target(folder: Path, model_type: str = "llama") -> Path:
    """A random llama or qwen3 folder of 6 layers; same weights each time."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(folder) + 8
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, std: float = 0.2) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * std

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 0.3),
        "model.norm.weight": torch.rand(HIDDEN, generator=random) + 0.5,
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.rand(HIDDEN, generator=random) + 0.5
        if model_type == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = torch.rand(HEAD_DIM, generator=random) + 0.5
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(model_type, vocab_size)))
    return folder


def _write_tokenizer(folder: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello what is the user assistant system"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def _config(model_type: str, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM" if model_type == "llama" else "Qwen3ForCausalLM"],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 2,
    }
