"""Attention of one query a row over a cache filled up to a common position."""

import torch
from torch import Tensor


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """q [R, H, D] over keys, values [R, K, T, D] at positions 0..position[0] -> [R, H, D].

    The position is read on the device, so one captured graph serves every step.
    """
    if q.is_cuda:
        from sparkchat.train.triton_kernels import launch_decode_attention

        return launch_decode_attention(q, keys, values, position)
    return decode_attention_reference(q, keys, values, position)


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """The same in plain torch, in fp32."""
    rows, num_heads, head_dim = q.shape
    grouped = q.float().view(rows, keys.shape[1], -1, head_dim)
    scores = grouped @ keys.float().transpose(-1, -2) * head_dim**-0.5
    visible = torch.arange(keys.shape[2], device=q.device) <= position
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ values.float()).view(rows, num_heads, head_dim).to(q.dtype)
