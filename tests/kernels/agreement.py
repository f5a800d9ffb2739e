"""When two results of one kernel are the same."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_sums(got: Tensor, want: Tensor) -> None:
    """Bit for bit on a GPU; to rounding in the interpreter, whose matrix products are numpy's."""
    if got.is_cuda:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
