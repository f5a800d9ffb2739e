"""Every folder and file that sparkchat reads or writes, by the XDG rules."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Paths:
    """Folders of one user; nothing here is created by looking at it."""

    config: Path
    profiles: Path
    """The user's own profiles, ``NAME.toml``; they win over shipped ones of the same name."""
    data: Path
    sessions: Path
    traces: Path
    state: Path
    history: Path
    """A file: past prompts of the TUI and the line REPL."""
    logs: Path
    cache: Path
    models: Path
    """Fetched model files, checked and complete; unfinished downloads lie under ``.parts`` in it."""
    cost_tables: Path
    temperatures: Path
    """Confidence temperatures fitted by ``sparkchat tune``."""
    cpu_kernels: Path
    """Code that was compiled for this processor, a folder for each version."""
    hub_cache: Path
    """The Hugging Face cache, shared with every other program that uses it."""
    shipped_profiles: Path
    shipped_drafters: Path
    shipped_shapes: Path
    """``NAME/config.json`` and ``NAME/drafter/config.json`` of profiles that run with dummy weights."""

    def to_json(self) -> dict[str, str]:
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}


def typed_path(text: str) -> Path:
    """A path as a user writes it. ``~`` of somebody who is not here is a name like any other, as in a shell."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises there


def user_paths() -> Paths:
    """Read the environment (XDG_*, HF_HOME, HF_HUB_CACHE) and name every folder."""

    def folder(name: str) -> Path:
        return Path(getattr(platformdirs, f"user_{name}_dir")("sparkchat", appauthor=False))

    config, data, state, cache = (folder(name) for name in ("config", "data", "state", "cache"))
    return Paths(
        config=config,
        profiles=config / "profiles",
        data=data,
        sessions=data / "sessions",
        traces=data / "traces",
        state=state,
        history=state / "history",
        logs=state / "logs",
        cache=cache,
        models=cache / "models",
        cost_tables=cache / "cost_tables",
        temperatures=cache / "temperatures",
        cpu_kernels=cache / "cpu_kernels",
        hub_cache=_hub_cache(),
        shipped_profiles=_shipped_profiles(),
        shipped_drafters=_PACKAGE / "drafters",
        shipped_shapes=_PACKAGE / "shapes",
    )


def _hub_cache() -> Path:
    """Hugging Face's own rule, kept in step with it by a test, so that listing needs no import of the library."""
    cache_root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache_root, "huggingface")
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return typed_path(os.path.expandvars(chosen))


def _shipped_profiles() -> Path:
    installed = _PACKAGE / "profiles"
    # In a source tree the profiles lie beside the package; the wheel carries them inside it.
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"
