"""``sparkchat train``: fits a DSpark drafter to a target within a time budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from sparkchat.errors import UsageError
from sparkchat.paths import typed_path


def register(app: typer.Typer) -> None:
    app.command()(train)


def train(
    target: Annotated[str, typer.Option(help="Model folder, GGUF file, or profile name.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter; a training state there is resumed.")],
    minutes: Annotated[float | None, typer.Option(help="Length of this training cycle. [default: 10]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Length in steps, instead of --minutes.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of conversations. [default: OUT/data]")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Training tokens to have; the target writes what is missing.")] = (
        40_000_000
    ),
    wave_tokens: Annotated[int, typer.Option(min=1, help="Tokens written at once; less takes less memory.")] = 2**21,
    row_lengths: Annotated[str, typer.Option(help="Lengths of the rows of successive waves.")] = (
        "512,512,1024,512,1024,2048"
    ),
    held_out_rows: Annotated[int, typer.Option(min=1, help="Conversations kept for measuring.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Draft layers.")] = 2,
    taps: Annotated[int, typer.Option(min=1, help="Target layers the drafter reads.")] = 5,
    block_size: Annotated[int, typer.Option(min=1, help="Drafts a block.")] = 7,
    markov_rank: Annotated[int, typer.Option(min=1, help="Rank of the Markov head.")] = 128,
    draft_vocab: Annotated[int, typer.Option(min=1, help="Ids the drafter can propose.")] = 16384,
    mask_token_id: Annotated[int | None, typer.Option(help="Id behind the anchor. [default: last special id]")] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for the hidden matrices.")] = "adamw",
    loss_temperature: Annotated[
        str, typer.Option(help="Temperatures at which the losses compare, as T or T/REPETITION_PENALTY, by commas.")
    ] = "1.0",
    start_from: Annotated[Path | None, typer.Option(help="A finished drafter to go on from.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a batch.")] = 32768,
    slots: Annotated[int, typer.Option(min=1, help="Supervised slots per 512 tokens.")] = 896,
    eval_prompts: Annotated[int, typer.Option(min=0, help="Held-out chats decoded at the end; 0: none.")] = 256,
    compile_target: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile target layers.")] = False,
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu. [default: cuda where there is one]")] = "auto",
    writer_device: Annotated[
        str | None, typer.Option(help="A second device, where the target goes on writing while the drafter trains.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data and training.")] = 42,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
) -> None:
    """Train a DSpark drafter on conversations that the target writes itself."""
    if minutes is not None and steps is not None:
        raise UsageError("--minutes and --steps both set the length of the cycle; give one of them")
    lengths = _lengths(row_lengths)
    path = _target_path(target, offline)

    import torch

    from sparkchat.train.config import DataPlan, DrafterShape, Recipe
    from sparkchat.train.run import TrainingRun, run_training

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = TrainingRun(
        target=path,
        out=out,
        data=data or out / "data",
        device=device,
        shape=DrafterShape(layers, block_size, markov_rank, draft_vocab, taps, mask_token_id),
        plan=DataPlan(tokens, wave_tokens, lengths, held_out_rows=held_out_rows, seed=seed),
        recipe=Recipe(
            minutes=10.0 if minutes is None else minutes,
            max_steps=steps,
            tokens_per_batch=batch_tokens,
            slots_per_sequence=slots,
            loss_sampling=_loss_sampling(loss_temperature),
            start_from=start_from,
            optimizer=optimizer,
            learning_rate=learning_rate,
            seed=seed,
        ),
        eval_prompts=eval_prompts,
        compile_target=compile_target,
        writer_device=writer_device,
    )
    folder = run_training(run, typer.echo)
    typer.echo(f"try it: sparkchat run {target} --drafter {folder}")


def _lengths(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= 16 for word in words):
        raise UsageError(f"--row-lengths {text!r}: give lengths of at least 16, separated by commas")
    return tuple(int(word) for word in words)


def _loss_sampling(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [word.partition("/") for word in text.split(",")]
        return tuple((float(temperature), float(penalty) if bar else 1.0) for temperature, bar, penalty in pairs)
    except ValueError as error:
        raise UsageError(f"--loss-temperature {text!r}: give T or T/REPETITION_PENALTY, separated by commas") from error


def _target_path(text: str, offline: bool) -> Path:
    """The target's files on this machine, fetched where a profile says how."""
    path = typed_path(text)
    if os.path.exists(path):
        return path
    from sparkchat.catalog import find_model
    from sparkchat.cli.progress import fetch_progress
    from sparkchat.locate import is_offline, locate
    from sparkchat.paths import user_paths

    paths = user_paths()
    model = find_model(text, paths)
    if model.path is not None:
        return model.path
    with fetch_progress() as progress:
        return locate(model.sources, model.name, paths, progress, offline=is_offline(offline)).path
