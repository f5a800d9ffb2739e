"""Plots as SVG, with text, axes and a legend. Series differ in their dashes or their filling, not in colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sparkchat.trace.export.words import one_line

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 46, 44
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DASHES = ("", "6 3", "2 2", "8 3 2 3")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    name: str
    points: Points
    """(x, y) in order of x."""
    sizes: Sequence[float] = ()
    """Of the marks, from 0 to 1, where the series is drawn as marks."""


@dataclass(frozen=True)
class Bars:
    name: str
    values: Sequence[float | None]
    """One for each category; None draws nothing."""


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float

    def place(self, value: float, begin: float, end: float) -> float:
        span = self.high - self.low or 1.0
        return begin + (min(max(value, self.low), self.high) - self.low) / span * (end - begin)


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    drawn = [each for each in map(_finite, series) if each.points]
    xs = [x for each in drawn for x, _ in each.points]
    ys = [y for each in drawn for _, y in each.points]
    if not drawn:
        return _empty(title)
    x_axis = Axis(x_label, min(xs), max(xs))
    y_axis = _from_zero(y_label, max(ys))
    body = []
    for number, each in enumerate(drawn):
        path = " ".join(f"{_x(x_axis, x)},{_y(y_axis, y)}" for x, y in each.points)
        style = f'stroke="{_COLORS[number % 4]}" stroke-dasharray="{_DASHES[number % 4]}"'
        if len(each.points) == 1:
            body.append(_mark(x_axis, y_axis, each.points[0], 3.0, number))
        body.append(f'<polyline fill="none" stroke-width="1.6" {style} points="{path}"/>')
    return _frame(title, x_axis, y_axis, "".join(body), [each.name for each in drawn], _number_ticks(x_axis))


def mark_plot(title: str, x_label: str, y_label: str, series: Series) -> str:
    """Marks over the unit square, with its diagonal."""
    if not series.points:
        return _empty(title)
    x_axis, y_axis = Axis(x_label, 0.0, 1.0), Axis(y_label, 0.0, 1.0)
    body = [
        f'<line x1="{_x(x_axis, 0)}" y1="{_y(y_axis, 0)}" x2="{_x(x_axis, 1)}" y2="{_y(y_axis, 1)}" '
        'stroke="#888" stroke-dasharray="4 3"/>'
    ]
    for point, size in zip(series.points, series.sizes or [0.3] * len(series.points), strict=True):
        body.append(_mark(x_axis, y_axis, point, 2.0 + 8.0 * math.sqrt(size), 0))
    return _frame(title, x_axis, y_axis, "".join(body), [series.name, "exact"], _number_ticks(x_axis), is_marked=True)


def bar_plot(
    title: str, x_label: str, y_label: str, categories: Sequence[str], groups: Sequence[Bars], high: float | None = None
) -> str:
    """Bars side by side; ``high`` is the top of the axis, or found from the values."""
    values = [value for group in groups for value in group.values if value is not None]
    if not values or not categories:
        return _empty(title)
    x_axis = Axis(x_label, 0.0, float(len(categories)))
    y_axis = _from_zero(y_label, max(values)) if high is None else Axis(y_label, 0.0, high)
    width, body = 0.8 / len(groups), []
    for number, group in enumerate(groups):
        for index, value in enumerate(group.values):
            if not value:
                continue
            left = _x(x_axis, index + 0.1 + number * width)
            right = _x(x_axis, index + 0.1 + (number + 1) * width)
            top, bottom = _y(y_axis, value), _y(y_axis, 0.0)
            style = f'fill="{_COLORS[number % 4]}"' + (' fill-opacity="0.45" stroke="#444"' if number else "")
            tip = _text(f"{categories[index]}: {group.name} {value:.4g}")
            size = f'width="{_n(right - left)}" height="{_n(bottom - top)}"'
            body.append(f'<rect x="{left}" y="{top}" {size} {style}><title>{tip}</title></rect>')
    every = max(1, math.ceil(len(categories) / 16))
    ticks = [(index + 0.5, name) for index, name in enumerate(categories) if index % every == 0]
    return _frame(title, x_axis, y_axis, "".join(body), [group.name for group in groups], ticks, is_bars=True)


def svg(body: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """A drawing that stands alone, also outside a page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img">{body}</svg>'
    )


