"""What lies between the products of a gated layer, where they are not a kernel of ours."""

from __future__ import annotations

from torch import Tensor

from sparkchat.kernels.activation.reference import silu_mul_reference


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [N, n] = silu(gate) * up for gate_up [N, 2n], gate before up; computed in float32, rounded once."""
    if not out.is_cuda:
        silu_mul_reference(gate_up, out)
        return
    from sparkchat.kernels.activation.kernel import launch_silu_mul

    launch_silu_mul(gate_up, out)
