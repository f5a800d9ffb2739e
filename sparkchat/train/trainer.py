"""Trains a drafter for a target within a time budget."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparkchat.errors import DamagedFile, UsageError
from sparkchat.train.batches import Batch, BatchStream, choose_draft_vocabulary, count_answer_ids, load_wave
from sparkchat.train.chat_tokens import ChatTokens
from sparkchat.train.checkpoint import (
    STATE_FILE,
    TrainingState,
    export_drafter,
    load_exported,
    load_state,
    save_state,
)
from sparkchat.train.config import DrafterShape, Recipe, tap_layers
from sparkchat.train.data import TrainingData
from sparkchat.train.drafter import TrainingDrafter
from sparkchat.train.losses import VocabularyHead, vocabulary_head
from sparkchat.train.optimizer import DrafterOptimizer
from sparkchat.train.step import AgreementMeter, batch_loss
from sparkchat.train.target import Target

_HELD_OUT_BATCHES = 4
_REPORT_SECONDS = 15.0
_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Trained:
    """A drafter and what its output columns mean."""

    drafter: TrainingDrafter
    head: VocabularyHead
    num_steps: int


class Trainer:
    """One training cycle: warm-up, cosine decay over ``recipe.minutes``, checkpoints on the way."""

    def __init__(
        self,
        target: Target,
        tokens: ChatTokens,
        data: TrainingData,
        shape: DrafterShape,
        recipe: Recipe,
        out: Path,
        report: Callable[[str], None],
    ) -> None:
        self.target, self.recipe, self.out, self.report = target, recipe, out, report
        torch.manual_seed(recipe.seed)
        state = load_state(out / STATE_FILE, target.device) if (out / STATE_FILE).is_file() else None
        exported = load_exported(recipe.start_from) if recipe.start_from and not state else None
        if state:
            draft_to_target = state.draft_to_target
        elif exported:
            draft_to_target = exported.pop("draft_to_target")
        else:
            draft_to_target = self._draft_vocabulary(data, shape, tokens)
        self.head = vocabulary_head(target.head, draft_to_target)
        mask_id = tokens.special[-1] if shape.mask_token_id is None else shape.mask_token_id
        taps = tap_layers(target.shape.num_layers, shape.num_taps)
        self.drafter = TrainingDrafter(target, shape, taps, mask_id).to(target.device)
        is_cuda = str(target.device).startswith("cuda")
        self.optimizer = DrafterOptimizer(self.drafter, recipe.optimizer, recipe.learning_rate, is_fused=is_cuda)
        self.num_steps = 0
        self.cycle = 0
        if state:
            self._resume(state)
        seed = recipe.seed + 1000 * self.cycle
        self.stream = BatchStream(data.training, recipe, shape.block_size, target.device, seed)
        self._fresh, self._taken = data.fresh, set[Path]()
        self._take_fresh_waves()
        # Full blocks and one setting, so that the reported lengths are comparable.
        plain = dataclasses.replace(recipe, short_block_share=0.0, loss_sampling=recipe.loss_sampling[:1])
        self.held_out_recipe = plain
        held_out = iter(BatchStream(data.held_out, plain, shape.block_size, target.device, recipe.seed))
        self.held_out: list[Batch] = [next(held_out) for _ in range(_HELD_OUT_BATCHES)]
        if not state:
            with torch.no_grad():
                self.drafter.measure_feature_scale(target.forward(self.held_out[0].ids, taps)[0])
        if exported:
            self._start_from(exported)

    def _draft_vocabulary(self, data: TrainingData, shape: DrafterShape, tokens: ChatTokens) -> Tensor:
        counts = count_answer_ids(data.training, self.target.shape.vocab_size)
        chosen = choose_draft_vocabulary(counts, shape.draft_vocab_size, tokens.special)
        held_out = count_answer_ids(data.held_out, self.target.shape.vocab_size)
        shares = [float(c[chosen].sum() / c.sum().clamp(min=1)) for c in (counts, held_out)]
        self.report(
            f"draft vocabulary of {len(chosen)} ids covers {shares[0]:.2%} of {int(counts.sum())} answer tokens, "
            f"{shares[1]:.2%} of held-out ones"
        )
        return chosen

    def _resume(self, state: TrainingState) -> None:
        try:
            self.drafter.load_state_dict(state.drafter)
        except RuntimeError as error:
            raise UsageError(f"{self.out}: holds a drafter of another shape; choose another --out ({error})") from error
        try:
            self.optimizer.load_state_tensors(state.moments)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"{self.out}: was trained with another optimiser; choose the same, or another --out"
            ) from error
        self.num_steps, self.cycle = state.num_steps, state.cycle + 1
        self.report(f"resuming cycle {self.cycle} after {self.num_steps} steps")

    def _start_from(self, exported: dict[str, Tensor]) -> None:
        """Takes the weights of a finished drafter; its fc expects features that are not scaled."""
        scale = self.drafter.feature_scale
        exported["fc.weight"] = exported["fc.weight"].to(scale.device) * scale
        try:
            self.drafter.load_state_dict({**exported, "feature_scale": scale})
        except RuntimeError as error:
            raise UsageError(f"{self.recipe.start_from}: a drafter of another shape ({error})") from error
        self.report(f"starting from the drafter in {self.recipe.start_from}")

    def run(self) -> Trained:
        """Trains until the cycle is over; leaves the drafter and the resumable state in the output folder."""
        recipe, began = self.recipe, time.monotonic()
        first_step, saved, reported, looked = self.num_steps, began, began, began
        meter = AgreementMeter.empty(self.drafter.config.block_size, self.target.device)
        for batch in self.stream:
            elapsed = time.monotonic() - began
            steps = self.num_steps - first_step
            share = elapsed / (60 * recipe.minutes) if recipe.max_steps is None else steps / recipe.max_steps
            if share >= 1:
                break
            loss = self.step(batch, share, meter)
            now = time.monotonic()
            if now - reported >= _REPORT_SECONDS:
                self._report_progress(loss, meter, share, (self.num_steps - first_step) / (now - began))
                meter = AgreementMeter.empty(self.drafter.config.block_size, self.target.device)
                reported = now
            if now - looked >= _LOOK_SECONDS:
                self._take_fresh_waves()
                looked = now
            if now - saved >= 60 * recipe.checkpoint_minutes:
                self.save()
                saved = now
        self.save()
        return Trained(self.drafter, self.head, self.num_steps)

    def _take_fresh_waves(self) -> None:
        """Adds the conversations that were written since the last look."""
        for path in sorted(self._fresh.glob("*.npz")) if self._fresh else []:
            if path not in self._taken:
                self.stream.add(load_wave(path))
                self._taken.add(path)

    def step(self, batch: Batch, share: float, meter: AgreementMeter) -> Tensor:
        """One optimiser step at ``share`` of the cycle; returns the losses [total, ce, l1, confidence]."""
        self.optimizer.set_learning_rate(self.recipe.learning_rate * schedule(share, self.recipe.warmup_share))
        loss = batch_loss(self.drafter, self.head, batch, self.recipe, offset=self.num_steps)
        self.optimizer.zero_grad()
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.grad_clip)
        self.optimizer.step()
        meter.add(loss)
        self.num_steps += 1
        return torch.stack([loss.total.detach(), loss.ce, loss.l1, loss.confidence])

    def _report_progress(self, loss: Tensor, meter: AgreementMeter, share: float, speed: float) -> None:
        total, ce, l1, confidence = loss.tolist()
        if not math.isfinite(total):
            raise DamagedFile(f"training diverged at step {self.num_steps}: loss {total}; lower --learning-rate")
        held_out = self.validate()
        record = {
            "step": self.num_steps, "cycle": self.cycle, "share": round(share, 4), "steps_per_s": round(speed, 2),
            "loss": round(total, 4), "ce": round(ce, 4), "l1": round(l1, 4), "confidence": round(confidence, 4),
            "length": round(meter.acceptance_length(), 3), "held_out_length": round(held_out.acceptance_length(), 3),
            "held_out_overlap": [round(x, 4) for x in held_out.by_slot()], "waves": len(self.stream.waves),
        }  # fmt: skip
        with (self.out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.report(json.dumps(record))

    @torch.no_grad()
    def validate(self) -> AgreementMeter:
        """Agreement with the target on held-out conversations, at the first of the losses' settings."""
        meter = AgreementMeter.empty(self.drafter.config.block_size, self.target.device)
        for batch in self.held_out:
            meter.add(batch_loss(self.drafter, self.head, batch, self.held_out_recipe))
        return meter

    def save(self) -> None:
        path, vocabulary = self.out / STATE_FILE, self.head.draft_to_target
        save_state(path, self.drafter, self.optimizer, vocabulary, self.num_steps, self.cycle)
        num_anchors = self.recipe.slots_per_sequence // self.drafter.config.block_size
        export_drafter(self.drafter, self.head.draft_to_target, num_anchors, self.out)


def schedule(share: float, warmup_share: float) -> float:
    """Learning-rate factor: linear warm-up, then cosine to zero."""
    if share < warmup_share:
        return (share + 1e-3) / (warmup_share + 1e-3)
    done = (share - warmup_share) / (1 - warmup_share)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
