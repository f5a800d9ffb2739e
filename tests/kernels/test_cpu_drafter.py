"""The packaged drafter's block as one call: the bits of its parts one by one, and close to torch's operations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkchat.engine.batch import pack_rows
from sparkchat.kernels import cpu
from sparkchat.models.dspark.drafter import Drafter
from sparkchat.models.layers import Embedding

if not cpu.is_supported():
    pytest.skip(f"no kernels for this processor: {cpu.why_not()}", allow_module_level=True)

CPU = torch.device("cpu")
FOLDER = Path(__file__).parents[2] / "sparkchat/drafters/smollm2-135m"
HIDDEN, VOCAB, TAPS = 576, 49152, 5


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=30)
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    target: Any = SimpleNamespace(
        config=config, embedding=Embedding(table, CPU, torch.bfloat16), head_rows=lambda ids: table[ids]
    )
    return Drafter.load(FOLDER, target, device=CPU, dtype=None)


def features_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, TAPS * HIDDEN, generator=torch.Generator().manual_seed(seed))


def answers(drafter: Drafter, at_once: bool) -> list[Tensor]:
    """Rounds of two requests. The first prompt nearly fills the cache's first room, which then has to grow."""
    cache = drafter.new_cache(2, 1000)
    rows, ends = [cache.allocate() for _ in range(2)], [0, 0]
    out: list[Tensor] = []
    for turn, counts in enumerate([(251, 3), (2, 1), (3, 0), (1, 2)]):
        runs = [(row, n) for row, n in zip(rows, counts, strict=True) if n]
        given = [(row, list(range(n))) for row, n in runs]
        starts = [ends[row] for row, _ in given]
        context = pack_rows([ids for _, ids in given], starts, [row for row, _ in given], CPU)
        pending = (features_of(sum(n for _, n in runs), turn), context)
        for row, n in runs:
            ends[row] += n
        batch = pack_rows([[7 + turn, 16, 16], [9 + turn, 16]], ends, rows, CPU)
        if at_once:
            out += drafter.draft_block(pending, batch, cache)
        else:
            drafter.extend_context(*pending, cache)
            hidden = drafter.backbone(batch, cache)
            out += [hidden, drafter.base_logits(hidden)]
    return out


def test_a_block_is_the_sum_of_its_parts(drafter: Drafter) -> None:
    together = answers(drafter, True)
    assert all(torch.equal(a, b) for a, b in zip(together, answers(drafter, False), strict=True))
    torch.set_num_threads(3)
    threads = answers(drafter, True)
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(together, threads, strict=True))


def test_a_block_is_close_to_torch(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = answers(drafter, True)
    monkeypatch.setattr(drafter._backbone._stack, "native", None)
    monkeypatch.setattr(drafter._backbone._context, "native", None)
    for a, b in zip(ours, answers(drafter, True), strict=True):
        # Keys and values are rounded to bfloat16, here and there to the other side.
        assert float((a - b).norm() / b.norm()) < 5e-3
