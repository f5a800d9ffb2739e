"""A config may hold whole numbers that no float can: they are named, in few words, as any other wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkchat.errors import DamagedFile
from sparkchat.headers import Headers, Tensor, UnreadableHeader
from sparkchat.memory_plan import Setting, plan_memory
from sparkchat.models.hf_config import ConfigFile


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "factor"])
@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True])
def test_a_number_that_no_float_holds_is_refused(key: str, value: object) -> None:
    with pytest.raises(DamagedFile, match=f"{key} is .*must be a positive number") as caught:
        ConfigFile({key: value}, Path("config.json")).number(key)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"])
def test_no_plan_is_made_of_such_a_number(key: str) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    config = {"architectures": ["LlamaForCausalLM"], **dict.fromkeys(names, 4)}
    table = (Tensor("model.embed_tokens.weight", "F32", (8, 4)),)
    assert plan_memory(Headers(config, table), None, Setting("cpu")).weights > 0
    with pytest.raises(UnreadableHeader, match=key):
        plan_memory(Headers(config | {key: 10**400}, table), None, Setting("cpu"))
