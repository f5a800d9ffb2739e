"""The trainer's kernels against their references; on a GPU, or in Triton's interpreter when asked for."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET is not set", allow_module_level=True)

from fixtures.triton_interpreter import interpreter_that_copes  # noqa: F401
from sparkchat.train.decode_attention import decode_attention_reference
from sparkchat.train.losses import Shaping, SlotTargets, block_losses
from sparkchat.train.triton_kernels import (
    launch_block_losses,
    launch_decode_attention,
    launch_target_probabilities,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bf16 products are wrong; fp16 exercises the same code there.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.mark.parametrize(("heads", "kv_heads", "last"), [(9, 3, 0), (9, 3, 63), (9, 3, 64), (4, 2, 150), (6, 6, 199)])
def test_decode_attention(heads: int, kv_heads: int, last: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, heads, 64, device=DEVICE, dtype=HALF)
    keys, values = (torch.randn(5, kv_heads, 200, 64, device=DEVICE, dtype=HALF) for _ in range(2))
    # What lies behind the position was never written: it must not be read into the result.
    keys[:, :, last + 1 :] = values[:, :, last + 1 :] = float("nan")
    position = torch.tensor([last], device=DEVICE)
    got = launch_decode_attention(q, keys, values, position)
    clean = (x.nan_to_num() for x in (keys, values))
    torch.testing.assert_close(got, decode_attention_reference(q, *clean, position), atol=2e-2, rtol=2e-2)


def make_shaping(vocab: int, has_penalty: bool) -> Shaping:
    """Two sequences of four positions."""
    first_seen = torch.randint(0, 8, (2, vocab), dtype=torch.int32, device=DEVICE) if has_penalty else None
    values = (torch.tensor(x, device=DEVICE) for x in ([0.7, 0.5], [1.0, 1.1]))
    return Shaping(*values, first_seen, 4)


@pytest.mark.parametrize(("vocab", "kept"), [(5000, 1300), (2048, 2048), (100, 7)])
@pytest.mark.parametrize("has_penalty", [False, True])
def test_target_probabilities(vocab: int, kept: int, has_penalty: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, vocab, device=DEVICE) * 5 + 2
    shaping = make_shaping(vocab, has_penalty)
    out = torch.full((6, kept), float("nan"), device=DEVICE)
    launch_target_probabilities(logits, 2, shaping, out)
    want = shaping.shaped(logits, torch.arange(2, 8, device=DEVICE))[0].softmax(dim=-1)[:, :kept]
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kept", [1024, 1000, 37])
@pytest.mark.parametrize("has_penalty", [False, True])
def test_block_losses(kept: int, has_penalty: bool) -> None:
    torch.manual_seed(0)
    rows = 11
    z = torch.randn(rows, kept) * 4
    probabilities = (torch.randn(8, kept + 50) * 4).softmax(dim=-1)[:, :kept].to(HALF)
    labels = torch.randint(-1, kept, (rows,))
    labels[3] = -1
    shaping = make_shaping(kept + 50, has_penalty)
    on_device = [x.to(DEVICE) for x in (probabilities, torch.randint(0, 8, (rows,)), labels, torch.rand(rows))]
    targets = SlotTargets(*on_device, shaping, 0.1, 0.9)
    got = launch_block_losses(z[2:].to(DEVICE), targets, slice(2, rows), torch.float32)
    seen = None if shaping.first_seen is None else shaping.first_seen.cpu()
    slow = Shaping(shaping.temperature.cpu(), shaping.penalty.cpu(), seen, 4)
    on_cpu = SlotTargets(*(x.cpu() for x in on_device), slow, 0.1, 0.9)
    want = block_losses(z[2:], on_cpu, slice(2, rows), torch.float32)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value.cpu(), expected, atol=1e-5, rtol=1e-4)
