"""Numbers, laws and draws: the references against the engine's own, the kernels against the references."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.laws import SETTINGS, peaked_logits, settings_of
from sparkchat.engine import rng, sampling
from sparkchat.kernels.accept import AcceptBuffers
from sparkchat.kernels.accept.kernel import launch_accept_block
from sparkchat.kernels.markov import MarkovBuffers, markov_block
from sparkchat.kernels.markov.kernel import launch_markov_block
from sparkchat.kernels.markov.rows import RoundedRows
from sparkchat.kernels.sampling import DrawSettings, Laws
from sparkchat.kernels.sampling.kernel import uniform
from sparkchat.kernels.sampling.reference import laws_reference, uniforms_reference

NAN = float("nan")


def seeds_as_unsigned(settings: DrawSettings) -> list[int]:
    return [seed % 2**64 for seed in settings.seeds.tolist()]


def test_reference_numbers_are_the_engines(device: torch.device) -> None:
    settings = settings_of(SETTINGS, torch.device("cpu"))
    for kind in rng.DrawKind:
        want = rng.uniforms(seeds_as_unsigned(settings), settings.rounds.tolist(), 0, 9, kind)
        assert torch.equal(uniforms_reference(settings, 9, int(kind)), want)


@triton.jit
def _numbers(seeds_ptr, rounds_ptr, out_ptr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    request = tl.program_id(0)
    slot = tl.arange(0, WIDTH)
    u = uniform(tl.load(seeds_ptr + request), tl.load(rounds_ptr + request), slot, KIND)
    tl.store(out_ptr + request * WIDTH + slot, u)


def test_kernel_numbers_are_the_engines(device: torch.device) -> None:
    settings = settings_of(SETTINGS, device)
    for kind in range(3):
        got = torch.full((len(SETTINGS), 8), NAN, dtype=torch.float64, device=device)
        _numbers[(len(SETTINGS),)](settings.seeds, settings.rounds, got, WIDTH=8, KIND=kind)
        assert torch.equal(got.cpu(), uniforms_reference(settings_of(SETTINGS, torch.device("cpu")), 8, kind))


def test_reference_laws_are_the_engines() -> None:
    logits = peaked_logits(len(SETTINGS), 1000, torch.device("cpu"))
    settings, laws = settings_of(SETTINGS, torch.device("cpu")), Laws.empty(logits)
    laws_reference(logits, torch.arange(len(SETTINGS)), settings, laws, slice(None))
    want = sampling.probabilities(logits, *zip(*SETTINGS, strict=True))
    torch.testing.assert_close(laws.probabilities(), want, atol=1e-7, rtol=1e-5)


def kernel_laws(logits: Tensor, settings: DrawSettings, has_filters: bool = False) -> Laws:
    return kernel_buffers(logits, settings, has_filters).laws


def kernel_buffers(logits: Tensor, settings: DrawSettings, has_filters: bool) -> AcceptBuffers:
    """One row a request, on the path of the target's rows."""
    requests = logits.shape[0]
    buffers = AcceptBuffers.empty(logits, requests, 1, has_filters)
    for numbers in (buffers.laws.peak, buffers.laws.least, buffers.laws.scale, buffers.laws.temperature):
        numbers.fill_(NAN)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=logits.device)
    lens = torch.zeros(requests, dtype=torch.int32, device=logits.device)
    launch_accept_block(logits, starts, lens, settings, buffers, None, None, None, None, None)
    if buffers.scratch.near is not None:
        # The bins are as they were found, for the next step.
        assert int(buffers.scratch.near.counts.abs().max()) == int(buffers.scratch.near.masses.abs().max()) == 0
    return buffers


@pytest.mark.parametrize(("vocab", "has_filters"), [(90, False), (1500, False), (90, True), (5000, True)])
def test_kernel_laws(vocab: int, has_filters: bool, device: torch.device) -> None:
    logits = peaked_logits(len(SETTINGS), vocab, device)
    settings, want = settings_of(SETTINGS, device), Laws.empty(logits)
    got = kernel_laws(logits, settings, has_filters)
    laws_reference(logits, torch.arange(len(SETTINGS)), settings, want, slice(None))
    ours, theirs = got.probabilities(), want.probabilities()
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("has_filters", [False, True])
def test_a_nucleus_among_equal_tokens_takes_the_lowest_ids(has_filters: bool, device: torch.device) -> None:
    logits = torch.zeros(2, 600, device=device)
    logits[1, 300:] = 1.0
    laws = kernel_laws(logits, settings_of([(1.0, 0, 0.5, 0.0), (1.0, 0, 0.25, 0.0)], device), has_filters)
    kept = laws.probabilities() > 0
    assert kept[0].nonzero()[:, 0].tolist() == list(range(300))
    first, count = 300, int(kept[1].sum())
    assert kept[1].nonzero()[:, 0].tolist() == list(range(first, first + count))
    share = 300 * 2.718281828 / (300 * 2.718281828 + 300)
    assert count == -(-0.25 * 300 // share)


FLAT = ((1.0, 0, 0.95, 0.0), (1.0, 0, 0.5, 0.01), (2.0, 3000, 0.9, 0.0), (1.0, 2500, 1.0, 0.0), (0.5, 0, 0.9999, 0.0),
        (1.0, 300, 0.3, 0.001), (1.0, 0, 0.8, 0.0))  # fmt: skip


@pytest.mark.parametrize("kind", ["flat", "crowd", "bf16"])
def test_thresholds_in_flat_laws(kind: str, device: torch.device) -> None:
    """Of thousands of tokens; among more equal ones than may lie near a threshold; of rounded logits, all ties."""
    torch.manual_seed(1)
    logits = torch.randn(len(FLAT), 7000) * (0.1 if kind == "flat" else 1.5)
    if kind == "crowd":
        logits[:, torch.randperm(7000)[:4000]] = 0.25
    logits = logits.to(torch.bfloat16 if kind == "bf16" else torch.float32).to(device)
    settings, want = settings_of(FLAT, device), Laws.empty(logits)
    buffers = kernel_buffers(logits, settings, has_filters=True)
    got, near = buffers.laws, buffers.scratch.near
    # Which rows did without passes over the vocabulary: all but those of more tokens than may be near.
    listed = [1, 1, 0, 0, 1, 1, 0 if kind == "crowd" else 1]
    assert near is not None and near.found[:, 0].tolist() == listed
    laws_reference(logits, torch.arange(len(FLAT)), settings, want, slice(None))
    for row, (ours, theirs) in enumerate(zip(got.probabilities(), want.probabilities(), strict=True)):
        # Sums of thousands of weights may put the last token of a nucleus on either side.
        assert int(((ours > 0) != (theirs > 0)).sum()) <= 1, row
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-3)


