"""Counter-based random numbers: known answers, independence of the key's parts, uniformity, no state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkchat.engine.rng import ACCEPT, DRAFT, NEXT, _philox, uniforms

TOP = 2.0**-53


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Words 0 and 2 of one block."""
    multiplied, xored = (
        np.array([[counter[0]], [counter[2]]], np.uint64),
        np.array([[counter[1]], [counter[3]]], np.uint64),
    )
    return [int(word) for word in _philox(multiplied, xored, np.array([[key[0]], [key[1]]], np.uint64)).ravel()]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), [0x6627E8D5, 0xBC57AC4C]),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0xA20BC7C6]),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x5001E420]),
    ],
)
def test_hash_gives_the_published_answers(counter, key, words):
    assert philox_words(counter, key) == words


def test_a_number_depends_on_its_own_key_only():
    batch = uniforms([5, 2**63 - 1, 9], [0, 7, 2**40], 0, 6, ACCEPT)
    assert batch.shape == (3, 6)
    assert batch.dtype == torch.float64
    for row, (seed, step) in enumerate(((5, 0), (2**63 - 1, 7), (9, 2**40))):
        for slot in range(6):
            assert uniforms([seed], [step], slot, 1, ACCEPT).item() == batch[row, slot].item()


def test_every_part_of_the_key_matters():
    keys = [
        (seed, step, slot, kind)
        for seed in (0, 1, 2**32, 2**62)
        for step in (0, 1, 2**32, 2**40)
        for slot in (0, 1, 2, 15)
        for kind in (DRAFT, ACCEPT, NEXT)
    ]
    values = {uniforms([seed], [step], slot, 1, kind).item() for seed, step, slot, kind in keys}
    assert len(values) == len(keys)


def test_values_are_uniform_below_one():
    u = uniforms(range(2000), [3] * 2000, 0, 50, DRAFT).flatten()
    assert u.min() >= 0.0
    assert u.max() <= 1.0 - TOP
    counts = torch.histc(u, bins=100, min=0.0, max=1.0)
    statistic = ((counts - 1000.0).square() / 1000.0).sum()
    assert 50.0 < statistic < 170.0  # 99 degrees of freedom
    fine = (u * 2**26) % 1.0  # the low bits are random too
    assert abs(fine.mean().item() - 0.5) < 0.005


@pytest.mark.parametrize("other", ["seed", "round", "slot", "kind"])
def test_neighbouring_streams_are_uncorrelated(other):
    n = 20000
    seeds, rounds = list(range(n)), [11] * n
    a = uniforms(seeds, rounds, 4, 1, ACCEPT)[:, 0]
    b = {
        "seed": lambda: uniforms([s + 1 for s in seeds], rounds, 4, 1, ACCEPT),
        "round": lambda: uniforms(seeds, [12] * n, 4, 1, ACCEPT),
        "slot": lambda: uniforms(seeds, rounds, 5, 1, ACCEPT),
        "kind": lambda: uniforms(seeds, rounds, 4, 1, NEXT),
    }[other]()[:, 0]
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 0.03


def test_no_requests_or_no_slots_give_empty_tensors():
    assert uniforms([], [], 0, 4, DRAFT).shape == (0, 4)
    assert uniforms([1, 2], [0, 0], 0, 0, DRAFT).shape == (2, 0)


def test_a_key_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        uniforms([-1], [0], 0, 1, DRAFT)
