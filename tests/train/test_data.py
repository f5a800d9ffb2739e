"""Prompts, scripts, conversations and the batches drawn from them."""

import random
from pathlib import Path

import pytest
import torch

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.train.batches import BatchStream, choose_draft_vocabulary, draw_anchors, load_conversations
from sparkchat.train.chat_tokens import ChatTokens, load_chat_tokens
from sparkchat.train.config import DataPlan, Recipe, tap_layers
from sparkchat.train.data import held_out_prompts, prepare_data
from sparkchat.train.generate import Conversations, LockstepWriter, RowSampling, sample
from sparkchat.train.prompts import FOLLOW_UPS, TEMPLATES, prompt_books
from sparkchat.train.scripts import ScriptWriter
from sparkchat.train.target import Target

PLAN = DataPlan(tokens=2000, wave_tokens=512, lengths=(64, 128), held_out_rows=4, held_out_length=96, num_questions=64)


def test_the_split_shares_nothing() -> None:
    training, held_out = prompt_books()
    assert len(training.templates) >= 80
    assert not set(training.templates) & set(held_out.templates) - {"{opener}"}
    assert not set(training.follow_ups) & set(held_out.follow_ups)
    for slot, words in training.topics.items():
        assert held_out.topics[slot], slot
        assert words, slot
    for slot in ("concept", "task", "person", "passage", "sentence", "code", "place"):
        assert not set(training.topics[slot]) & set(held_out.topics[slot]), slot


def test_every_template_can_be_filled() -> None:
    rng = random.Random(0)
    for book in prompt_books():
        for template in book.templates + book.follow_ups:
            text = book._fill(template, rng)
            assert "{" not in text and text.strip(), template
    assert len(TEMPLATES) + len(FOLLOW_UPS) == sum(len(b.templates) + len(b.follow_ups) for b in prompt_books())


def write(target: Target, tokens: ChatTokens, rows: int = 6, length: int = 120) -> tuple[LockstepWriter, Conversations]:
    scripts = ScriptWriter(tokens, prompt_books()[0], PLAN, random.Random(4))
    torch.manual_seed(3)
    banned = torch.tensor([i for i in tokens.special if i != tokens.end])
    sampling = RowSampling.mixed(rows, torch.Generator().manual_seed(1), "cpu")
    writer = LockstepWriter(target, scripts.write(rows, length), sampling, tokens.end, banned, length)
    return writer, writer.write()


def test_rows_are_well_formed_chats(target: Target, tokens: ChatTokens) -> None:
    _, written = write(target, tokens)
    answer, ask = tokens.header("assistant"), tokens.header("user")
    for ids, is_answer in zip(written.ids.tolist(), written.is_answer.tolist(), strict=True):
        assert ids[: len(ask)] == ask or ids[: len(tokens.header("system"))] == tokens.header("system")
        starts = [i for i, token in enumerate(ids) if token == tokens.start]
        assert all(i == 0 or ids[i - 1] == tokens.encode("\n")[-1] for i in starts)
        assert not any(is_answer[i] for i in starts)
        for i in range(1, len(ids)):
            if is_answer[i] and not is_answer[i - 1]:
                assert ids[i - len(answer) : i] == answer
            if is_answer[i - 1] and not is_answer[i]:
                assert ids[i - 1] == tokens.end
    assert written.is_answer.any()


def test_answers_follow_from_their_rows(target: Target, tokens: ChatTokens) -> None:
    """At temperature almost zero every free token is the target's most likely one."""
    writer, _ = write(target, tokens)
    cold = RowSampling.fixed(6, 1e-4, 1.0, 1.0, "cpu")
    writer.sampling = cold
    written = writer.write()
    _, hidden = target.forward(written.ids.long(), ())
    logits = hidden @ target.head.T
    logits[:, :, [i for i in tokens.special if i != tokens.end]] = float("-inf")
    best = logits.argmax(dim=-1)
    free = written.is_answer[:, 1:]
    assert free.sum() > 50
    assert torch.equal(best[:, :-1][free], written.ids.long()[:, 1:][free])


def test_sampling_keeps_to_the_nucleus_and_the_law() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]).log().expand(20000, -1)
    one = torch.ones(20000)
    free = torch.bincount(sample(logits, one, one), minlength=5) / 20000
    torch.testing.assert_close(free, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]), atol=0.015, rtol=0)
    cut = torch.bincount(sample(logits, one, 0.8 * one), minlength=5) / 20000
    torch.testing.assert_close(cut, torch.tensor([0.5, 0.25, 0.15, 0, 0]) / 0.9, atol=0.02, rtol=0)


