"""Graphs that are thrown away for others: the memory is given back, and what is captured anew is right and by the plans
that were taken. Needs torch, triton and pytest, and no other package."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
ROWS, WIDTH = 6, 1024


def test_renewed_graphs_hold_no_memory_and_run_by_other_plans() -> None:
    from sparkchat.engine.captured.graphs import GraphStages
    from sparkchat.kernels.launch import Overlap
    from sparkchat.kernels.norm import add_rms_norm
    from sparkchat.kernels.plans import LaunchPlans, kernels_launched

    device = torch.device("cuda")
    x, weight = torch.randn(ROWS, WIDTH, device=device), torch.ones(WIDTH, device=device)
    out = torch.zeros_like(x)
    stages = GraphStages(device, Overlap.NONE)

    def stage() -> None:
        held = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
        add_rms_norm(x, None, weight, 1e-6, out)
        held.add_(1)

    wanted, asked = torch.nn.functional.rms_norm(x, (WIDTH,), eps=1e-6), []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    try:
        for text in ("", "carveout=100", "", "overlap=behind"):
            stages.renew(LaunchPlans.parse(text))
            assert stages.num_graphs == 0 and torch.cuda.memory_reserved() <= before + (4 << 20)
            stages.prepare("norm", stage)
            assert torch.cuda.memory_reserved() >= before + (64 << 20)
            out.zero_()
            stages.run("norm", stage)
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
            (kernel,) = kernels_launched()
            assert kernel.registers > 0 and kernel.fit > 0
            asked.append(kernel.carveout)
    finally:
        stages.renew(LaunchPlans())
    assert asked[1] == 100 and asked[0] == asked[2] == asked[3] != 100
