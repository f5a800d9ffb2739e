"""SVG: all plots on one sheet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparkchat.trace.export import plot
from sparkchat.trace.export.figures import Figures
from sparkchat.trace.reader import Damage, read_lines

COLUMNS = 2


def write_svg(trace: Path, write: Callable[[str], object], damage: Damage) -> list[str]:
    figures = Figures()
    for line in read_lines(trace, damage):
        figures.add(line)
    bodies = figures.plots()
    rows = -(-len(bodies) // COLUMNS)
    placed = [
        f'<g transform="translate({number % COLUMNS * plot.WIDTH} {number // COLUMNS * plot.HEIGHT})">{body}</g>'
        for number, body in enumerate(bodies)
    ]
    write(plot.svg("".join(placed), COLUMNS * plot.WIDTH, rows * plot.HEIGHT) + "\n")
    return []
