"""Products of one input with weights of two formats in one launch, against the two by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.test_fp8_linear import NAN, half, weight_of
from sparkchat.kernels.fp8.joint import JointProduct, joint_plan, joint_reference, takes_joint
from sparkchat.kernels.fp8.joint_kernel import launch_joint
from sparkchat.kernels.fp8.plan import MOST_PAIRS


def product_of(outs: int, plain: int, size: int, device: torch.device, whole_from: int | None = None) -> JointProduct:
    weight = torch.randn(plain, size, device=device, dtype=half(device)) * size**-0.5
    return JointProduct(weight_of(outs, size, device), weight, whole_from)


def run(product: JointProduct, x: torch.Tensor, is_rounded: bool = False, by_kernel: bool = True):  # type: ignore[no-untyped-def]
    plan, n = product.plan, product.plain.shape[0]
    out, plain, whole = (
        torch.full(shape, NAN, device=x.device)
        for shape in (
            (plan.codes.splits, len(x), product.codes.shape[0]),
            (plan.plain_splits, len(x), n),
            (len(x), n - product.whole_from),
        )
    )
    if by_kernel:
        launch_joint(x, product, out, plain, whole, is_rounded, plan)
    else:
        joint_reference(x, product, out, plain, whole, is_rounded)
    return out, plain[..., : product.whole_from], whole


@pytest.mark.parametrize(("rows", "plain", "whole_from"), [(6, 128, None), (17, 80, 64)])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_against_the_reference(
    rows: int, plain: int, whole_from: int | None, is_rounded: bool, device: torch.device
) -> None:
    product = product_of(32, plain, 512, device, whole_from)
    x = torch.randn(rows, 512, device=device, dtype=half(device))
    for got, want in zip(run(product, x, is_rounded), run(product, x, is_rounded, by_kernel=False), strict=True):
        torch.testing.assert_close(got, want, atol=3e-3, rtol=3e-3)
    # Those that are added up can be again: the count of who has come is as it was.
    assert not product.arrived.any()
    assert torch.equal(run(product, x, is_rounded)[2], run(product, x, is_rounded)[2])


def test_a_row_does_not_depend_on_how_many_there_are(device: torch.device) -> None:
    product = product_of(32, 72, 512, device, 64)
    x = torch.randn(33, 512, device=device, dtype=half(device))
    together = run(product, x)
    for count in (1, 9):
        for alone, all_of_them in zip(run(product, x[:count].clone()), together, strict=True):
            torch.testing.assert_close(alone, all_of_them[..., :count, :], atol=1e-6, rtol=1e-6)


def test_codes_in_a_launch_of_their_own_give_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = product_of(128, 72, 512, device, 64)
    x = torch.randn(20, 512, device=device, dtype=half(device))
    together = run(product, x)
    # As of many rows of a large weight.
    monkeypatch.setattr(
        "sparkchat.kernels.fp8.joint_kernel.widened", lambda plan, *sizes: replace(plan, pairs=MOST_PAIRS, stages=3)
    )
    for apart, joint in zip(run(product, x), together, strict=True):
        torch.testing.assert_close(apart, joint, atol=1e-6, rtol=1e-6)
    assert not product.arrived.any()


def test_the_call_leaves_what_the_reference_leaves() -> None:
    product = product_of(64, 72, 512, torch.device("cpu"), 64)
    x = torch.randn(3, 512, dtype=torch.float16)
    out, plain, whole = product(x)
    want = run(product, x, by_kernel=False)
    assert torch.equal(out, want[0]) and torch.equal(plain[..., :64], want[1]) and torch.equal(whole, want[2])
    torch.testing.assert_close(whole, x.float() @ product.plain[64:].float().T, atol=1e-4, rtol=1e-4)


def test_plans_and_what_is_refused() -> None:
    plans = [joint_plan(1536, 4096, plain) for plain in (1024, 2624, 64)]
    assert [(plan.codes.splits, plan.plain_splits) for plan in plans[:2]] == [(4, 4), (2, 4)]
    for plan in plans:
        assert 4096 % (plan.plain_splits * 128) == 0 and plan.codes.part(4096) * plan.codes.splits == 32
    codes = weight_of(32, 512, torch.device("cpu"))
    assert not takes_joint(codes, torch.zeros(64, 256))
    with pytest.raises(ValueError, match="one launch"):
        JointProduct(codes, torch.zeros(100, 512), 70)
    with pytest.raises(ValueError, match="inputs"):
        JointProduct(codes, torch.zeros(100, 512))(torch.zeros(2, 128))
