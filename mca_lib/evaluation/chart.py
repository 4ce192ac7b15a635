"""Curves as one SVG: plain text, the same bytes for the same numbers, readable on a light and on a dark page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 28, 38
_COLOURS = ("#2a78c8", "#d9731a", "#3a9a4b")
"""Each has a contrast of 3 or more with white and with #16181d."""
_INK = "#808790"
_TICKS = 5


@dataclass(frozen=True)
class Series:
    """One curve. Points whose value is None (a loss that is not finite) interrupt it."""

    name: str
    points: Sequence[tuple[float, float | None]]


def line_chart(title: str, series: Sequence[Series], x_label: str = "step") -> str:
    """An `<svg>` with axes and a legend; "" where there is nothing to draw."""
    drawn = [each for each in series if any(y is not None for _, y in each.points)]
    if not drawn:
        return ""
    x_axis = _Axis.over([x for each in drawn for x, _ in each.points], _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis.over([y for each in drawn for _, y in each.points if y is not None], HEIGHT - _BOTTOM, _TOP)
    parts = [*_frame(x_axis, y_axis, x_label), _text(_LEFT, 16, title, "start", _INK)]
    for index, each in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        parts += _curve(each, x_axis, y_axis, colour)
        parts.append(_text(WIDTH - _RIGHT - 100 * (len(drawn) - 1 - index), 16, each.name, "end", colour))
    label = escape(f"{title}: {', '.join(each.name for each in drawn)}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}" font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>"
    )


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high` on pixels from `start` to `end`, with `step` between two marks."""

    low: float
    high: float
    step: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        if low == high:
            margin = abs(low) / 2 or 1.0
            low, high = low - margin, high + margin
        return cls(low, high, _round_step((high - low) / _TICKS), start, end)

    def __call__(self, value: float) -> str:
        """The pixel, to a tenth."""
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}"

    def marks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return [number * self.step for number in range(first, last + 1)]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, … that is no smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def _frame(x_axis: _Axis, y_axis: _Axis, x_label: str) -> list[str]:
    left, right, bottom = _LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value in y_axis.marks():
        y = y_axis(value)
        parts.append(f'<path d="M{left} {y}H{right}" stroke="{_INK}" stroke-opacity="0.3"/>')
        parts.append(_text(left - 6, float(y) + 4, _short(value), "end"))
    for value in x_axis.marks():
        parts.append(_text(float(x_axis(value)), bottom + 16, _short(value), "middle"))
    parts.append(f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="{_INK}"/>')
    parts.append(_text((left + right) / 2, HEIGHT - 4, x_label, "middle"))
    return parts


def _curve(series: Series, x_axis: _Axis, y_axis: _Axis, colour: str) -> list[str]:
    parts, run = [], []
    for x, y in [*series.points, (0.0, None)]:
        if y is not None:
            run.append(f"{x_axis(x)} {y_axis(y)}")
        elif len(run) == 1:
            cx, cy = run[0].split()
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="{colour}"/>')
            run = []
        elif run:
            parts.append(f'<path d="M{"L".join(run)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            run = []
    return parts


def _text(x: float, y: float, text: str, anchor: str, colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _short(value: float) -> str:
    """A mark's number: `0.25`, `12000`, `1e-05`."""
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.4g}"
