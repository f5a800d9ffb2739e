"""What a training run is made of: frozen settings, resolved once before anything is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path

from sparkchat.errors import UsageError

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of the drafter; everything else is copied from the target."""

    num_layers: int = 2
    block_size: int = 7
    markov_rank: int = 128
    draft_vocab_size: int = 16384
    """Rows of the drafter's output vocabulary; the most frequent target ids and every end token."""
    num_taps: int = 5
    mask_token_id: int | None = None
    """Id that fills the block behind the anchor; None takes the last special id of the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "block_size", "markov_rank", "draft_vocab_size", "num_taps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} = {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class DataPlan:
    """How much the target writes, in waves of rows that advance in lock-step."""

    tokens: int = 40_000_000
    """Training tokens to have in all, prompts included; waves written before count."""
    wave_tokens: int = 2**21
    """Tokens of one wave; its cache of keys and values is what limits this on a device."""
    lengths: tuple[int, ...] = (512, 512, 1024, 512, 1024, 2048)
    """Row lengths of successive waves, repeated."""
    held_out_rows: int = 256
    held_out_length: int = 512
    self_written_share: float = 0.34
    """Share of user turns that the target writes itself; the rest come from our templates."""
    system_share: float = 0.2
    num_questions: int = 24000
    """Distinct user prompts drawn from the templates."""
    seed: int = 17


@dataclass(frozen=True)
class Recipe:
    """Losses and optimiser (paper section 4; numbers of the published training code)."""

    minutes: float = 10.0
    """Time of this training cycle; the learning rate reaches zero when it is over."""
    max_steps: int | None = None
    """Ends the cycle after so many steps instead of after its time (tests, slow machines)."""
    tokens_per_batch: int = 32768
    slots_per_sequence: int = 896
    """Supervised block slots per 512 tokens of a sequence: anchors = slots / block length."""
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    slot_decay: float = 4.0
    """Slot i of a block weighs exp(-i / slot_decay)."""
    loss_sampling: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """(temperature, repetition penalty) at which both distributions are compared, dealt out to the sequences in
    turn; temperature 1 without a penalty in the paper"""
    short_block_share: float = 0.3
    """Share of steps whose blocks are shorter than the drafter's block size."""
    shortest_block: int = 3
    optimizer: str = "adamw"
    """``adamw``, or ``muon`` for the hidden matrices with AdamW for the rest"""
    learning_rate: float = 1e-3
    warmup_share: float = 0.04
    grad_clip: float = 1.0
    checkpoint_minutes: float = 2.0
    start_from: Path | None = None
    """A finished drafter to go on from, with fresh optimiser moments"""
    seed: int = 42

    def __post_init__(self) -> None:
        for temperature, penalty in self.loss_sampling:
            if not (0 < temperature <= 2 and 0 < penalty <= 2):
                raise UsageError(f"loss temperature {temperature}, penalty {penalty}: both must be in (0, 2]")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer {self.optimizer}: choose one of {', '.join(OPTIMIZERS)}")
        if not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise UsageError(f"--minutes {self.minutes}: must be positive")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise UsageError(f"--learning-rate {self.learning_rate}: must be positive")
        if not 0 <= self.short_block_share <= 1:
            raise UsageError(f"short block share {self.short_block_share}: must be in [0, 1]")


def tap_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Decoder layers whose raw outputs the drafter reads, evenly from 1 to N - 3 (published configs).

    Raises UsageError when the target is too shallow for so many distinct taps.
    """
    if num_taps == 1:
        return (max(0, num_target_layers - 3),)
    step = (num_target_layers - 4) / (num_taps - 1)
    layers = tuple(round(1 + i * step) for i in range(num_taps))
    if len(set(layers)) != num_taps or step < 0:
        raise UsageError(f"{num_taps} taps of a target with {num_target_layers} layers: ask for fewer taps")
    return layers
