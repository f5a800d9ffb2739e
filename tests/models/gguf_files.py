"""Writes GGUF files from transformers models, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def rotary_permuted(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's order of query and key rows in its llama architecture: rotary pairs side by side."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rotary_restored(weight: Tensor, num_heads: int) -> Tensor:
    """Hugging Face's order of query and key rows."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: PreTrainedModel, kind: GGMLQuantizationType, head_kind: GGMLQuantizationType
) -> dict[str, Tensor]:
    """Write the model with matrices as ``kind`` -> the weights as the file holds them, under the model's names."""
    config = model.config
    arch = config.model_type
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    stored: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = value.float()
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        is_rotated = arch == "llama" and ("q_proj" in name or "k_proj" in name)
        data = (rotary_permuted(weight, heads) if is_rotated else weight).numpy()
        if weight.dim() == 1:
            writer.add_tensor(gguf_name(name), data)
            stored[name] = weight
            continue
        chosen = head_kind if name in TOP else kind
        packed = quantize(data, chosen)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=chosen)
        kept = torch.from_numpy(np.ascontiguousarray(dequantize(packed, chosen), dtype=np.float32))
        if is_rotated:
            kept = rotary_restored(kept, heads)
        stored[name] = kept.view(weight.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
