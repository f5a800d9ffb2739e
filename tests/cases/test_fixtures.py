"""The fixtures are what they claim, judged by transformers and not by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures import bigram, mix, tape
from fixtures.tiny import SHAPE as TINY_SHAPE

PROMPT = torch.tensor([[40, 300, 301, 302, 301, 300]])


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bigram_logits_equal_the_table(tmp_path: Path, dtype: torch.dtype) -> None:
    table = bigram.single_row((0.2, 0.5, 0.3))
    folder = bigram.write_bigram(tmp_path / "t", table, dtype=dtype)
    expected = ((table.full() / bigram.LENGTH).to(dtype) * bigram.LENGTH).float()[PROMPT[0]]
    torch.testing.assert_close(logits_of(folder, PROMPT)[0], expected, rtol=1e-5, atol=1e-5)
    law = logits_of(folder, PROMPT)[0, -1].double().softmax(-1)[300:303]
    assert law.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=1e-6 if dtype == torch.float32 else 2e-3)


def test_bigram_drafter_law_is_its_markov_product(tmp_path: Path) -> None:
    table = bigram.single_row((0.2, 0.5, 0.3))
    chosen = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
    drafter = bigram.BigramDrafter(kind=None, logits=chosen, confidence=lambda token: float(token - 300))
    tensors = load_file(bigram.write_bigram_drafter(tmp_path / "d", table, drafter) / "model.safetensors")
    bias = tensors["markov_head.markov_w1.weight"] @ tensors["markov_head.markov_w2.weight"].T
    assert torch.equal(bias[300:303, 300:303], chosen)
    assert bias[301].topk(3).indices.tolist() == [302, 301, 300]
    embedding_part = tensors["confidence_head.proj.weight"][0, bigram.HIDDEN :]
    assert (tensors["markov_head.markov_w1.weight"][300:303] @ embedding_part).tolist() == [0.0, 1.0, 2.0]
    assert tensors["norm.weight"].abs().max() == 0


@pytest.mark.parametrize("kind", ["anti", "half"])
def test_wrong_drafts_are_tokens_the_target_never_takes(tmp_path: Path, kind: Any) -> None:
    table = bigram.single_row((0.2, 0.5, 0.3))
    w1, w2, _ = bigram.markov_tables(table, bigram.BigramDrafter(kind=kind))
    drafted = (w1 @ w2.T)[300:303].argmax(-1).tolist()
    right = 301
    expected = {"anti": [bigram.DECOY] * 3, "half": [right, bigram.DECOY, right]}
    assert drafted == expected[kind]
    assert table.full()[:, bigram.DECOY].max() == bigram.DEAD


@pytest.mark.parametrize("name", ["target", "window"])
def test_mix_follows_its_table_nine_times_in_ten(mix_folders: dict[str, Path], name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(mix_folders[name])
    assert ("sliding_attention" in model.config.layer_types) == (name == "window")
    best = mix.mix_table().full().argmax(-1)
    followed: list[bool] = []
    for length in (1, 17, 60):
        prompt = torch.randint(300, 500, (1, length), generator=torch.Generator().manual_seed(length))
        out = model.generate(prompt, max_new_tokens=120, do_sample=False, eos_token_id=None)[0]
        followed += (best[out[length:-1]] == out[length + 1 :]).tolist()
    assert 0.85 <= sum(followed) / len(followed) <= 0.95


def test_mix_depends_on_more_than_the_last_token(mix_folders: dict[str, Path]) -> None:
    prompts = torch.randint(300, 500, (8, 64), generator=torch.Generator().manual_seed(0))
    prompts[:, -1] = torch.arange(300, 308)
    shuffled = torch.cat([prompts[:, :-1].flip(1), prompts[:, -1:]], 1)
    moved = (logits_of(mix_folders["target"], prompts) - logits_of(mix_folders["target"], shuffled))[:, -1, 300:500]
    assert moved.abs().amax(-1).min() > 0.1


def test_tiny_folder_loads_and_has_ids_without_text(tiny_pair: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    assert len(tokenizer) < TINY_SHAPE.vocab
    text = "hello the world, שלום 你好\r\n  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = torch.randint(0, 512, (1, 200), generator=torch.Generator().manual_seed(1))
    margin = logits_of(tiny_pair.target, prompt).topk(2).values.diff().abs()
    assert margin.median() > 0.1


def test_tiny_drafter_folder_spells_deepspec_names(tiny_pair: Any) -> None:
    config = json.loads((tiny_pair.drafter / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["block_size"], config["markov_rank"], config["markov_head_type"]) == (5, 8, "vanilla")
    assert not any(k.startswith("model.") for k in load_file(tiny_pair.drafter / "model.safetensors"))


TAPE = tape.Tape(((b"Hi \xf0\x9f", b"\x91", b"\xa9 and ", b"a", b"a", b" shalom \xd7\xa9", b"\n\n"), (b"two", b"a")))


def test_tape_emits_its_script_then_the_end_token(tmp_path: Path) -> None:
    folder = tape.write_tape(tmp_path / "tape", TAPE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "go"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    for number, ids in enumerate((prompt, [65, 1])):
        out = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False)[0, len(ids) :].tolist()
        assert out == [*TAPE.ids[number], tokenizer.eos_token_id]
        assert tokenizer.decode(out[:-1]) == TAPE.text(number)
    assert TAPE.text(1) == "twoa"


def test_tape_can_run_in_a_cycle_with_thinking_tags(tmp_path: Path) -> None:
    folder = tape.write_tape(tmp_path / "tape", tape.one_tape("<think>", b"hmm", "</think>", b"so", cycle=True))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    out = model.generate(torch.tensor([[65]]), max_new_tokens=6, do_sample=False)[0, 1:].tolist()
    assert tokenizer.decode(out) == "<think>hmm</think>so<think>hmm"
    assert tokenizer.decode(out, skip_special_tokens=True) == "<think>hmm</think>so<think>hmm"


def test_a_tag_cannot_be_followed_by_two_things() -> None:
    with pytest.raises(ValueError, match="each tag once"):
        tape.one_tape("<think>", "<think>").table()
