"""Total throughput against the speed of one user, a line for each arm, as SVG of our own making."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sparkchat.bench.png import FONTS

Point = tuple[float, float, int]
"""(tokens per second of one user, of all, requests together)"""

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 40, 60
COLORS = ("#444444", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def throughput_svg(lines: Mapping[str, Sequence[Point]], title: str) -> str:
    """Points of one arm are joined by growing concurrency and labelled with it; both axes begin at 0."""
    points = [point for line in lines.values() for point in line]
    most_x = _rounded_up(max((x for x, _, _ in points), default=1.0))
    most_y = _rounded_up(max((y for _, y, _ in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + x / most_x * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / most_y * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="{FONTS}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, anchor="middle", size=14),
    ]
    parts += _axes(most_x, most_y, at)
    for number, (name, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        ordered = [(*at(x, y), together) for x, y, together in sorted(line, key=lambda point: point[2])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y, together in ordered:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
            parts.append(_text(x + 5, y - 5, str(together), size=10, color=color))
        key = TOP + 14 + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{key - 9}" width="14" height="4" fill="{color}"/>')
        parts.append(_text(WIDTH - RIGHT + 36, key - 3, name))
    return "\n".join([*parts, "</svg>", ""])


def _axes(most_x: float, most_y: float, at) -> list[str]:  # type: ignore[no-untyped-def]
    parts = []
    for step in range(6):
        x, y = most_x * step / 5, most_y * step / 5
        (px, bottom), (left, py) = at(x, 0.0), at(0.0, y)
        right, top = at(most_x, 0.0)[0], at(0.0, most_y)[1]
        parts.append(f'<line x1="{px:.1f}" y1="{bottom:.1f}" x2="{px:.1f}" y2="{top:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<line x1="{left:.1f}" y1="{py:.1f}" x2="{right:.1f}" y2="{py:.1f}" stroke="#e5e5e5"/>')
        parts.append(_text(px, bottom + 18, _tick(x), anchor="middle"))
        parts.append(_text(left - 8, py + 4, _tick(y), anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "tokens per second of one user", anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="20" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 20 {middle:.1f})">'
        "tokens per second of all users</text>"
    )
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, color: str = "#222222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'
    )


def _tick(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _rounded_up(value: float) -> float:
    """The next number whose fifths are short."""
    scale = 1.0
    while scale * 10 < value:
        scale *= 10
    while scale > value:
        scale /= 10
    return next(scale * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if scale * factor >= value)
