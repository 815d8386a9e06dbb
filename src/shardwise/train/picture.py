"""`draw_loss`: the loss curves of a run as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
_WIDTH, _HEIGHT, _SCALE = 960, 560, 2  # drawn twice as large and shrunk: smooth lines
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 72, 60
_INK, _GRID, _PAPER = (40, 44, 52), (228, 231, 236), (255, 255, 255)
_FAINT, _TRAIN, _EVAL, _LEVEL = (178, 205, 236), (31, 105, 184), (214, 93, 14), (120, 126, 138)
Colour = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What to draw: points are (step, nats per token)."""

    title: str
    train: Sequence[Point]
    evaluation: Sequence[Point] = ()
    level: float | None = None
    """A horizontal line: the unigram entropy."""
    level_name: str = "unigram entropy"


@dataclass(frozen=True)
class _Frame:
    """From data to pixels."""

    steps: float
    low: float
    high: float

    def at(self, point: Point) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * point[0] / self.steps
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self.high - point[1]) / (self.high - self.low)
        return x * _SCALE, y * _SCALE


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that cover a range, about `count` of them.

    >>> ticks(0.0, 10.0)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    raw = max(high - low, 1e-9) / max(count - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def smooth(points: Sequence[Point], share: float = 0.04) -> list[Point]:
    """Mean over a centred window of a share of the points.

    It grows evenly at the start, where the loss falls fast, and keeps its left half at the end.

    >>> smooth([(1, 1.0), (2, 4.0), (3, 1.0)], share=1.0)
    [(1, 1.0), (2, 2.0), (3, 2.0)]
    """
    half = max(1, round(len(points) * share / 2))
    out = []
    for i, (step, _) in enumerate(points):
        reach = min(half, i)
        window = points[i - reach : i + reach + 1]
        out.append((step, sum(value for _, value in window) / len(window)))
    return out


def draw_loss(curves: Curves, path: Path) -> None:
    """Write the picture: every step's loss faint, its average strong, evaluations as dots, the level dashed.

    Values that are not finite are left out. Cost: some 50 ms.

    Example:
        >>> draw_loss(Curves(title="run", train=[(1, 5.5), (2, 4.0)]), Path("loss.png"))  # doctest: +SKIP
    """
    train = [p for p in curves.train if math.isfinite(p[1])]
    evaluation = [p for p in curves.evaluation if math.isfinite(p[1])]
    values = [v for _, v in (*train, *evaluation)] + ([curves.level] if curves.level is not None else [])
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.5
    frame = _Frame(
        max([s for s, _ in (*train, *evaluation)], default=1.0) or 1.0, max(0.0, low - margin), high + margin
    )
    image = Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), _PAPER)
    draw = ImageDraw.Draw(image)
    _axes(draw, frame, curves.title)
    _line(draw, frame, train, _FAINT, 1)
    if curves.level is not None:
        _dashed(draw, frame, curves.level)
    _line(draw, frame, smooth(train), _TRAIN, 2.5)
    _line(draw, frame, evaluation, _EVAL, 2)
    for point in evaluation:
        x, y = frame.at(point)
        draw.ellipse([x - 7, y - 7, x + 7, y + 7], fill=_EVAL, outline=_PAPER, width=2)
    _legend(draw, curves, bool(evaluation))
    image.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS).save(path, format="PNG", optimize=True)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _SCALE)


def _axes(draw: ImageDraw.ImageDraw, frame: _Frame, title: str) -> None:
    small = _font(13)
    for value in ticks(frame.low, frame.high):
        left, y = frame.at((0, value))
        draw.line([left, y, (_WIDTH - _RIGHT) * _SCALE, y], fill=_GRID, width=_SCALE)
        draw.text((left - 10 * _SCALE, y), f"{value:g}", font=small, fill=_INK, anchor="rm")
    for step in ticks(0, frame.steps, 8):
        x, bottom = frame.at((step, frame.low))
        draw.line([x, bottom, x, bottom + 5 * _SCALE], fill=_INK, width=_SCALE)
        draw.text((x, bottom + 9 * _SCALE), f"{step:g}", font=small, fill=_INK, anchor="ma")
    corner, end = frame.at((0, frame.low)), frame.at((frame.steps, frame.low))
    draw.line([frame.at((0, frame.high)), corner, end], fill=_INK, width=int(1.5 * _SCALE))
    draw.text((16 * _SCALE, 14 * _SCALE), title, font=_font(17), fill=_INK, anchor="la")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2 * _SCALE
    draw.text((middle, (_HEIGHT - 14) * _SCALE), "step", font=small, fill=_INK, anchor="ms")
    draw.text((16 * _SCALE, (_TOP - 12) * _SCALE), "nats per token", font=small, fill=_INK, anchor="ls")


def _line(draw: ImageDraw.ImageDraw, frame: _Frame, points: Sequence[Point], colour: Colour, width: float) -> None:
    if len(points) > 1:
        draw.line([frame.at(p) for p in points], fill=colour, width=round(width * _SCALE), joint="curve")


def _dashed(draw: ImageDraw.ImageDraw, frame: _Frame, level: float) -> None:
    left, y = frame.at((0, level))
    right = (_WIDTH - _RIGHT) * _SCALE
    x = left
    while x < right:
        draw.line([x, y, min(x + 10 * _SCALE, right), y], fill=_LEVEL, width=int(1.5 * _SCALE))
        x += 18 * _SCALE


def _legend(draw: ImageDraw.ImageDraw, curves: Curves, has_evaluation: bool) -> None:
    rows: list[tuple[str, Colour]] = [("training, averaged", _TRAIN)]
    if has_evaluation:
        rows.append((f"held out: {curves.evaluation[-1][1]:.3f}", _EVAL))
    if curves.level is not None:
        rows.append((f"{curves.level_name}: {curves.level:.3f}", _LEVEL))
    font = _font(13)
    widest = max(draw.textlength(text, font=font) for text, _ in rows)
    right = (_WIDTH - _RIGHT - 10) * _SCALE
    left = right - widest - 52 * _SCALE
    top = (_TOP + 8) * _SCALE
    draw.rectangle([left, top, right, top + (len(rows) * 22 + 10) * _SCALE], fill=_PAPER, outline=_GRID, width=_SCALE)
    for i, (text, colour) in enumerate(rows):
        y = top + (16 + 22 * i) * _SCALE
        draw.line([left + 10 * _SCALE, y, left + 32 * _SCALE, y], fill=colour, width=int(2.5 * _SCALE))
        draw.text((left + 42 * _SCALE, y), text, font=font, fill=_INK, anchor="lm")
