"""Engines that several files share: small, and loaded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases.harness import Runner, open_runner
from fixtures import bigram

OpenRunner = Callable[..., Runner]
NAN_TOKEN = 499
"""F-tiny with damage: whoever says or hears this token gets no numbers."""


@pytest.fixture(scope="session")
def runner() -> Iterator[OpenRunner]:
    """Return ``runner(target, drafter, **options)``, cached by its arguments."""
    opened: dict[Any, Runner] = {}

    def get(target: Path, drafter: Path | None = None, **options: Any) -> Runner:
        key = (target, drafter, *sorted(options.items()))
        if key not in opened:
            opened[key] = open_runner(target, drafter, **{"context": 512, "concurrency": 4, **options})
        return opened[key]

    yield get
    opened.clear()


@pytest.fixture
def tiny(tiny_pair: Any, runner: OpenRunner) -> Runner:
    """F-tiny: its drafts depend on the target's features, so wrong features change them."""
    return runner(tiny_pair.target, tiny_pair.drafter)


def edited(source: Path, folder: Path, tensors: Callable[[dict[str, Any]], None], **config: Any) -> Path:
    """Copy a checkpoint, change its tensors in place and its config; None takes a key out."""
    shutil.copytree(source, folder)
    held = load_file(folder / "model.safetensors")
    tensors(held)
    save_file({k: v.contiguous() for k, v in held.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return folder


@pytest.fixture
def damaged_target(tiny_pair: Any, build_once: Callable[..., Any]) -> Path:
    def spoil(held: dict[str, Any]) -> None:
        held["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")

    return build_once("tiny-damaged", lambda folder: edited(tiny_pair.target, folder, spoil))


@pytest.fixture
def headless_drafter(tiny_pair: Any, build_once: Callable[..., Any]) -> Path:
    """F-tiny's drafter without a confidence head."""

    def remove(held: dict[str, Any]) -> None:
        for name in [name for name in held if name.startswith("confidence_head")]:
            del held[name]

    changes = {"enable_confidence_head": False, "confidence_head_with_markov": None}
    return build_once("tiny-headless", lambda folder: edited(tiny_pair.drafter, folder, remove, **changes))


P = (0.2, 0.5, 0.3)
Q = ((0.45, 0.35, 0.2), (0.15, 0.25, 0.6), (0.4, 0.3, 0.3))


@pytest.fixture
def three_tokens(build_once: Callable[..., Any]) -> tuple[Path, Path]:
    """Independent draws from P; a drafter that leans elsewhere, with a confidence by token."""

    def build(folder: Path) -> tuple[Path, Path]:
        table = bigram.single_row(P)
        by_token = {300: 2.0, 301: 0.0, 302: -1.0}
        drafter = bigram.BigramDrafter(
            kind=None, logits=torch.tensor(Q).log(), confidence=lambda token: by_token.get(token, 0.0), block=3
        )
        return (
            bigram.write_bigram(folder / "target", table),
            bigram.write_bigram_drafter(folder / "drafter", table, drafter),
        )

    return build_once("three-tokens", build)
