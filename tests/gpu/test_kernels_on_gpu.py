"""The kernels at the shapes of Qwen3-8B and SmolLM2-135M on a GPU, against references in float32; then all of a layer
in a CUDA graph with overlapping launches.

``tests/kernels`` runs on a GPU as well, where there is one. Needs torch, triton and pytest, and no other package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CUDA = torch.device("cuda")
HALF = torch.bfloat16
VOCAB = 151936


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def error(got: Tensor, want: Tensor) -> float:
    """Relative size of the difference."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def normal(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.float32).to(dtype)


# Small products

SHAPES = [
    (6144, 4096, "partials"),
    (4096, 4096, "partials"),
    (4096, 4096, "add"),
    (24576, 4096, "silu_mul"),
    (4096, 12288, "partials"),
    (VOCAB, 4096, "none"),
    (960, 576, "partials"),
    (3072, 576, "silu_mul"),
    (576, 1536, "partials"),
    (49152, 576, "none"),
]


def product(x: Tensor, weight: Tensor, epilogue: str, scales: Tensor | None = None) -> Tensor:
    from sparkchat.kernels.gemm import gemm_splits, small_gemm

    n = weight.shape[0]
    shape = {"silu_mul": (x.shape[0], n // 2), "partials": (gemm_splits(weight), x.shape[0], n)}
    out = torch.full(shape.get(epilogue, (x.shape[0], n)), float("nan"), device=CUDA)
    if epilogue == "add":
        out.fill_(1.0)
    small_gemm(x, weight, out, scales=scales, epilogue=epilogue)
    return out


@pytest.mark.parametrize(("n", "k", "epilogue"), SHAPES)
def test_small_product(n: int, k: int, epilogue: str) -> None:
    x, weight = normal(33, k), normal(n, k) * k**-0.5
    together = product(x, weight, epilogue)
    want = x.float() @ weight.float().T
    if epilogue == "silu_mul":
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    got = together.sum(0) if epilogue == "partials" else together
    assert error(got, want + 1 if epilogue == "add" else want) < 1e-4
    # A row's bits do not depend on the rows beside it.
    for count in (1, 2, 8, 16, 17):
        assert torch.equal(product(x[:count].clone(), weight, epilogue), together[..., :count, :]), count
    more = product(torch.cat([x, x]), weight, epilogue)
    assert torch.equal(more[..., :33, :], together)


def test_small_product_in_float32() -> None:
    x, weight = normal(8, 576, dtype=torch.float32), normal(1536, 576, dtype=torch.float32)
    assert error(product(x, weight, "none"), (x.double() @ weight.double().T).float()) < 1e-6


@pytest.mark.parametrize(("n", "k", "epilogue"), [(6144, 4096, "partials"), (24576, 4096, "silu_mul")])
def test_small_product_with_8_bit_weights(n: int, k: int, epilogue: str) -> None:
    from sparkchat.kernels.gemm.reference import dequantise

    x, weight = normal(9, k), (normal(n, k)).to(torch.float8_e4m3fn)
    scales = torch.rand(n // 128, k // 128, device=CUDA) * k**-0.5 + 1e-3
    together = product(x, weight, epilogue, scales)
    want = x.float() @ dequantise(weight, scales).T
    if epilogue == "silu_mul":
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    assert error(together.sum(0) if epilogue == "partials" else together, want) < 1e-4
    assert torch.equal(product(x[:1].clone(), weight, epilogue, scales), together[..., :1, :])


def test_every_8_bit_code_keeps_its_value() -> None:
    """All but NaN, which becomes 480: no weight is one."""
    codes = torch.arange(256, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn).repeat(64, 1)
    unit = torch.eye(256, dtype=HALF, device=CUDA)
    got = product(unit[:64].contiguous(), codes.contiguous(), "none", torch.ones(1, 2, device=CUDA))
    rest = torch.cat([product(unit[at : at + 64].contiguous(), codes, "none", torch.ones(1, 2, device=CUDA))
                      for at in (64, 128, 192)])  # fmt: skip
    got, want = torch.cat([got, rest])[:, 0], codes[0].float()
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])
    assert got[want.isnan()].abs().tolist() == [480.0, 480.0]


# Laws


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_thresholds_of_a_whole_vocabulary(scale: float) -> None:
    """Flat and peaked; in rows that the search over the vocabulary need not take, as ``found`` says."""
    from sparkchat.kernels.accept import AcceptBuffers, accept_block
    from sparkchat.kernels.sampling import DrawSettings, Laws
    from sparkchat.kernels.sampling.reference import laws_reference

    rows = [(1.0, 0, 0.95, 0.0), (1.0, 20, 0.8, 0.0), (0.7, 0, 0.5, 0.01), (1.0, 1000, 1.0, 0.0), (0.0, 20, 0.8, 0.0)]
    logits = torch.randn(len(rows), VOCAB, device=CUDA) * scale
    settings = DrawSettings.empty(len(rows), CUDA)
    for name, values in zip(("temperature", "top_k", "top_p", "min_p"), zip(*rows, strict=True), strict=True):
        getattr(settings, name).copy_(torch.tensor(values))
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=CUDA)
    found = []
    for _ in range(2):
        buffers = AcceptBuffers.empty(logits, len(rows), 1, has_filters=True)
        for _ in range(2):
            accept_block(logits, starts, torch.zeros(len(rows), dtype=torch.int32, device=CUDA), settings, buffers)
        found.append(buffers.laws.probabilities())
    assert buffers.scratch.near is not None and buffers.scratch.near.found[:4, 0].tolist() == [1, 1, 1, 1]
    assert torch.equal(found[0], found[1])
    want = Laws.empty(logits)
    laws_reference(logits, torch.arange(len(rows)), settings, want, slice(None))
    for ours, theirs in zip(found[0], want.probabilities(), strict=True):
        assert int(((ours > 0) != (theirs > 0)).sum()) <= 2
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


