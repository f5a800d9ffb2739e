"""Options that several commands share, declared once.

Values are checked by ``sparkchat.options`` and by the classes that use them, so that a flag, a variable and a
profile give the same message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from sparkchat.options import RESOLVED


@dataclass(frozen=True)
class Session:
    """What the whole command line carries."""

    debug: bool
    argv: tuple[str, ...]


def session(ctx: typer.Context) -> Session:
    return cast(Session, ctx.find_root().obj)


def typed_flags(ctx: typer.Context) -> dict[str, Any]:
    """The options of the table that were typed on this command line."""
    return {name: ctx.params[name] for name in RESOLVED if name in ctx.params and is_typed(ctx, name)}


def is_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(*names: str, help: str, metavar: str | None = None, variable: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, envvar=variable, show_envvar=False)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Profile name, hf:org/repo[@revision], a model folder or a .gguf file. Default: smollm2-135m.",
        show_default=False,
    ),
]
RequiredModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Profile name, hf:org/repo[@revision], a model folder or a .gguf file."),
]

ProfileName = Annotated[
    str | None,
    _flag("--profile", metavar="NAME", help="Drafter and options of this profile or .toml file, over MODEL's own."),
]
Mode = Annotated[str | None, _flag("--mode", metavar="NAME", help="Verify mode: off, static, compact or cap-accept.")]
Drafter = Annotated[str | None, _flag("--drafter", metavar="WHERE", help="Drafter: a folder, hf:org/repo, or none.")]
BlockSize = Annotated[
    int | None, _flag("--block-size", metavar="N", help="Draft tokens per step, up to the drafter's.")
]
AcceptCap = Annotated[
    int | None, _flag("--accept-cap", metavar="N", help="Commit at most N drafts a step; with --mode cap-accept.")
]
Refine = Annotated[
    bool | None,
    _flag("--refine/--no-refine", help="Correct step costs and confidences by finished steps, while running."),
]
DraftTemperature = Annotated[
    str | None,
    _flag("--draft-temperature", metavar="NAME", help="What drafts are drawn at: target, or adaptive."),
]
Temperature = Annotated[
    float | None, _flag("--temperature", metavar="F", help="0 is greedy. Applied before the filters.")
]
TopP = Annotated[
    float | None, _flag("--top-p", metavar="F", help="Keep the likeliest tokens up to this probability; 0: one.")
]
TopK = Annotated[int | None, _flag("--top-k", metavar="N", help="Keep the N likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, _flag("--min-p", metavar="F", help="Drop tokens below this share of the likeliest one.")]
RepetitionPenalty = Annotated[
    float | None, _flag("--repetition-penalty", metavar="F", help="Above 1 discourages what was said.")
]
PresencePenalty = Annotated[
    float | None, _flag("--presence-penalty", metavar="F", help="Once per token that was output.")
]
FrequencyPenalty = Annotated[
    float | None, _flag("--frequency-penalty", metavar="F", help="For each time a token was output.")
]
LogitBias = Annotated[
    list[str] | None, _flag("--logit-bias", metavar="ID=F", help="Add F to the logit of a token; repeatable.")
]
MinTokens = Annotated[int | None, _flag("--min-tokens", metavar="N", help="No end before this many tokens.")]
MaxTokens = Annotated[int | None, _flag("--max-tokens", metavar="N", help="Stop after this many tokens.")]
Stop = Annotated[list[str] | None, _flag("--stop", metavar="STR", help="Stop before this text; repeatable.")]
IgnoreEos = Annotated[bool, _flag("--ignore-eos", help="Go on after an end token.")]
Seed = Annotated[int | None, _flag("--seed", metavar="N", help="Fix the draws; a fresh seed otherwise.")]
System = Annotated[str | None, _flag("--system", metavar="TEXT", help="System text.")]
Raw = Annotated[bool, _flag("--raw", help="The prompt is the exact text: no chat template.")]
Think = Annotated[bool | None, _flag("--think/--no-think", help="Thinking mode, where the model has one.")]
ReasoningEffort = Annotated[
    str | None,
    _flag("--reasoning-effort", metavar="LEVEL", help="How long to think: low, high, max, or what the model knows."),
]
Device = Annotated[str | None, _flag("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
Tp = Annotated[int | None, _flag("--tp", metavar="N", help="Devices that share the model (DeepSeek V4 alone).")]
Dtype = Annotated[str | None, _flag("--dtype", metavar="NAME", help="auto, float32 or bfloat16.")]
ContextLength = Annotated[int | None, _flag("--context", metavar="N", help="Tokens of context to make room for.")]
CacheTokens = Annotated[
    int | None, _flag("--cache-tokens", metavar="N", help="Most tokens that all requests have cached together.")
]
Graphs = Annotated[bool | None, _flag("--graphs/--no-graphs", help="CUDA graphs; a GPU is needed.")]
DummyWeights = Annotated[
    bool, _flag("--dummy-weights", help="Random weights in the model's shapes, nothing fetched: for timing.")
]
SimulateAcceptance = Annotated[
    str | None,
    _flag(
        "--simulate-acceptance",
        metavar="PROFILE",
        help="Accept drafts by chance: chat, code, math, a list of survivals, or a file. For timing.",
    ),
]
Offline = Annotated[bool, _flag("--offline", help="Ask nothing of the network.")]
Trace = Annotated[Path | None, _flag("--trace", metavar="FILE", help="Write every step to this file.")]
Force = Annotated[bool, _flag("--force", help="Overwrite an existing trace file.")]
Verbose = Annotated[bool, _flag("--verbose", help="Statistics on stderr.", variable="SPARKCHAT_VERBOSE")]
AsJson = Annotated[bool, _flag("--json", help="One JSON object on stdout.")]

PAIR: dict[str, tuple[Any, Any]] = {
    "profile": (ProfileName, None),
    "drafter": (Drafter, None),
    "block_size": (BlockSize, None),
    "device": (Device, None),
    "tp": (Tp, None),
    "dtype": (Dtype, None),
    "context": (ContextLength, None),
    "cache_tokens": (CacheTokens, None),
    "graphs": (Graphs, None),
    "offline": (Offline, False),
}
"""What is loaded, and where: annotation and default of each option."""
LAWS: dict[str, tuple[Any, Any]] = {
    "temperature": (Temperature, None),
    "top_p": (TopP, None),
    "top_k": (TopK, None),
    "min_p": (MinP, None),
    "repetition_penalty": (RepetitionPenalty, None),
    "presence_penalty": (PresencePenalty, None),
    "frequency_penalty": (FrequencyPenalty, None),
}
"""How tokens are drawn."""
ANSWERING: dict[str, tuple[Any, Any]] = {
    "mode": (Mode, None),
    "accept_cap": (AcceptCap, None),
    "draft_temperature": (DraftTemperature, None),
    "refine": (Refine, None),
    **LAWS,
    "logit_bias": (LogitBias, None),
    "min_tokens": (MinTokens, None),
    "max_tokens": (MaxTokens, None),
    "stop": (Stop, None),
    "ignore_eos": (IgnoreEos, False),
    "seed": (Seed, None),
    "system": (System, None),
    "raw": (Raw, False),
    "think": (Think, None),
    "reasoning_effort": (ReasoningEffort, None),
    **PAIR,
    "dummy_weights": (DummyWeights, False),
    "simulate_acceptance": (SimulateAcceptance, None),
    "trace": (Trace, None),
    "force": (Force, False),
    "verbose": (Verbose, False),
}
"""What ``run`` and ``batch`` share."""


def with_options(options: dict[str, tuple[Any, Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these options behind its own; it finds their values in ``ctx.params``."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]

        @functools.wraps(command)
        def called(**values: Any) -> Any:
            return command(**{name: value for name, value in values.items() if name in own.parameters})

        called.__signature__ = own.replace(parameters=[*own.parameters.values(), *shared])  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in [*own.parameters.values(), *shared]}
        return called

    return add
