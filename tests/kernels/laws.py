"""Settings and logits that exercise every rule of the laws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkchat.kernels.sampling import DrawSettings

# Temperature, top-k, top-p, min-p.
SETTINGS = (
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 0.8, 0.0),
    (1.5, 0, 0.95, 0.0),
    (0.3, 3, 1.0, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.2, 200, 0.6, 0.02),
    (3.0, 0, 0.99, 0.0),
)


def settings_of(rows: Sequence[tuple[float, int, float, float]], device: torch.device, round0: int = 3) -> DrawSettings:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seeds = [2**63 - 1 - 977 * i if i % 2 else -(2**62) + i for i in range(len(rows))]
    return DrawSettings(
        tensor(temperature, torch.float32),
        tensor(top_k, torch.int32),
        tensor(top_p, torch.float32),
        tensor(min_p, torch.float32),
        tensor(seeds, torch.int64),
        tensor([round0 + 2**33 * (i % 3) for i in range(len(rows))], torch.int64),
    )


def peaked_logits(rows: int, vocab: int, device: torch.device) -> Tensor:
    """[rows, vocab] with a few likely tokens, many ties, and impossible tokens."""
    logits = torch.randn(rows, vocab) * 2
    logits.scatter_add_(1, torch.randint(0, vocab, (rows, 12)), torch.rand(rows, 12) * 8)
    logits[::2] = (logits[::2] * 4).round() / 4
    logits[:, 5] = -torch.inf
    return logits.to(device)
