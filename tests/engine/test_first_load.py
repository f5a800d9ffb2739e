"""The first load on a machine compiles; whoever waits is told so, for as long as it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkchat.engine import loading
from sparkchat.params import LoadSpec


@pytest.mark.parametrize("is_compiled", [False, True])
def test_every_stage_that_compiles_says_so(
    is_compiled: bool, mix_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.cpu, "is_supported", lambda: True)
    monkeypatch.setattr(loading.cpu, "is_compiled", lambda: is_compiled)
    events: list[dict[str, Any]] = []
    target, drafter = mix_folders["target"], mix_folders["oracle"]
    spec = LoadSpec("mix", str(target), str(drafter), device="cpu", context=64, threads=1)
    loading.load_pair(spec, events.append)
    said = {event["stage"]: event["message"] for event in events}
    assert [stage for stage in said if "compiling once" in said[stage]] == (
        [] if is_compiled else ["weights", "drafter"]
    )
    # The chat's status line shows it beside the mode and "your message waits".
    assert max(map(len, said.values())) <= 62