# Attention

MODELS = {"qwen3-8b": (32, 8, 128), "smollm2": (9, 3, 64)}


def attend(batch: dict[str, Tensor], most: int, window: int | None, context: int) -> Tensor:
    from sparkchat.kernels.attention import attention_workspace, decode_attention

    num_rows, heads, dim = batch["q"].shape
    space = attention_workspace(num_rows, heads, dim, context, CUDA)
    space.mixed.fill_(float("nan"))
    out = torch.full_like(batch["q"], float("nan"))
    decode_attention(**batch, out=out, workspace=space, max_rows=most, window=window)
    return out


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("start", "window"), [(1000, None), (32768, None), (4000, 700)])
def test_decode_attention(model: str, dtype: torch.dtype, start: int, window: int | None) -> None:
    from sparkchat.kernels.attention.reference import decode_attention_reference

    heads, kv_heads, dim = MODELS[model]
    context, count = 33024, 8
    cache = normal(1, 2 * kv_heads, context, dim, dtype=dtype)
    cache[:, :, start + count :] = float("nan")
    positions = torch.arange(start, start + count, device=CUDA)
    batch = {
        "q": normal(count, heads, dim, dtype=dtype),
        "cache": cache,
        "starts": torch.tensor([0, count], dtype=torch.int32, device=CUDA),
        "rows": torch.zeros(count, dtype=torch.int32, device=CUDA),
        "positions": positions,
        "ends": positions + 1,
    }
    together, want = attend(batch, count, window, context), torch.empty_like(batch["q"])
    decode_attention_reference(**batch, out=want, window=window, pages=None)
    assert error(together, want) < (1e-2 if dtype == HALF else 1e-5)
    one = torch.tensor([0, 1], dtype=torch.int32, device=CUDA)
    for row in (0, 3, 7):
        alone = {name: batch[name][row : row + 1] for name in ("q", "rows", "positions", "ends")}
        assert torch.equal(attend({**alone, "cache": cache, "starts": one}, 1, window, context)[0], together[row])


