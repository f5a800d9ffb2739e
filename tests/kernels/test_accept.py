"""Acceptance: the reference against the engine's rule, the kernels against the reference, edge cases by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.laws import SETTINGS, peaked_logits, settings_of
from sparkchat.engine import rng, sampling
from sparkchat.engine.acceptance import Proposal, accept
from sparkchat.kernels.accept import AcceptBuffers
from sparkchat.kernels.accept.kernel import launch_accept_block
from sparkchat.kernels.accept.reference import accept_block_reference
from sparkchat.kernels.markov import MarkovBuffers, markov_block
from sparkchat.kernels.sampling import DrawSettings
from sparkchat.kernels.sampling.reference import ACCEPT, NEXT, uniforms_reference

NAN = float("nan")
WIDTH = 4
REQUESTS = len(SETTINGS)
LENS = [4, 3, 4, 0, 2, 4, 4, 1]


def scene(vocab: int, device: torch.device, seed: int, has_map: bool = False) -> dict[str, Any]:
    """Drafts of a block and a target that half agrees with them."""
    torch.manual_seed(seed)
    settings = settings_of(SETTINGS, torch.device("cpu"), round0=seed)
    draft_vocab = vocab // 2 if has_map else vocab
    base = peaked_logits(REQUESTS * WIDTH, draft_vocab, torch.device("cpu")).view(REQUESTS, WIDTH, draft_vocab)
    mapping = torch.randperm(vocab)[:draft_vocab] if has_map else None
    buffers = MarkovBuffers.empty(base)
    markov_block(base, None, None, torch.zeros(REQUESTS, dtype=torch.int64), settings, buffers, draft_to_target=mapping)
    starts = [0]
    logits = []
    for r, length in enumerate(LENS):
        rows = torch.randn(length + 1, vocab)
        for i in range(length):
            ids = slice(None) if mapping is None else mapping
            rows[i, ids] += base[r, i].clamp(min=-30.0)
        logits.append(rows)
        starts.append(starts[-1] + length + 1)
    inverse = None
    if mapping is not None:
        inverse = torch.full((vocab,), -1, dtype=torch.int32)
        inverse[mapping] = torch.arange(draft_vocab, dtype=torch.int32)
    arguments = {
        "logits": torch.cat(logits),
        "starts": torch.tensor(starts, dtype=torch.int32),
        "verify_lens": torch.tensor(LENS, dtype=torch.int32),
        "settings": settings,
        "drafts": buffers.tokens,
        "draft_laws": buffers.laws,
        "draft_index": buffers.index,
        "target_to_draft": inverse,
        "caps": None,
    }
    return {**{k: on(v, device) for k, v in arguments.items()}, "mapping": mapping}


def on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if value is None or not hasattr(value, "__dataclass_fields__"):
        return value
    return type(value)(*(getattr(value, name).to(device) for name in value.__dataclass_fields__))


def empty(arguments: dict[str, Any]) -> AcceptBuffers:
    buffers = AcceptBuffers.empty(arguments["logits"], arguments["starts"].shape[0] - 1, WIDTH)
    for ids in (buffers.accepted_len, buffers.full_len, buffers.next_ids, buffers.tokens):
        ids.fill_(-9)
    for numbers in (buffers.p_draft, buffers.p_target, buffers.masses, buffers.laws.scale):
        numbers.fill_(7.0)
    return buffers


def run(arguments: dict[str, Any], is_kernel: bool = True) -> AcceptBuffers:
    buffers = empty(arguments)
    (launch_accept_block if is_kernel else accept_block_reference)(
        **{k: v for k, v in arguments.items() if k != "mapping"}, buffers=buffers
    )
    return buffers


def unsigned(settings: DrawSettings) -> tuple[list[int], list[int]]:
    return [seed % 2**64 for seed in settings.seeds.tolist()], settings.rounds.tolist()


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("cap", [None, 2])
def test_reference_is_the_engines_rule(has_map: bool, cap: int | None) -> None:
    accepted = 0
    for seed in range(4):
        s = scene(512, torch.device("cpu"), seed, has_map)
        if cap is not None:
            s["caps"] = torch.full((REQUESTS,), cap, dtype=torch.int32)
        got = run(s, is_kernel=False)
        rows = [setting for setting, length in zip(SETTINGS, LENS, strict=True) for _ in range(length + 1)]
        p = sampling.probabilities(s["logits"], *zip(*rows, strict=True))
        proposal = Proposal(
            s["drafts"], s["verify_lens"].long(), s["draft_laws"].probabilities().view(REQUESTS, WIDTH, -1),
            s["draft_index"], draft_to_target=s["mapping"],
        )  # fmt: skip
        seeds, rounds = unsigned(s["settings"])
        want = accept(
            p, s["starts"][:-1], s["verify_lens"], proposal, rng.uniforms(seeds, rounds, 0, WIDTH, rng.ACCEPT),
            rng.uniforms(seeds, rounds, 0, WIDTH + 1, rng.NEXT), None if cap is None else s["caps"],
        )  # fmt: skip
        assert got.accepted_len.tolist() == want.accepted_len.tolist()
        assert got.full_len.tolist() == want.full_accepted_len.tolist()
        assert got.next_ids.tolist() == want.next_ids.tolist()
        torch.testing.assert_close(got.p_target.double(), want.p_target, atol=1e-6, rtol=1e-5, equal_nan=True)
        accepted += int(got.full_len.sum())
    assert 10 < accepted < 4 * sum(LENS)


@pytest.mark.parametrize(("vocab", "has_map", "cap"), [(512, False, None), (300, True, 1), (130, False, 2)])
def test_kernel(vocab: int, has_map: bool, cap: int | None, device: torch.device) -> None:
    s = scene(vocab, device, 11, has_map)
    if cap is not None:
        s["caps"] = torch.full((REQUESTS,), cap, dtype=torch.int32, device=device)
    got, want = run(s), run(s, is_kernel=False)
    for name in ("accepted_len", "full_len", "next_ids", "tokens", "damaged"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.ranks.sum(dim=1), want.ranks.sum(dim=1)) and int(want.ranks.sum()) > 0
    for name in ("p_draft", "p_target"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), atol=1e-6, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("is_kernel", [False, True])
def test_simulated_chances_decide_and_the_next_token_is_drawn_from_p(is_kernel: bool, device: torch.device) -> None:
    s = scene(300, device, 3)
    u = uniforms_reference(on(s["settings"], torch.device("cpu")), WIDTH, ACCEPT)
    passes = torch.tensor([[i < n for i in range(WIDTH)] for n in (2, 0, 4, 1, 1, 3, 0, 1)])
    s["chance"] = torch.where(passes, u + 1e-9, u).to(device)
    got = run(s, is_kernel)
    assert got.full_len.tolist() == [2, 0, 4, 0, 1, 3, 0, 1]
    for r, taken in enumerate(got.accepted_len.tolist()):
        row = int(s["starts"][r]) + taken
        law = sampling.probabilities(s["logits"][row : row + 1].cpu(), *([x] for x in SETTINGS[r]))
        u_next = uniforms_reference(on(s["settings"], torch.device("cpu")), WIDTH + 1, NEXT)[r, taken]
        want = law.argmax(dim=-1) if SETTINGS[r][0] < 1e-5 else sampling.draw(law, u_next[None])
        assert int(got.next_ids[r]) == int(want)


def test_plain_rows_and_a_request_without_rows(device: torch.device) -> None:
    logits = peaked_logits(4, 300, device)
    settings = settings_of([SETTINGS[i] for i in (0, 1, 2, 3)], device)
    arguments = {
        "logits": logits,
        "starts": torch.tensor([0, 1, 2, 2, 3], dtype=torch.int32, device=device),
        "verify_lens": torch.zeros(4, dtype=torch.int32, device=device),
        "settings": settings,
        **dict.fromkeys(("drafts", "draft_laws", "draft_index", "target_to_draft", "caps")),
    }
    got, want = run(arguments), run(arguments, is_kernel=False)
    assert torch.equal(got.tokens, want.tokens)
    assert got.next_ids.tolist() == [int(logits[0].argmax()), int(want.next_ids[1]), -1, int(want.next_ids[3])]
    assert got.accepted_len.tolist() == [0, 0, 0, 0]


def test_damaged_logits_end_their_request_alone(device: torch.device) -> None:
    s = scene(200, device, 5)
    before = run(s, is_kernel=False)
    s["logits"][int(s["starts"][2]) + int(before.accepted_len[2]), 7] = NAN
    after = run(s)
    assert after.damaged.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    others = [r for r in range(REQUESTS) if r != 2]
    assert torch.equal(after.tokens[others], before.tokens[others])


@pytest.mark.parametrize("is_kernel", [False, True])
def test_damaged_logits_behind_a_refused_draft_harm_nobody(is_kernel: bool, device: torch.device) -> None:
    s = scene(200, device, 5)
    before = run(s, is_kernel=False)
    behind = [r for r, taken in enumerate(before.accepted_len.tolist()) if taken < LENS[r]]
    assert len(behind) > 2
    for r in behind:
        s["logits"][int(s["starts"][r]) + int(before.accepted_len[r]) + 1, 7] = NAN
    after = run(s, is_kernel)
    assert after.damaged.tolist() == [0] * REQUESTS
    for name in ("accepted_len", "full_len", "next_ids", "tokens"):
        assert torch.equal(getattr(after, name), getattr(before, name)), name
