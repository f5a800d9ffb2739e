"""Short chains whose output law is known exactly, to enumerate what a choice of verify lengths makes of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkchat.engine.cost_table import CostLookup
from sparkchat.params import BatchCosts, ContextCosts, CostTable

VOCAB, WIDTH = 3, 2


class Chain:
    """Random target and drafter laws of two tokens; confidence is the exact chance of acceptance."""

    def __init__(self, source: random.Random) -> None:
        self.p = {prefix: _law(source) for prefix in ((), (0,), (1,), (2,))}
        self.q = {prefix: _law(source) for prefix in ((), (0,), (1,), (2,))}

    def block_law(self, block: tuple[int, int]) -> float:
        return self.q[()][block[0]] * self.q[block[:1]][block[1]]

    def survival(self, block: tuple[int, int]) -> list[float]:
        alive, row = 1.0, []
        for k in range(WIDTH):
            alive *= sum(map(min, self.p[block[:k]], self.q[block[:k]]))
            row.append(alive)
        return row

    def target_law(self) -> Tensor:
        return torch.tensor(
            [[self.p[()][a] * self.p[(a,)][b] for b in range(3)] for a in range(3)], dtype=torch.float64
        )

    def output_law(self, block: tuple[int, int], length: int) -> Tensor:
        """Law of the first two output tokens after verifying ``length`` drafts of ``block``."""
        out = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        passed = 1.0
        for k in range(length):
            prefix, token = block[:k], block[k]
            p, q = self.p[prefix], self.q[prefix]
            rate = min(1.0, p[token] / q[token])
            rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            if rate < 1.0:
                for other in range(VOCAB):
                    self._finish(out, (*prefix, other), passed * (1 - rate) * rest[other] / sum(rest))
            passed *= rate
        self._finish(out, block[:length], passed)
        return out

    def _finish(self, out: Tensor, prefix: tuple[int, ...], weight: float) -> None:
        """Fill what is missing of two tokens with plain draws."""
        if len(prefix) == WIDTH:
            out[prefix] += weight
            return
        for token in range(VOCAB):
            self._finish(out, (*prefix, token), weight * self.p[prefix][token])


def _law(source: random.Random) -> list[float]:
    weights = [source.random() ** 2 + 0.02 for _ in range(VOCAB)]
    return [w / sum(weights) for w in weights]


def cliffed_cost(source: random.Random, requests: int) -> CostLookup:
    """A cliff after one row more than the anchors, then cheap rows: what makes looking ahead tempting."""
    first = source.uniform(0.5, 2.0)
    times = [first] * requests + [first * source.uniform(1.2, 2.5)]
    while len(times) < requests * (WIDTH + 1):
        times.append(times[-1] * source.choice([1.0, 1.02, 1.1, 1.6]))
    return CostLookup(CostTable(tuple(range(1, len(times) + 1)), tuple(times)))


def measured_cost(source: random.Random, requests: int) -> CostLookup:
    """A cliffed table by requests, with a context term, as ``tune`` measures one."""
    batches, times = [], [source.uniform(0.5, 1.0)]
    for count in (1, 2):
        times = [t * (1.0 if count == 1 else 1.3) for t in times]
        rows = tuple(range(count, count * (WIDTH + 1) + 1))
        while len(times) < len(rows):
            times.append(times[-1] * source.choice([1.0, 1.02, 1.7]))
        batches.append(BatchCosts(count, rows, tuple(times[: len(rows)]), plain_ms=times[0]))
    context = ContextCosts(0, source.uniform(0.0, 0.01), source.uniform(0.0, 0.01))
    one = batches[0]
    return CostLookup(CostTable(one.rows, one.step_ms, "measured", one.plain_ms, tuple(batches), False, context))


Chooser = Callable[[list[list[float]], CostLookup], Sequence[int]]


def global_search(survival: list[list[float]], cost: CostLookup) -> Sequence[int]:
    order = sorted((-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row, 1))
    lens, tokens = [0] * len(survival), float(len(survival))
    best, chosen = tokens / cost.step_ms(len(survival)), list(lens)
    for count, (negative, j, r) in enumerate(order, 1):
        lens[r], tokens = j, tokens - negative
        theta = tokens / cost.step_ms(len(survival) + count)
        if theta > best:
            best, chosen = theta, list(lens)
    return chosen


def distance_from_target(chains: Sequence[Chain], cost: CostLookup, choose: Chooser) -> float:
    """Total variation between the joint output law of all requests and the product of their targets'."""
    blocks = list(itertools.product(range(VOCAB), repeat=WIDTH))
    joint: Tensor | float = 0.0
    for drawn in itertools.product(blocks, repeat=len(chains)):
        lens = choose([chain.survival(block) for chain, block in zip(chains, drawn, strict=True)], cost)
        law = torch.ones(1, dtype=torch.float64)
        for chain, block, length in zip(chains, drawn, lens, strict=True):
            law = torch.outer(law, chain.block_law(block) * chain.output_law(block, length).flatten()).flatten()
        joint = joint + law
    wanted = torch.ones(1, dtype=torch.float64)
    for chain in chains:
        wanted = torch.outer(wanted, chain.target_law().flatten()).flatten()
    return float((joint - wanted).abs().sum()) / 2


Coster = Callable[[random.Random, int], CostLookup]


def worst_distance(
    requests: int, cases: int, choose: Chooser, costs: Coster = cliffed_cost, enough: float = float("inf")
) -> float:
    """Of so many random cases; those behind one that is ``enough`` are not tried."""
    source, worst = random.Random(13 + requests), 0.0
    for _ in range(cases):
        chains = [Chain(source) for _ in range(requests)]
        worst = max(worst, distance_from_target(chains, costs(source, requests), choose))
        if worst > enough:
            break
    return worst