def test_decode_attention_of_a_ragged_batch() -> None:
    from sparkchat.kernels.attention.reference import decode_attention_reference

    lengths, counts = [5, 900, 333, 2047, 1, 0], [1, 8, 3, 16, 0, 4]
    rows, positions, starts = [], [], [0]
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows += [row] * count
        positions += range(length, length + count)
        starts.append(len(rows))
    batch = {
        "q": normal(len(rows), 32, 128),
        "cache": normal(6, 16, 2304, 128),
        "starts": torch.tensor(starts, dtype=torch.int32, device=CUDA),
        "rows": torch.tensor(rows, dtype=torch.int32, device=CUDA),
        "positions": torch.tensor(positions, device=CUDA),
        "ends": torch.tensor(positions, device=CUDA) + 1,
    }
    want = torch.empty_like(batch["q"])
    decode_attention_reference(**batch, out=want, window=None, pages=None)
    assert error(attend(batch, 16, None, 2304), want) < 1e-2


# Sampling

LAWS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.8, 0.0), (1.2, 0, 0.95, 0.0)]


def settings_of(laws: list[tuple[float, int, float, float]], device: torch.device, seed: int = 5):  # type: ignore[no-untyped-def]
    from sparkchat.kernels.sampling import DrawSettings

    temperature, top_k, top_p, min_p = (list(x) for x in zip(*laws, strict=True))
    count = len(laws)
    return DrawSettings(
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, device=device, dtype=torch.int32),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
        torch.arange(seed, seed + count, device=device),
        torch.arange(count, device=device) + 2**33,
    )