def test_bf16_logits(device: torch.device) -> None:
    logits = peaked_logits(len(SETTINGS), 300, device).to(torch.bfloat16)
    settings, want = settings_of(SETTINGS, device), Laws.empty(logits)
    laws_reference(logits, torch.arange(len(SETTINGS)), settings, want, slice(None))
    got = kernel_laws(logits, settings).probabilities()
    torch.testing.assert_close(got, want.probabilities(), atol=1e-7, rtol=2e-5)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_logits_that_are_no_numbers_are_reported(bad: float, device: torch.device) -> None:
    logits = torch.randn(3, 300, device=device)
    logits[1, 200] = bad
    settings = settings_of([(1.0, 0, 1.0, 0.0)] * 3, device)
    assert kernel_laws(logits, settings).peak.isnan().tolist() == [False, True, False]


# The Markov loop


def block(vocab: int, device: torch.device, rank: int = 24, width: int = 3) -> dict:
    requests = len(SETTINGS)
    base = peaked_logits(requests * width, vocab, torch.device("cpu")).view(requests, width, vocab).to(device)
    return {
        "base": base,
        "w1": torch.randn(2 * vocab, rank, device=device) * 0.4,
        "w2": torch.randn(vocab, rank, device=device) * 0.4,
        "anchors": torch.randint(0, 2 * vocab, (requests,), device=device),
    }


@pytest.mark.parametrize(
    ("vocab", "has_map", "has_filters", "is_rounded"),
    [(200, True, False, False), (384, False, True, False), (200, False, False, True)],
)
def test_markov_block(vocab: int, has_map: bool, has_filters: bool, is_rounded: bool, device: torch.device) -> None:
    parts, settings = block(vocab, device), settings_of(SETTINGS, device)
    if is_rounded:
        parts["w2"] = RoundedRows.of(parts["w2"])
    mapping = torch.randperm(2 * vocab, device=device)[:vocab] if has_map else None
    hidden = torch.randn(len(SETTINGS), 3, 50, device=device)
    judge = (torch.randn(74, device=device), torch.randn(1, device=device))
    found = []
    for run in (launch_markov_block, markov_block):
        base = parts["base"].clone()
        buffers = MarkovBuffers.empty(base, has_filters)
        for numbers in (buffers.laws.peak, buffers.laws.scale, buffers.confidence):
            numbers.fill_(NAN)
        buffers.tokens.fill_(-7)
        if run is markov_block:
            run(base, parts["w1"], parts["w2"], parts["anchors"], settings, buffers, draft_to_target=mapping,
                hidden=hidden, confidence=judge)  # fmt: skip
        else:
            run(base, parts["w1"], parts["w2"], parts["anchors"], settings, buffers, mapping, hidden, judge)
        found.append((base, buffers))
    (got_base, got), (want_base, want) = found
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.index, want.index)
    torch.testing.assert_close(got_base, want_base, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(got.confidence, want.confidence, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(got.laws.probabilities(), want.laws.probabilities(), atol=2e-5, rtol=1e-3)


def test_rows_in_8_bits_are_within_their_rounding(device: torch.device) -> None:
    rows = torch.randn(300, 64, device=device) * torch.logspace(-3, 2, 300, device=device)[:, None]
    rows[7] = 0.0
    rounded = RoundedRows.of(rows)
    # Three bits behind the first: at most a sixteenth of a number, and a 448 * 512th of a row's largest.
    most = rows.abs() / 16 + rows.abs().amax(dim=1, keepdim=True) / (448 * 512)
    assert bool(((rounded.float() - rows).abs() <= most * 1.001).all())
    assert rounded.shape == rows.shape and rounded.codes.nbytes == rows.numel()


def test_without_a_sequential_head_drafts_come_from_the_base(device: torch.device) -> None:
    base, laws = block(300, device)["base"][:2], [SETTINGS[0], SETTINGS[3]]
    before, buffers, settings = base.clone(), MarkovBuffers.empty(base), settings_of(laws, device)
    anchors = torch.zeros(2, dtype=torch.int64, device=device)
    launch_markov_block(base, None, None, anchors, settings, buffers, None, None, None)
    assert torch.equal(base, before)
    law = sampling.probabilities(base[1], *([x] * 3 for x in laws[1])).to(device)
    assert buffers.tokens[1].tolist() == sampling.draw(law, uniforms_reference(settings, 3, 0)[1]).tolist()
    assert buffers.tokens[0].tolist() == base[0].argmax(dim=-1).tolist()