def test_data_is_written_once_and_extended(target: Target, tokens: ChatTokens, tmp_path: Path) -> None:
    lines: list[str] = []
    first = prepare_data(target, tokens, PLAN, tmp_path, lines.append)
    assert sum(w.ids.numel() for w in first.training) >= 2000
    assert {w.ids.shape[1] for w in first.training} == {64, 128}
    num_waves = len(lines)
    again = prepare_data(target, tokens, PLAN, tmp_path, lines.append)
    assert len(lines) == num_waves
    assert torch.equal(first.training[0].ids, again.training[0].ids)
    assert not torch.equal(first.training[0].ids, first.training[2].ids)
    (tmp_path / "training" / "0001.npz").write_bytes(b"cut")
    with pytest.raises(DamagedFile, match=r"0001\.npz"):
        load_conversations(tmp_path / "training")


def test_anchors_and_labels_stay_inside_answers() -> None:
    is_answer = torch.zeros(2, 40, dtype=torch.bool)
    is_answer[0, 5:12] = is_answer[0, 20:23] = is_answer[1, 39] = True
    anchors, is_valid = draw_anchors(is_answer, 12, torch.Generator().manual_seed(0))
    assert sorted(anchors[0][is_valid[0]].tolist()) == [5, 6, 7, 8, 9, 10, 20, 21]
    assert not is_valid[1].any()
    waves = [Conversations(torch.arange(80, dtype=torch.int32).view(2, 40), is_answer)]
    recipe = Recipe(tokens_per_batch=80, slots_per_sequence=12 * 4 * 512 // 40, short_block_share=0.0)
    batch = next(iter(BatchStream(waves, recipe, 4, "cpu", seed=1)))
    labels, supervised = batch.labels()
    row = batch.ids[:, 0].tolist().index(0)
    for anchor, valid, ids, used in zip(
        batch.anchors[row].tolist(), batch.is_valid[row].tolist(), labels[row], supervised[row], strict=True
    ):
        end = 12 if anchor < 12 else 23
        want = max(0, min(4, end - anchor - 1)) if valid else 0
        assert used.tolist() == [i < want for i in range(4)]
        assert ids[used].tolist() == list(range(anchor + 1, anchor + 1 + want))


def test_some_blocks_are_short() -> None:
    waves = [Conversations(torch.ones(8, 64, dtype=torch.int32), torch.ones(8, 64, dtype=torch.bool))]
    stream = iter(BatchStream(waves, Recipe(tokens_per_batch=64, short_block_share=0.5), 7, "cpu", seed=1))
    lengths = [next(stream).block_len for _ in range(200)]
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert 60 < lengths.count(7) < 140


def test_draft_vocabulary_takes_the_frequent_and_the_required() -> None:
    counts = torch.tensor([0, 5, 9, 1, 7, 3])
    assert choose_draft_vocabulary(counts, 3, (0,)).tolist() == [0, 2, 4]
    with pytest.raises(UsageError, match="6 ids"):
        choose_draft_vocabulary(counts, 7, (0,))


def test_tap_layers_follow_the_published_configs() -> None:
    assert tap_layers(36, 5) == (1, 9, 17, 25, 33)
    assert tap_layers(40, 5) == (1, 10, 19, 28, 37)
    with pytest.raises(UsageError, match="fewer taps"):
        tap_layers(5, 5)


def test_targets_without_chat_tokens_are_refused(toy_folder: Path, tmp_path: Path) -> None:
    text = (toy_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|begin|>"))
    with pytest.raises(UsageError, match="im_start"):
        load_chat_tokens(tmp_path)


def test_held_out_prompts_end_where_the_answer_begins(tokens: ChatTokens) -> None:
    prompts = held_out_prompts(tokens, 20, system_share=0.5, seed=1)
    assert prompts == held_out_prompts(tokens, 20, system_share=0.5, seed=1)
    assert all(ids[-len(tokens.header("assistant")) :] == tokens.header("assistant") for ids in prompts)
    assert 3 < sum(ids[: len(tokens.header("system"))] == tokens.header("system") for ids in prompts) < 17
