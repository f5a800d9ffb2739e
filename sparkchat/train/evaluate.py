"""Measures a trained drafter by speculative decoding of held-out chats."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.data import held_out_prompts
from sparkchat.train.generate import RowSampling
from sparkchat.train.simulate import Rounds, Simulator
from sparkchat.train.trainer import Trained

PROMPT_SEED = 2026


@dataclass(frozen=True)
class Setting:
    """Sampling and block length of one measurement."""

    name: str
    temperature: float
    top_p: float
    repetition_penalty: float
    block_len: int


@dataclass(frozen=True)
class Measured:
    """Acceptance under one setting; lengths include the bonus token."""

    setting: Setting
    num_prompts: int
    num_rounds: int
    acceptance_length: float
    survival: list[float]
    """Share of rounds that accepted at least k drafts, k = 1..g"""
    conditional: list[float]
    """Share of rounds that accepted draft k among those that accepted all before it"""


def default_settings(block_size: int) -> tuple[Setting, ...]:
    """Plain sampling at 0.7 and 1, and the small model's preset, with whole and shorter blocks."""
    settings = [
        Setting("t0.7", 0.7, 1.0, 1.0, block_size),
        Setting("preset", 0.5, 0.9, 1.1, block_size),
        Setting("t1.0", 1.0, 1.0, 1.0, block_size),
        Setting("t0", 1e-4, 1.0, 1.0, block_size),
    ]
    for block_len in {max(1, block_size - 2), max(1, block_size - 4)} - {block_size}:
        settings.append(Setting(f"t0.7-block{block_len}", 0.7, 1.0, 1.0, block_len))
        settings.append(Setting(f"preset-block{block_len}", 0.5, 0.9, 1.1, block_len))
    return tuple(settings)


def evaluate(
    trained: Trained,
    tokens: ChatTokens,
    settings: tuple[Setting, ...],
    num_prompts: int,
    max_new: int,
    out: Path,
    report: Callable[[str], None],
) -> list[Measured]:
    """Decodes held-out prompts under each setting; raw confidences go to ``confidence-<name>.npz`` in ``out``."""
    trained.drafter.eval()
    prompts = held_out_prompts(tokens, num_prompts, system_share=0.2, seed=PROMPT_SEED)
    results = []
    for setting in settings:
        torch.manual_seed(PROMPT_SEED)
        sampling = RowSampling.fixed(
            num_prompts, setting.temperature, setting.top_p, setting.repetition_penalty, trained.drafter.target.device
        )
        simulator = Simulator(trained.drafter, trained.head, tokens.end, setting.block_len)
        rounds, _ = simulator.run(prompts, sampling, max_new)
        save_confidences(rounds, out / f"confidence-{setting.name}.npz")
        measured = _measure(setting, num_prompts, rounds)
        results.append(measured)
        survival = " ".join(f"{x:.3f}" for x in measured.survival)
        report(
            f"{setting.name}: acceptance length {measured.acceptance_length:.3f} over {measured.num_rounds} rounds; "
            f"survival {survival}"
        )
    return results


def _measure(setting: Setting, num_prompts: int, rounds: Rounds) -> Measured:
    survival = rounds.survival()
    before = [1.0, *survival[:-1]]
    conditional = [now / past if past else 0.0 for now, past in zip(survival, before, strict=True)]
    length = rounds.mean_acceptance_length()
    return Measured(setting, num_prompts, len(rounds.accepted), length, survival, conditional)


def save_confidences(rounds: Rounds, path: Path) -> None:
    """What calibration is fitted on: logits [N, g], prefix acceptance [N, g], and which slots count."""
    np.savez_compressed(
        path,
        logits=rounds.confidence_logits.float().cpu().numpy().astype(np.float32),
        accepted=rounds.is_accepted.cpu().numpy(),
        counted=rounds.is_counted.cpu().numpy(),
    )
