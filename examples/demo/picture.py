"""A picture of loss curves as SVG, written by hand: no plotting library needed to look at a demo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Points = Sequence[tuple[int, float]]
_WIDTH, _HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 96, 50


@dataclass(frozen=True)
class Interruption:
    """Something done to the job at ``step``; training went on from ``resumed`` (None: it was not interrupted)."""

    step: int
    resumed: int | None
    label: str
    colour: str


@dataclass(frozen=True)
class Curve:
    """``width``: of the line, in pixels."""

    label: str
    colour: str
    width: float
    points: Points


@dataclass(frozen=True)
class _Frame:
    """From (step, loss) to pixels; the loss axis is logarithmic."""

    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / self.last

    def y(self, loss: float) -> float:
        share = (math.log10(max(loss, self.low)) - math.log10(self.low)) / (
            math.log10(self.high) - math.log10(self.low)
        )
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def draw(path: Path, title: str, curves: Sequence[Curve], marks: Sequence[Interruption]) -> None:
    """Write the picture: later curves lie on top of earlier ones."""
    points = [point for curve in curves for point in curve.points]
    positive = [loss for _, loss in points if loss > 0 and math.isfinite(loss)] or [1.0]
    low, high = 10 ** math.floor(math.log10(min(positive))), 10 ** math.ceil(math.log10(max(positive)))
    frame = _Frame(max(1, *(step for step, _ in points)), max(low, 1e-6), max(high, low * 10))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=16),
        *_axes(frame),
        *(_curve(frame, curve) for curve in curves),
        *(part for place, mark in enumerate(marks) for part in _mark(frame, mark, place)),
        *_legend(curves),
        "</svg>",
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {extra}/>'


def _axes(frame: _Frame) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [_line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "#222"), _line(_LEFT, _TOP, _LEFT, bottom, "#222")]
    for power in range(round(math.log10(frame.low)), round(math.log10(frame.high)) + 1):
        y = frame.y(10.0**power)
        parts += [
            _line(_LEFT, y, _WIDTH - _RIGHT, y, "#ddd"),
            _text(_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end"),
        ]
    for part in range(6):
        step = round(frame.last * part / 5)
        parts.append(_text(frame.x(step), bottom + 18, str(step), anchor="middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "step", anchor="middle"))
    return parts


def _curve(frame: _Frame, curve: Curve) -> str:
    # A value that is no number breaks the line instead of the picture.
    path, pen = [], "M"
    for step, loss in curve.points:
        if not math.isfinite(loss):
            pen = "M"
            continue
        path.append(f"{pen}{frame.x(step):.1f} {frame.y(loss):.1f}")
        pen = "L"
    stroke = f'stroke="{curve.colour}" stroke-width="{curve.width}" stroke-linejoin="round"'
    return f'<path d="{" ".join(path)}" fill="none" {stroke}/>'


def _legend(curves: Sequence[Curve]) -> list[str]:
    """At the left, above the axis: a loss falls, so that no curve is there."""
    top = _HEIGHT - _BOTTOM - 18 * (len(curves) + 1)
    height = 18 * (len(curves) + 1) - 4
    parts = [f'<rect x="{_LEFT + 4}" y="{top}" width="330" height="{height}" fill="white" opacity="0.9"/>']
    for place, curve in enumerate(curves):
        y = _HEIGHT - _BOTTOM - 18 * (len(curves) - place)
        parts.append(_line(_LEFT + 12, y, _LEFT + 42, y, curve.colour, f'stroke-width="{curve.width}"'))
        parts.append(_text(_LEFT + 50, y + 4, curve.label))
    return parts


def _mark(frame: _Frame, mark: Interruption, place: int) -> list[str]:
    """A dashed line at the step, a label in a row of its own, and a band over the steps that were done again."""
    x, y = frame.x(mark.step), 46 + 16 * place
    parts = []
    if mark.resumed is not None and mark.resumed < mark.step:
        start = frame.x(mark.resumed)
        parts.append(
            f'<rect x="{start:.1f}" y="{_TOP}" width="{x - start:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" '
            f'fill="{mark.colour}" opacity="0.15"/>'
        )
    anchor = "end" if x > _WIDTH * 0.6 else "start"
    parts.append(_line(x, y - 10, x, _HEIGHT - _BOTTOM, mark.colour, 'stroke-dasharray="4 3"'))
    parts.append(_text(x + (-6 if anchor == "end" else 6), y, mark.label, anchor=anchor, colour=mark.colour))
    return parts