def test_markov_block_at_the_size_of_a_real_vocabulary() -> None:
    from sparkchat.kernels.markov import MarkovBuffers, markov_block

    width, requests, cpu = 7, len(LAWS), torch.device("cpu")
    base = normal(requests, width, VOCAB, dtype=torch.float32) * 2
    base[..., ::1009] += 6
    w1, w2 = normal(VOCAB, 256), normal(VOCAB, 256) * 0.1
    anchors = torch.tensor([5, 77, 151935, 0], device=CUDA)
    before, buffers = base.clone(), MarkovBuffers.empty(base)
    markov_block(base, w1, w2, anchors, settings_of(LAWS, CUDA), buffers)
    previous = torch.cat([anchors[:, None], buffers.tokens[:, :-1]], dim=1)
    bias = w1[previous].float() @ w2.float().T
    assert error(base - before, bias) < 1e-3
    # From the kernel's own logits on, the CPU draws the same tokens with the same numbers.
    copy = base.cpu()
    want = MarkovBuffers.empty(copy)
    markov_block(copy, None, None, anchors.cpu(), settings_of(LAWS, cpu), want)
    assert torch.equal(buffers.tokens.cpu(), want.tokens)
    torch.testing.assert_close(
        buffers.laws.probabilities().cpu(), want.laws.probabilities(), atol=1e-7, rtol=1e-4
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_acceptance_at_the_size_of_a_real_vocabulary(dtype: torch.dtype) -> None:
    from sparkchat.kernels.accept import AcceptBuffers, accept_block
    from sparkchat.kernels.markov import MarkovBuffers, markov_block
    from sparkchat.kernels.sampling import Laws

    width, requests, cpu = 7, len(LAWS), torch.device("cpu")
    base = normal(requests, width, VOCAB, dtype=torch.float32)
    base[..., ::1009] += 6
    block = MarkovBuffers.empty(base)
    anchors = torch.zeros(requests, dtype=torch.int64, device=CUDA)
    markov_block(base, None, None, anchors, settings_of(LAWS, CUDA), block)
    noise = normal(requests, width + 1, VOCAB, dtype=torch.float32) * 0.3
    noise[:, :width] += base
    logits = noise.view(-1, VOCAB).to(dtype)
    starts = torch.arange(0, 8 * requests + 1, 8, device=CUDA, dtype=torch.int32)
    lens = torch.full((requests,), width, device=CUDA, dtype=torch.int32)
    got = AcceptBuffers.empty(logits, requests, width)
    accept_block(
        logits, starts, lens, settings_of(LAWS, CUDA), got,
        drafts=block.tokens, draft_laws=block.laws, draft_index=block.index,
    )  # fmt: skip
    laws = block.laws
    on_cpu = Laws(
        laws.logits.cpu(), laws.peak.cpu(), laws.temperature.cpu(), laws.least.cpu(), laws.scale.cpu(),
        laws.last_tie.cpu(),
    )  # fmt: skip
    want = AcceptBuffers.empty(logits.cpu(), requests, width)
    accept_block(
        logits.cpu(), starts.cpu(), lens.cpu(), settings_of(LAWS, cpu), want,
        drafts=block.tokens.cpu(), draft_laws=on_cpu, draft_index=block.index.cpu(),
    )  # fmt: skip
    assert torch.equal(got.tokens.cpu(), want.tokens)
    assert int(got.accepted_len.sum()) > 4


def test_law_of_the_output_by_chi_square() -> None:
    from sparkchat.kernels.accept import AcceptBuffers, accept_block
    from sparkchat.kernels.markov import MarkovBuffers, markov_block

    requests, vocab, rounds = 256, 12, 60
    law = [(0.9, 8, 0.95, 0.0)] * requests
    settings = settings_of(law, CUDA)
    target, draft = normal(2, vocab, dtype=torch.float32), normal(1, vocab, dtype=torch.float32)
    logits = target.repeat(requests, 1)
    starts = torch.arange(0, 2 * requests + 1, 2, device=CUDA, dtype=torch.int32)
    lens = torch.ones(requests, device=CUDA, dtype=torch.int32)
    base = torch.empty(requests, 1, vocab, device=CUDA)
    block, buffers = MarkovBuffers.empty(base), AcceptBuffers.empty(logits, requests, 1)
    anchors = torch.zeros(requests, dtype=torch.int64, device=CUDA)
    counts = torch.zeros(vocab, device=CUDA)
    accepted = 0
    for step in range(rounds):
        settings.rounds.fill_(step)
        base.copy_(draft.expand_as(base))
        markov_block(base, None, None, anchors, settings, block)
        accept_block(
            logits, starts, lens, settings, buffers,
            drafts=block.tokens, draft_laws=block.laws, draft_index=block.index,
        )  # fmt: skip
        counts += torch.bincount(buffers.tokens[:, 0], minlength=vocab)
        accepted += int(buffers.accepted_len.sum())
    p, q = buffers.laws.probabilities()[0], block.laws.probabilities()[0]
    want = p * requests * rounds
    kept = want > 0
    assert float(counts[~kept].sum()) == 0
    statistic = float(((counts - want)[kept].square() / want[kept]).sum())
    # 1e-4 of a chi-square law of at most 7 degrees of freedom lies above 29.9.
    assert statistic < 29.9
    # A draft is accepted with the probability that the two laws have in common; four standard deviations.
    share, tries = float(torch.minimum(p, q).sum()), requests * rounds
    assert 0.02 < share < 0.98
    assert abs(accepted - tries * share) < 4 * math.sqrt(tries * share * (1 - share))


def test_planner_of_256_requests() -> None:
    from sparkchat.kernels.planner import plan_lengths

    confidence = normal(256, 7, dtype=torch.float32) + 1
    limits = torch.full((256,), 7, device=CUDA, dtype=torch.int32)
    cost = (torch.arange(2100, device=CUDA, dtype=torch.float64) * 0.01 + 3.3).contiguous()
    found = []
    for device in (CUDA, torch.device("cpu")):
        lens = torch.full((256,), -1, device=device, dtype=torch.int32)
        plan_lengths(confidence.to(device), torch.ones(7, device=device), limits.to(device), cost.to(device), lens)
        found.append(lens.cpu())
    assert torch.equal(*found)
    assert 0 < int(found[0].sum()) < 7 * 256


# All of it in a graph


def layer(state: dict[str, Tensor], space: object) -> None:
    """One Qwen3-8B layer, on static buffers."""
    from sparkchat.kernels.attention import decode_attention
    from sparkchat.kernels.gemm import small_gemm
    from sparkchat.kernels.norm import add_rms_norm
    from sparkchat.kernels.rope import write_qkv

    s = state
    add_rms_norm(s["x"], s["down_parts"], s["norm"], 1e-6, s["h"])
    small_gemm(s["h"], s["w_qkv"], s["qkv_parts"], epilogue="partials")
    write_qkv(s["qkv_parts"], s["positions"], s["rows"], s["rope"], s["cache"], s["q"], qk_norm=s["qk"], eps=1e-6,
              is_settled=True)  # fmt: skip
    decode_attention(
        s["q"], s["cache"], s["starts"], s["rows"], s["positions"], s["ends"], s["mixed"], space, max_rows=8,
        is_settled=True,
    )  # type: ignore[arg-type]  # fmt: skip
    small_gemm(s["mixed"].view(8, 4096), s["w_o"], s["o_parts"], epilogue="partials")
    add_rms_norm(s["x"], s["o_parts"], s["norm"], 1e-6, s["h"], is_settled=True)
    small_gemm(s["h"], s["w_up"], s["up"], epilogue="silu_mul")
    small_gemm(s["up"], s["w_down"], s["down_parts"], epilogue="partials")


def layer_state() -> dict[str, Tensor]:
    from sparkchat.kernels.gemm import gemm_splits

    weights = {
        "w_qkv": normal(6144, 4096) * 0.02,
        "w_o": normal(4096, 4096) * 0.02,
        "w_up": normal(24576, 4096) * 0.02,
        "w_down": normal(4096, 12288) * 0.02,
    }
    positions = torch.arange(1000, 1008, device=CUDA)
    parts = {
        f"{name}_parts": torch.zeros(gemm_splits(weights[f"w_{name}"]), 8, width, device=CUDA)
        for name, width in (("qkv", 6144), ("o", 4096), ("down", 4096))
    }
    return {
        **weights,
        **parts,
        "x": normal(8, 4096, dtype=torch.float32),
        "norm": torch.ones(4096, device=CUDA),
        "qk": torch.ones(40, 128, device=CUDA),
        "h": normal(8, 4096),
        "q": normal(8, 32, 128),
        "mixed": normal(8, 32, 128),
        "up": normal(8, 12288),
        "cache": normal(1, 16, 2048, 128),
        "rope": normal(2048, 128, dtype=torch.float32),
        "positions": positions,
        "ends": positions + 1,
        "rows": torch.zeros(8, dtype=torch.int32, device=CUDA),
        "starts": torch.tensor([0, 8], dtype=torch.int32, device=CUDA),
    }


@pytest.mark.parametrize("which", ["none", "small", "all"])
def test_layers_in_a_graph_give_the_same_bits(which: str) -> None:
    from sparkchat.kernels.attention import attention_workspace
    from sparkchat.kernels.launch import Overlap, overlap

    state, space = layer_state(), attention_workspace(8, 32, 128, 2048, CUDA)
    begin = state["x"].clone()

    def steps() -> None:
        state["x"].copy_(begin)
        state["down_parts"].zero_()
        for _ in range(4):
            layer(state, space)

    steps()
    want = state["x"].clone(), state["down_parts"].clone()
    assert want[0].isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with overlap(Overlap(which)):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            steps()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            steps()
    for scale in (1.0, 1.0, 1.0, 0.5):
        for name in ("x", "down_parts", "h", "q", "mixed", "up", "o_parts"):
            state[name].fill_(float("nan"))
        state["cache"][:, :, 1000:1008] = float("nan")
        begin.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(state["x"], want[0]) == (scale == 1.0)
        assert state["x"].isfinite().all()
