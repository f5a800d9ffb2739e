"""Log-probabilities of delivered tokens: the model's own, the same in every mode, and absent unless asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases.harness import Runner
from sparkchat.errors import UsageError
from sparkchat.params import MODES, GenerateRequest, SamplingParams

PROMPT = (310, 322, 401)


def request(**changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=12, **changes.pop("sampling", {}))
    return GenerateRequest(id="r", prompt_ids=PROMPT, sampling=sampling, **changes)


def deltas(runner: Runner, asked: GenerateRequest) -> list[dict[str, Any]]:
    events = runner.engine.submit(asked)
    while runner.engine.has_work:
        events += runner.engine.step()
    return [event for event in events if event["event"] == "delta"]


@pytest.mark.parametrize("mode", MODES)
def test_they_are_those_of_one_plain_pass_over_the_text(tiny: Runner, tiny_pair: Any, mode: str) -> None:
    # Temperature, bias and penalties change what is drawn, not what the model thought of it.
    strange = {"temperature": 0.9, "seed": 3, "top_k": 50, "repetition_penalty": 1.3, "logit_bias": ((333, 4.0),)}
    found = deltas(tiny, request(logprobs=3, mode=mode, sampling=strange))
    ids = [i for delta in found for i in delta["token_ids"]]
    records = [record for delta in found for record in delta["logprobs"]]
    assert [record["id"] for record in records] == ids
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    for record, row in zip(records, wanted, strict=True):
        assert record["logprob"] == pytest.approx(float(row[record["id"]]), abs=1e-4)
        best = row.topk(3)
        assert [top["id"] for top in record["top"]] == best.indices.tolist()
        assert [top["logprob"] for top in record["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_tokens_carry_their_bytes_even_where_these_are_no_characters(tiny: Runner) -> None:
    (first, *_) = deltas(tiny, request(logprobs=0, sampling={"logit_bias": ((0xE4, 1000.0),)}))
    (record, *_) = first["logprobs"]
    assert (record["id"], record["bytes"], record["token"], record["top"]) == (0xE4, [0xE4], "\ufffd", [])


def test_impossible_tokens_have_a_number_that_json_can_hold(three_tokens: Any, runner: Any) -> None:
    target, drafter = three_tokens
    found = deltas(runner(target, drafter), replace(request(logprobs=20), prompt_ids=(300,)))
    numbers = [top["logprob"] for delta in found for record in delta["logprobs"] for top in record["top"]]
    assert numbers and all(math.isfinite(number) for number in numbers)


def test_without_the_wish_there_are_none(tiny: Runner) -> None:
    assert all("logprobs" not in delta for delta in deltas(tiny, request()))


@pytest.mark.parametrize("count", [-1, 21, 1.0, True, "3"])
def test_other_counts_are_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="logprobs"):
        request(logprobs=count)
