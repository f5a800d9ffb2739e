"""silu(gate) * up, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_reference(gate_up: Tensor, out: Tensor) -> None:
    """See ``silu_mul``."""
    gate, up = gate_up.float().chunk(2, dim=1)
    out.copy_(F.silu(gate) * up)
