"""A whole training run: target, data, cycle, drafter, measurement."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from sparkchat.errors import ModelNotFound, UsageError
from sparkchat.train.chat_tokens import load_chat_tokens
from sparkchat.train.config import DataPlan, DrafterShape, Recipe, tap_layers
from sparkchat.train.data import prepare_data
from sparkchat.train.evaluate import default_settings, evaluate
from sparkchat.train.target import load_target
from sparkchat.train.trainer import Trainer
from sparkchat.train.writer import background_writer


@dataclass(frozen=True)
class TrainingRun:
    """Everything a run needs, resolved."""

    target: Path
    """A dense model folder or GGUF file"""
    out: Path
    data: Path
    """Folder of conversations; what is missing is written there"""
    device: str
    shape: DrafterShape
    plan: DataPlan
    recipe: Recipe
    eval_prompts: int
    """Held-out chats decoded at the end; 0 skips the measurement"""
    eval_tokens: int = 256
    compile_target: bool = False
    writer_device: str | None = None
    """A second device, on which the target goes on writing conversations while the drafter trains"""


def _refuse_misfit(run: TrainingRun, num_layers: int, vocab_size: int) -> None:
    """What the target cannot have, said before it has written conversations for minutes. Raises UsageError."""
    tap_layers(num_layers, run.shape.num_taps)
    mask = run.shape.mask_token_id
    if mask is not None and not 0 <= mask < vocab_size:
        raise UsageError(f"--mask-token-id {mask} is not a token of the target; give 0 to {vocab_size - 1}")
    start = run.recipe.start_from
    if start is not None and not (start / "model.safetensors").is_file():
        raise ModelNotFound(f"--start-from {start} holds no model.safetensors; give the folder of a finished drafter")


def run_training(run: TrainingRun, report: Callable[[str], None]) -> Path:
    """Trains a drafter and returns its folder; resumes with a new cycle where the folder holds a training state."""
    for flag, device in (("--device", run.device), ("--writer-device", run.writer_device or "cpu")):
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UsageError(f"{flag} {device}: this machine has no usable CUDA device; use {flag} cpu")
    dtype = torch.bfloat16 if run.device.startswith("cuda") else torch.float32
    try:
        run.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {run.out} is no folder, and none can be made ({error.strerror})") from None
    target = load_target(run.target, device=run.device, dtype=dtype)
    _refuse_misfit(run, target.shape.num_layers, target.shape.vocab_size)
    tokens = load_chat_tokens(run.target)
    writer = (
        background_writer(run.target, run.writer_device, run.plan, run.data) if run.writer_device else nullcontext()
    )
    with writer:
        data = prepare_data(target, tokens, run.plan, run.data, report)
        if run.compile_target:
            target.compile_layers()
        trained = Trainer(target, tokens, data, run.shape, run.recipe, run.out, report).run()
    report(f"trained {trained.num_steps} steps; drafter in {run.out}")
    if run.eval_prompts:
        settings = default_settings(run.shape.block_size)
        results = evaluate(trained, tokens, settings, run.eval_prompts, run.eval_tokens, run.out, report)
        text = json.dumps([dataclasses.asdict(result) for result in results], indent=1)
        (run.out / "acceptance.json").write_text(text + "\n")
    return run.out
