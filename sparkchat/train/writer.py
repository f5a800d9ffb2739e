"""A process of its own that goes on writing conversations on a second device while the drafter trains."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from sparkchat.train.chat_tokens import load_chat_tokens
from sparkchat.train.config import DataPlan
from sparkchat.train.data import FRESH, WaveFolder
from sparkchat.train.prompts import prompt_books
from sparkchat.train.target import load_target

_SEED_OFFSET = 500_009
_WAVES_PER_SCRIPT = 6


@contextmanager
def background_writer(target: Path, device: str, plan: DataPlan, data: Path) -> Iterator[None]:
    """While the context is open, waves appear in ``data``'s folder of fresh conversations; the last is cut off.

    A writer that fails ends alone: training goes on with what there is, and its message is on stderr.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_write_for_ever, args=(target, device, plan, data), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _write_for_ever(target_path: Path, device: str, plan: DataPlan, data: Path) -> None:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    target = load_target(target_path, device=device, dtype=dtype)
    tokens, book = load_chat_tokens(target_path), prompt_books()[0]
    number = 0
    while True:
        # New questions now and then: the prompt book holds far more of them than one script does.
        seed = plan.seed + _SEED_OFFSET + 10_000 * number
        waves = WaveFolder(
            data / FRESH, target, tokens, replace(plan, seed=seed), book, lambda line: print(line, flush=True)
        )
        for _ in range(_WAVES_PER_SCRIPT):
            length = plan.lengths[number % len(plan.lengths)]
            waves.add(max(1, plan.wave_tokens // length), length)
            number += 1
