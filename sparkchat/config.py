"""What one command works with, once every option has been resolved: frozen, and never written to afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from sparkchat.params import LoadSpec, SamplingParams

Output = Literal["text", "json", "jsonl"]
Color = Literal["auto", "always", "never"]

FIXED = ("flag", "environment")
"""How the source of a value begins that a session command does not win over."""


@dataclass(frozen=True)
class RunConfig:
    """The resolved options of ``sparkchat run``, handed to a front end (TUI, line REPL or one-shot)."""

    spec: LoadSpec
    """Model, drafter, device, mode: what the engine process loads. Every path is local."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Defaults for every answer of the session."""
    system: str | None = None
    """System text; None sends none."""
    think: bool | None = None
    """None leaves the choice to the model's template."""
    reasoning_effort: str | None = None
    """How long to think, in a word that the model knows."""
    raw: bool = False
    """The prompt is the exact text: no chat template."""
    prompt_ids: tuple[int, ...] | None = None
    """Exact token ids instead of a text (one-shot only)."""
    resume: str | None = None
    """The kept chat to go on with: ``last``, its number in the list, or its id; None starts a new one."""
    trace_path: Path | None = None
    trace_force: bool = False
    """An existing trace file may be overwritten."""
    output: Output = "text"
    verbose: bool = False
    color: Color = "auto"
    ascii: bool = False
    """Draw with ASCII characters only."""
    label: str = ""
    """One line that names the model to the user, e.g. 'SmolLM2-135M-Instruct: a small model, expect mistakes'."""
    reason_off: str | None = None
    """Why no drafter is used, in plain words, when that was decided before the engine started."""
    notices: tuple[str, ...] = ()
    """Plain sentences to show once at the start (e.g. which source was taken and why)."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Option name (underscores) -> where its value came from, e.g. 'flag --temperature' or 'shipped profile'."""
    argv: tuple[str, ...] = ()
    """The command line as typed, for the header of a trace."""
    debug: bool = False
    """Errors may show a traceback."""

    def fixed_by(self, name: str) -> str | None:
        """The flag or variable that set this option, and so wins over a session command; None when none did."""
        source = self.sources.get(name, "")
        return source if source.startswith(FIXED) else None
