"""A config may hold whole numbers that no float can: they are named, in few words, as any other wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkchat.errors import DamagedFile
from sparkchat.models.hf_config import ConfigFile


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "factor"])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True])
def test_a_number_that_no_float_holds_is_refused(key: str, value: object) -> None:
    with pytest.raises(DamagedFile, match=f"{key} is .*must be a positive number") as caught:
        ConfigFile({key: value}, Path("config.json")).number(key)
    assert len(caught.value.message) < 200
