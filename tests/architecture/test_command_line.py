"""The options that users and scripts rely on; a change here is a change of the published surface."""

from __future__ import annotations

import typer
from typer.main import get_command

from sparkchat.cli.app import app

RUN = """
--mode --drafter --block-size --temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty
--frequency-penalty --logit-bias --min-tokens --max-tokens --stop --ignore-eos --seed --system --raw --prompt-ids
--think --no-think --reasoning-effort --device --tp --dtype --context --graphs --no-graphs --offline --trace --force
--json --jsonl
--plain --resume --verbose --color --ascii --dummy-weights --simulate-acceptance --profile --engine
--accept-cap --draft-temperature --refine --no-refine --cache-tokens
"""
ONLY_RUN = {"--prompt-ids", "--json", "--jsonl", "--plain", "--resume", "--color", "--ascii", "--engine"}
SERVING = {"--concurrency", "--host", "--port", "--api-key", "--max-waiting", "--grace"}
OTHERS = {
    "list": {"--json"},
    "show": {"--resolved", "--json", "--profile", "--context"},
    "pull": {"--dry-run", "--json", "--offline", "--profile", "--context"},
    "rm": {"--json"},
    "verify": {"--json"},
    "doctor": {"--json", "--offline"},
    "paths": {"--json"},
}


def options(command: object) -> set[str]:
    found: set[str] = set()
    for parameter in command.params:  # type: ignore[attr-defined]
        if getattr(parameter, "param_type_name", "") == "option" and parameter.name != "help":
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def test_the_options_of_every_command() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert options(commands["run"]) == set(RUN.split())
    assert options(commands["batch"]) == (set(RUN.split()) - ONLY_RUN) | {"--concurrency"}
    assert options(commands["serve"]) == (set(RUN.split()) - ONLY_RUN - {"--raw"}) | SERVING
    for name, wanted in OTHERS.items():
        assert options(commands[name]) == wanted, name


def test_the_commands() -> None:
    names = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {"run", "batch", *OTHERS, "trace"} <= names
    assert names <= {"run", "batch", *OTHERS, "trace", "train", "serve", "tune", "bench"}
    assert isinstance(app, typer.Typer)
