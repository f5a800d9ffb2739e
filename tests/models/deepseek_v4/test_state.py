"""State across spans: any cut, any rollback and any company give each row the bits that single steps give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.deepseek_v4.trunks import Trunk, make_trunk, random_ids, run
from sparkchat.models.deepseek_v4.cache import StateCache

CONTEXT = 320
SMALL = {"compress_ratios": [0, 4, 8, 4], "num_hidden_layers": 4, "hc_sinkhorn_iters": 2}
KINDS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "rounded": {**SMALL, "has_roundings": True},
    "narrow-window": {**SMALL, "sliding_window": 3},
    "few-wide-heads": {
        **SMALL,
        "num_attention_heads": 2,
        "head_dim": 256,
        "index_n_heads": 3,
        "index_head_dim": 128,
        "moe_intermediate_size": 20,
    },
    "published-ratios": {
        "compress_ratios": [4, 128],
        "num_hidden_layers": 2,
        "sliding_window": 16,
        "index_topk": 20,
        "hc_sinkhorn_iters": 2,
    },
}

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="without oneDNN products depend on the number of rows"
)


class Steps:
    """A trunk and what single steps of it give for one text."""

    def __init__(self, name: str, span: int = 16) -> None:
        self.trunk: Trunk = make_trunk(**KINDS[name])
        self.model, self.span = self.trunk.ours, span
        self._singles: dict[tuple[int, ...], Tensor] = {}

    def cache(self, max_rows: int = 1, span: int | None = None) -> StateCache:
        """Caches of one span have one layout, and with it one order of summation."""
        return self.model.new_cache(max_rows, CONTEXT, span or self.span)

    def singles(self, ids: Tensor, span: int | None = None) -> Tensor:
        """hidden [n, d], one row at a time"""
        key = (span or self.span, *ids.tolist())
        if key not in self._singles:
            cache = self.cache(span=span)
            row = cache.allocate()
            self._singles[key] = torch.cat([run(self.model, cache, [(row, one)]) for one in ids.split(1)])
        return self._singles[key]

    def whole(self, ids: Tensor) -> Tensor:
        """hidden [n, d] of a fresh cache, in spans as long as they may be"""
        cache = self.cache()
        row = cache.allocate()
        return torch.cat([run(self.model, cache, [(row, part)]) for part in ids.split(self.span)])


def steps_of(name: str, build_once: Callable[..., Any]) -> Steps:
    return build_once(f"v4-state-{name}", lambda folder: Steps(name, 256 if name == "published-ratios" else 16))


@pytest.fixture
def small(build_once: Callable[..., Any]) -> Steps:
    return steps_of("small", build_once)


@pytest.fixture
def published(build_once: Callable[..., Any]) -> Steps:
    return steps_of("published-ratios", build_once)


OFFSETS = {2: (0, 1), 3: (0,), 4: (0, 1, 2, 3), 5: (0,), 6: (0, 1), 7: (0, 5), 8: range(8), 9: (0, 4)}
"""Width of spans -> where the first begins, so that spans of that width begin at every residue of 8."""


@pytest.mark.parametrize(("width", "offset"), [(width, n) for width, offsets in OFFSETS.items() for n in offsets])
def test_spans_of_every_width_at_every_alignment(small: Steps, width: int, offset: int) -> None:
    """Every residue of both ratios meets every width, also those wider than an entry."""
    ids = random_ids(42)
    whole = [at % 8 for first in OFFSETS[width] for at in range(first, len(ids) - width + 1, width)]
    assert set(whole) == set(range(8))
    cache = small.cache()
    row = cache.allocate()
    spans = [ids[:offset]] if offset else []
    spans += list(ids[offset:].split(width))
    hidden = torch.cat([run(small.model, cache, [(row, span)]) for span in spans])
    assert torch.equal(hidden, small.singles(ids))


@pytest.mark.parametrize("sizes", [(256, 24), (1, 255, 24), (127, 1, 1, 127, 24), (131, 120, 7, 22), (64, 200, 16)])
def test_prompt_chunks_around_the_wide_entries(published: Steps, sizes: tuple[int, ...]) -> None:
    ids = random_ids(280)
    cache = published.cache()
    row = cache.allocate()
    hidden = torch.cat([run(published.model, cache, [(row, span)]) for span in ids.split(sizes)])
    assert torch.equal(hidden, published.singles(ids))


@pytest.mark.parametrize("width", range(2, 10))
def test_verify_widths_across_the_wide_boundary(published: Steps, width: int) -> None:
    """Blocks that end before, on and behind position 128, with all their rows but the first taken back."""
    ids = random_ids(280)
    cache = published.cache()
    row = cache.allocate()
    run(published.model, cache, [(row, ids[:118])])
    wanted = published.singles(ids)
    for at in range(118, 138):
        rejected = random_ids(width - 1, seed=at)
        hidden = run(published.model, cache, [(row, torch.cat([ids[at : at + 1], rejected]))])
        assert torch.equal(hidden[0], wanted[at])
        cache.truncate(row, at + 1)
    assert torch.equal(run(published.model, cache, [(row, ids[138:280])]), wanted[138:280])


@pytest.mark.parametrize("width", [2, 4, 5, 6, 8])
def test_every_draft_rejected_at_every_position(small: Steps, width: int) -> None:
    ids = random_ids(42)
    cache = small.cache()
    row = cache.allocate()
    for at, wanted in enumerate(small.singles(ids)):
        block = torch.cat([ids[at : at + 1], random_ids(width - 1, seed=at)])
        assert torch.equal(run(small.model, cache, [(row, block)])[0], wanted)
        cache.truncate(row, at + 1)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_which_some_rows_stay(small: Steps, seed: int) -> None:
    """Widths 1 to 8 and accepted lengths at random: what a decode loop does to the state."""
    ids, at = random_ids(42), 0
    cache, wanted = small.cache(), small.singles(ids)
    row = cache.allocate()
    draw = torch.Generator().manual_seed(seed)
    while at < len(ids):
        width = int(torch.randint(1, 9, (), generator=draw))
        keep = min(int(torch.randint(1, width + 1, (), generator=draw)), len(ids) - at)
        block = torch.cat([ids[at : at + keep], random_ids(width - keep, seed=100 * seed + at)])
        hidden = run(small.model, cache, [(row, block)])
        assert torch.equal(hidden[:keep], wanted[at : at + keep])
        at += keep
        cache.truncate(row, at)


@pytest.mark.parametrize("keep", [0, 9, *range(24, 61, 3), 29, 31, 32])
@pytest.mark.parametrize("name", ["small", "narrow-window"])
def test_another_ending_after_taking_back(name: str, keep: int, build_once: Callable[..., Any]) -> None:
    """As when an earlier message is edited: right where the state is held, refused where it is gone."""
    small = steps_of(name, build_once)
    first, other = random_ids(60), random_ids(14, seed=1)
    cache = small.cache()
    row = cache.allocate()
    for span in first.split(small.span):
        run(small.model, cache, [(row, span)])
    if not cache.can_truncate(row, keep):
        with pytest.raises(ValueError, match="cannot go back"):
            cache.truncate(row, keep)
        assert keep < 60 - small.span and cache.length(row) == 60
        return
    cache.truncate(row, keep)
    hidden = run(small.model, cache, [(row, other)])
    assert torch.equal(hidden, small.whole(torch.cat([first[:keep], other]))[keep:])


def test_what_is_gone_is_refused(small: Steps) -> None:
    cache = small.cache()
    row = cache.allocate()
    for span in random_ids(60).split(small.span):
        run(small.model, cache, [(row, span)])
    held = [length for length in range(62) if cache.can_truncate(row, length)]
    assert held == list(range(held[0], 61)) and 0 < held[0] <= 60 - small.span
    cache.truncate(row, held[0])
    run(small.model, cache, [(row, random_ids(3))])
    # Writing on from there does not bring back what the first text wrote over.
    assert not cache.can_truncate(row, held[0] - 1) and cache.can_truncate(row, held[0])
    assert not cache.can_truncate(row, -1)


def test_entries_may_need_more_than_the_window(build_once: Callable[..., Any]) -> None:
    """With a window of 3, what an unfinished entry of 8 is made of is gone before the window is."""
    cache = steps_of("narrow-window", build_once).cache()
    row = cache.allocate()
    for end in range(16, 62, 15):
        cache.advance(row, end)
    windows, entries = cache.stores[0], cache.stores[8]
    assert windows.can_resume(31, 61) and not entries.can_resume(31, 61) and entries.can_resume(32, 61)
    # An entry of 4 needs the 4 tokens before its own as well.
    assert not cache.can_truncate(row, 35) and cache.can_truncate(row, 36)


@pytest.mark.parametrize("name", ["small", "rounded", "narrow-window"])
def test_random_walk(name: str, build_once: Callable[..., Any]) -> None:
    """Spans and rollbacks of any length in any order: wherever the cache agrees to go back, it goes on rightly."""
    steps = steps_of(name, build_once)
    draw = torch.Generator().manual_seed(11)
    cache = steps.cache()
    row, text, depths = cache.allocate(), torch.empty(0, dtype=torch.int64), []
    for turn in range(40):
        ids = random_ids(int(torch.randint(1, steps.span + 1, (), generator=draw)), seed=turn)
        hidden = run(steps.model, cache, [(row, ids)])
        text = torch.cat([text, ids])
        if turn % 4 == 3:
            assert torch.equal(hidden, steps.whole(text)[-len(ids) :])
        length = int(torch.randint(max(0, len(text) - 30), len(text) + 1, (), generator=draw))
        if len(text) > 100:
            length = 70
        if cache.can_truncate(row, length):
            depths.append(len(text) - length)
            cache.truncate(row, length)
            text = text[:length]
        elif len(text) > 100:
            cache.free(row)
            row, text = cache.allocate(), text[:0]
    assert max(depths) > steps.span


@pytest.mark.parametrize("name", ["rounded", "few-wide-heads"])
def test_spans_of_other_models(name: str, build_once: Callable[..., Any]) -> None:
    """Roundings, which magnify a last bit; sizes whose products take other paths for few rows."""
    steps = steps_of(name, build_once)
    ids = random_ids(42)
    cache = steps.cache()
    row = cache.allocate()
    hidden = torch.cat([run(steps.model, cache, [(row, span)]) for span in ids.split([13, 5, 1, 6, 8, 9])])
    assert torch.equal(hidden, steps.singles(ids))


def test_requests_side_by_side_equal_each_alone(small: Steps) -> None:
    """Different lengths, alignments and widths; one reads its prompt while others decode."""
    texts = [random_ids(n, seed=n) for n in (37, 5, 22, 42)]
    plans = [(16, 6, 6, 6, 3), (1, 1, 1, 1, 1), (2, 8, 4, 1, 7), (15, 1, 16, 5, 5)]
    cache = small.cache(6)
    rows = [cache.allocate() for _ in range(6)]
    rows = [rows[2], rows[3], rows[5], rows[0]]
    taken, out = [0] * 4, [[] for _ in texts]
    for sizes in zip(*plans, strict=True):
        spans = [(row, text[at : at + n]) for row, text, at, n in zip(rows, texts, taken, sizes, strict=True)]
        for part, kept in zip(run(small.model, cache, spans).split(sizes), out, strict=True):
            kept.append(part)
        taken = [at + n for at, n in zip(taken, sizes, strict=True)]
    for text, kept in zip(texts, out, strict=True):
        assert torch.equal(torch.cat(kept), small.singles(text))


def test_rows_run_in_any_order(small: Steps) -> None:
    first, second = random_ids(20, seed=3), random_ids(20, seed=4)
    cache = small.cache(2)
    rows = [cache.allocate(), cache.allocate()]
    ahead = run(small.model, cache, [(rows[0], first[:16]), (rows[1], second[:9])])
    behind = run(small.model, cache, [(rows[1], second[9:]), (rows[0], first[16:])])
    assert torch.equal(torch.cat([ahead[:16], behind[11:]]), small.singles(first))
    assert torch.equal(torch.cat([ahead[16:], behind[:11]]), small.singles(second))
