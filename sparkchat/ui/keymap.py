"""The user's own keys: ``keymap.toml`` in the config folder, one ``"action.id" = "key,key"`` a line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from sparkchat.options import unknown

MOST_BYTES = 32 << 10
"""Ten times a file that names every action. A key of many dots takes a reader of TOML time by their square."""


def load_keymap(path: Path, known: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(action id -> keys, sentences about what could not be used). A missing file is an empty keymap."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return {}, [f"{path} is not used: it is longer than {MOST_BYTES >> 10} KB; give one line for each action"]
        pairs = list(_flat(tomllib.loads(path.read_text("utf-8-sig"))))
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path} is not used: {error}"]
    names = sorted(known)
    keymap: dict[str, str] = {}
    problems: list[str] = []
    for name, keys in pairs:
        if name not in names:
            problems.append(f"{path}: {unknown('action', name, names)}")
        elif not isinstance(keys, str) or not keys.strip():
            problems.append(f'{path}: {name} is {keys!r}; give keys as text, e.g. "ctrl+o,f7"')
        else:
            keymap[name] = ",".join(key.strip() for key in keys.split(","))
    return keymap, problems


def lost_keys(keymap: dict[str, str], defaults: dict[str, str]) -> dict[str, str]:
    """Action id -> the keys that are left to it, for actions whose own keys the user gave to another one."""
    taken = {key for keys in keymap.values() for key in keys.split(",")}
    left: dict[str, str] = {}
    for name, keys in defaults.items():
        if name not in keymap and taken & set(keys.split(",")):
            left[name] = ",".join(key for key in keys.split(",") if key not in taken)
    return left


def _flat(data: dict[str, object], prefix: str = "") -> Iterable[tuple[str, object]]:
    """``mode.cycle = "f7"`` is a nested table to TOML; the quoted spelling is not."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