def _frame(
    title: str,
    x_axis: Axis,
    y_axis: Axis,
    body: str,
    names: Sequence[str],
    x_ticks: Sequence[tuple[float, str]],
    *,
    is_bars: bool = False,
    is_marked: bool = False,
) -> str:
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', f"<title>{_text(title)}</title>"]
    parts.append(f'<text x="{_LEFT}" y="16" font-size="13" font-weight="bold" fill="#111">{_text(title)}</text>')
    for value, label in _number_ticks(y_axis):
        y = _y(y_axis, value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{_n(y + 4)}" text-anchor="end" fill="#333">{_text(label)}</text>')
    for value, label in x_ticks:
        x = _x(x_axis, value)
        parts.append(
            f'<text x="{x}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle" fill="#333">{_text(label)}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" fill="#333">{_text(x_axis.label)}</text>')
    across = HEIGHT / 2
    parts.append(
        f'<text x="14" y="{across}" text-anchor="middle" fill="#333" transform="rotate(-90 14 {across})">'
        f"{_text(y_axis.label)}</text>"
    )
    parts.append(body)
    bottom = HEIGHT - _BOTTOM
    parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#333"/>')
    parts.append(_legend(names, is_bars=is_bars, is_marked=is_marked))
    return "".join(parts)


def _legend(names: Sequence[str], *, is_bars: bool, is_marked: bool) -> str:
    parts, x = [], float(_LEFT)
    for number, name in enumerate(names):
        color = _COLORS[number % 4]
        if is_bars:
            opacity = ' fill-opacity="0.45" stroke="#444"' if number else ""
            parts.append(f'<rect x="{_n(x)}" y="24" width="12" height="9" fill="{color}"{opacity}/>')
        elif is_marked and number == 0:
            parts.append(f'<circle cx="{_n(x + 6)}" cy="28" r="4" fill="{color}" fill-opacity="0.6"/>')
        else:
            dash = "4 3" if is_marked else _DASHES[number % 4]
            stroke = "#888" if is_marked else color
            parts.append(
                f'<line x1="{_n(x)}" x2="{_n(x + 14)}" y1="28" y2="28" stroke="{stroke}" stroke-width="2" '
                f'stroke-dasharray="{dash}"/>'
            )
        parts.append(f'<text x="{_n(x + 18)}" y="32" fill="#333">{_text(name)}</text>')
        x += 34 + 6.2 * len(name)
    return "".join(parts)


def _finite(series: Series) -> Series:
    return Series(series.name, [(x, y) for x, y in series.points if math.isfinite(y)])


def _empty(title: str) -> str:
    return (
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/><title>{_text(title)}</title>'
        f'<text x="{_LEFT}" y="16" font-size="13" font-weight="bold" fill="#111">{_text(title)}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="#666">not measured</text>'
    )


def _mark(x_axis: Axis, y_axis: Axis, point: tuple[float, float], radius: float, number: int) -> str:
    x, y = point
    return (
        f'<circle cx="{_x(x_axis, x)}" cy="{_y(y_axis, y)}" r="{_n(radius)}" fill="{_COLORS[number % 4]}" '
        f'fill-opacity="0.6"><title>{x:.3g}, {y:.3g}</title></circle>'
    )


def _x(axis: Axis, value: float) -> float:
    return _n(axis.place(value, _LEFT, WIDTH - _RIGHT))


def _y(axis: Axis, value: float) -> float:
    return _n(axis.place(value, HEIGHT - _BOTTOM, _TOP))


def _n(value: float) -> float:
    return round(value, 2)


def _text(text: str) -> str:
    return escape(one_line(text))


def _from_zero(label: str, most: float) -> Axis:
    """An axis from 0 that ends at a tick."""
    if not most > 0 or not math.isfinite(most):
        return Axis(label, 0.0, 1.0)
    step = _tick_step(most)
    return Axis(label, 0.0, step * math.ceil(most / step - 1e-9))


def _tick_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that about five ticks lie in the span."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= span / 5.001), 10.0 * power)


def _number_ticks(axis: Axis) -> list[tuple[float, str]]:
    span = axis.high - axis.low
    if not span > 0:
        return [(axis.low, f"{axis.low:.4g}")]
    step = _tick_step(span)
    first = math.ceil(axis.low / step - 1e-9)
    return [(n * step, f"{n * step:.4g}") for n in range(first, first + 12) if n * step <= axis.high * (1 + 1e-9)]
