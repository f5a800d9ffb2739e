"""What a captured step launches on a GPU: the layers' kernels, a handful around them, and nothing of torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernels.census import census, opened_step
from sparkchat.engine.captured.laws import Draws

LAYER = Counter(_add_rms_norm=2, _small_gemm=4, _write_qkv=1, _attend=1, _join_spans=1)
ACCEPTANCE = Counter(("block_statistics", "_find_laws", "_test_drafts", "_weigh_rest", "_draw_next"))
HANDOVER = Counter(_small_gemm=2, _add_rms_norm=1, _write_qkv=1)


def times(count: int, names: Counter[str]) -> Counter[str]:
    return Counter({name: count * number for name, number in names.items()})


@pytest.mark.parametrize("spec", [{}, {"simulate_acceptance": "chat"}], ids=["real", "simulated"])
def test_launches_of_a_round(spec: dict[str, Any], tiny_pair: Any) -> None:
    around = Counter(_enter_rows=1, _add_rms_norm=1, _small_gemm=1, _settle=1)
    with opened_step(tiny_pair.target, tiny_pair.drafter, **spec) as step:
        layers = step.pair.target.config.num_layers
        for rows in (1, step.width + 1, 2 * step.width + 2):
            found = census(lambda rows=rows: step.verify(rows, Draws.SAMPLED, False))
            assert all(launch.is_ours for launch in found), found
            assert Counter(x.name for x in found) == around + times(layers, LAYER) + ACCEPTANCE + HANDOVER
        shared = census(lambda: step.verify(4, Draws.SAMPLED, True))
        assert Counter(x.name for x in shared) == Counter(x.name for x in found) + Counter(_limit=1, _plan=1)
        drafted = Counter(x.name for x in census(lambda: step.draft(2, Draws.SAMPLED)))
        around = Counter(_enter_block=1, _add_rms_norm=1, _small_gemm=1, _judge=int(not spec))
        sampled = times(step.width, Counter(_add_bias=1, _draw_draft=1))
        own_layers = step.pair.drafter.config.decoder.num_layers
        assert drafted == +(around + times(own_layers, LAYER) + sampled)
        # Filters take two launches more for every law to be found; other steps do not pay for them.
        select = Counter(_count_bins=1, _list_near=1)
        filtered = Counter(x.name for x in census(lambda: step.draft(2, Draws.FILTERED)))
        assert filtered == drafted + times(step.width, select)
        verified = Counter(x.name for x in census(lambda: step.verify(rows, Draws.FILTERED, False)))
        assert verified == Counter(x.name for x in found) + select


def test_launches_of_a_plain_step(tiny_pair: Any) -> None:
    with opened_step(tiny_pair.target, None) as step:
        found = census(lambda: step.verify(1, Draws.SAMPLED, False))
    assert all(launch.is_ours for launch in found), found
    assert len(found) == 9 * step.pair.target.config.num_layers + 9


def test_the_census_sees_what_torch_launches(tiny_pair: Any) -> None:
    with opened_step(tiny_pair.target, Path(tiny_pair.drafter)) as step:
        step._enters = False
        found = [x.name for x in census(lambda: step.verify(6, Draws.SAMPLED, False)) if not x.is_ours]
    assert len(found) > 80 and {"where", "cumsum", "index", "_to_copy"} & set(found)
