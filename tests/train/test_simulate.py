"""The measuring decoder: lossless, and counted as the engine counts."""

import torch

from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.generate import RowSampling
from sparkchat.train.losses import VocabularyHead
from sparkchat.train.simulate import Simulator
from sparkchat.train.target import Target

PROMPTS = torch.randint(4, 250, (4, 16), generator=torch.Generator().manual_seed(5)).tolist()


def test_cold_output_is_the_targets_own(target: Target, drafter: TrainingDrafter, head: VocabularyHead) -> None:
    prompts = [PROMPTS[0], PROMPTS[1][:9], PROMPTS[2][:12]]
    _, ids = Simulator(drafter, head, 2, 4).run(prompts, RowSampling.fixed(3, 1e-5, 1.0, 1.0, "cpu"), 20)
    for row, prompt in enumerate(prompts):
        text = list(prompt)
        for _ in range(20):
            _, hidden = target.forward(torch.tensor([text]), ())
            text.append(int((hidden[0, -1] @ target.head.T).argmax()))
            if text[-1] == 2:
                break
        assert ids[row, : len(text)].tolist() == text


def test_sampled_output_follows_the_targets_law(target: Target, drafter: TrainingDrafter, head: VocabularyHead) -> None:
    """Second and third token of many rows with the same prompt and first token."""
    num_rows = 3000
    torch.manual_seed(0)
    sampling = RowSampling.fixed(num_rows, 0.7, 0.9, 1.1, "cpu")
    prompt = PROMPTS[3]
    simulator = Simulator(drafter, head, end_id=-1, block_len=2)
    rounds, ids = simulator.run([prompt] * num_rows, sampling, 4)
    assert 0.02 < rounds.is_accepted[:, 0].float().mean() < 0.98
    first = ids[:, len(prompt)].mode().values.item()
    rows = ids[ids[:, len(prompt)] == first]
    _, hidden = target.forward(torch.tensor([[*prompt, first]]), ())
    seen = torch.zeros(1, target.shape.vocab_size, dtype=torch.bool)
    seen[0, [*prompt, first]] = True
    simulator.sampling = RowSampling.fixed(1, 0.7, 0.9, 1.1, "cpu")
    law = simulator._probabilities(hidden[:, -1] @ target.head.T, seen)[0]
    counts = torch.bincount(rows[:, len(prompt) + 1], minlength=len(law)).float()
    assert counts[law == 0].sum() == 0
    expected = law * len(rows)
    is_common = expected >= 5
    chi = ((counts - expected)[is_common] ** 2 / expected[is_common]).sum()
    degrees = int(is_common.sum())
    assert degrees > 5 and len(rows) > 200
    assert chi < degrees + 4 * (2 * degrees) ** 0.5


def test_end_tokens_are_not_counted(target: Target, drafter: TrainingDrafter, head: VocabularyHead) -> None:
    # Everything ends at once: whatever the target says first after the first token is taken as the end.
    sampling = RowSampling.fixed(1, 1e-5, 1.0, 1.0, "cpu")
    _, free = Simulator(drafter, head, -1, 3).run(PROMPTS[:1], sampling, 9)
    end = int(free[0, 16 + 4])
    rounds, ids = Simulator(drafter, head, end, 3).run(PROMPTS[:1], sampling, 9)
    before_end = ids[0, 16:].tolist().index(end)
    assert int(rounds.num_tokens.sum()) == before_end - 1
    assert len(rounds.num_tokens) == len(rounds.accepted) == len(rounds.confidence_logits)
