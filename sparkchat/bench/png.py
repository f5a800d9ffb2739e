"""An SVG as PNG, by whichever converter is installed: none of them is worth a dependency of ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CONVERTERS: dict[str, tuple[str, ...]] = {
    "rsvg-convert": ("{svg}", "-o", "{png}"),
    "resvg": ("{svg}", "{png}"),
    "inkscape": ("{svg}", "--export-type=png", "--export-filename={png}"),
    "magick": ("{svg}", "{png}"),
    "cairosvg": ("{svg}", "-o", "{png}"),
}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_png(svg: Path, png: Path, seconds: float = 60.0) -> str | None:
    """Convert ``svg`` to ``png`` (0600), each converter given so long; returns why there is no PNG, or None when there
    is one."""
    tried = []
    for program, arguments in CONVERTERS.items():
        found = shutil.which(program)
        if found is None:
            continue
        tried.append(program)
        command = [found, *(part.format(svg=svg, png=png) for part in arguments)]
        try:
            subprocess.run(command, capture_output=True, timeout=seconds, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        if png.is_file() and png.read_bytes()[:8] == _SIGNATURE:
            png.chmod(0o600)
            return None
    if tried:
        return f"no PNG: {', '.join(tried)} could not read the SVG"
    return f"no PNG: none of {', '.join(CONVERTERS)} is installed; the SVG shows the same"
