"""Small measured facts kept between runs: one private JSON file per key, replaced atomically, never trusted.

A file that cannot be used is reported and ignored, because it can be measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkchat.errors import SparkchatError
from sparkchat.private_file import write_private


def measurement_key(*, model: str, drafter: str | None, device: str, versions: Mapping[str, str]) -> str:
    """A file-name-safe hash of everything a measurement depends on."""
    facts = {"model": model, "drafter": drafter, "device": device, "versions": dict(versions)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def files_identity(path: str) -> str:
    """Name, size and time of the weight files at ``path``: a changed file is measured again."""
    root = Path(path)
    files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
    return " ".join(f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` so that readers see the old file or the whole new one, readable by the owner only (0600).

    Raises SparkchatError when the folder or the file cannot be written.
    """
    text = json.dumps(content, allow_nan=False, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, text)
    except OSError as error:
        raise SparkchatError(f"{path} cannot be written: {error.strerror or error}; check the cache folder") from error


def read_json(path: Path, schema: str) -> tuple[dict[str, Any] | None, str | None]:
    """(content, notice): what ``path`` holds if it has this schema; no file is (None, None), a bad one (None, why)."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror or error}), so it is not used"
    except (ValueError, RecursionError):
        return None, f"{path} is damaged, so it is not used; it is replaced by the next measurement"
    if not isinstance(content, dict) or content.get("schema") != schema:
        return None, f"{path} is not a {schema} file, so it is not used; it is replaced by the next measurement"
    return content, None
