"""`draw_scatter`: measured against predicted on logarithmic axes as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
Colour = tuple[int, int, int]
_WIDTH, _HEIGHT, _SCALE = 860, 640, 2  # drawn twice as large and shrunk: smooth edges
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 190, 60, 60
_INK, _GRID, _PAPER, _BAND = (40, 44, 52), (228, 231, 236), (255, 255, 255), (238, 243, 249)
_COLOURS: tuple[Colour, ...] = (
    (31, 105, 184), (214, 93, 14), (46, 139, 87), (176, 58, 46), (125, 82, 160), (120, 85, 72),
    (209, 99, 165), (110, 120, 130), (150, 150, 30), (20, 150, 170),
)  # fmt: skip
BAND = 0.25
"""The shaded band: errors up to this."""


def draw_scatter(path: Path, title: str, unit: str, groups: Mapping[str, Sequence[Point]]) -> None:
    """Points are (measured, predicted), coloured by group, the largest first; a band shows errors up to `BAND`."""
    points = [point for group in groups.values() for point in group]
    low = math.floor(math.log10(min(min(point) for point in points))) if points else 0
    high = math.ceil(math.log10(max(max(point) for point in points))) if points else 1
    frame = _Frame(low, max(high, low + 1))
    image = Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), _PAPER)
    draw = ImageDraw.Draw(image)
    _axes(draw, frame, title, unit)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    for i, (_, group) in enumerate(ordered):
        for point in group:
            x, y = frame.at(point)
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=_COLOURS[min(i, len(_COLOURS) - 1)])
    for i, (name, group) in enumerate(ordered[: len(_COLOURS)]):
        y = (_TOP + 12 + 22 * i) * _SCALE
        x = (_WIDTH - _RIGHT + 16) * _SCALE
        draw.ellipse([x - 8, y - 8, x + 8, y + 8], fill=_COLOURS[i])
        last = i == len(_COLOURS) - 1 and len(ordered) > len(_COLOURS)
        rest = sum(len(other) for _, other in ordered[i:])
        text = f"others ({rest})" if last else f"{name} ({len(group)})"
        draw.text((x + 16 * _SCALE, y), text, font=_font(13), fill=_INK, anchor="lm")
    small = image.resize((_WIDTH, _HEIGHT), Image.Resampling.LANCZOS)
    small.quantize(256, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


class _Frame:
    """From data to pixels, both axes alike."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def at(self, point: Point) -> Point:
        share = [(math.log10(value) - self.low) / (self.high - self.low) for value in point]
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * share[0]
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share[1])
        return x * _SCALE, y * _SCALE


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * _SCALE)


def _axes(draw: ImageDraw.ImageDraw, frame: _Frame, title: str, unit: str) -> None:
    small, low, high = _font(13), 10.0**frame.low, 10.0**frame.high
    up, down = 1 + BAND, 1 - BAND
    corners = [frame.at((low, low)), frame.at((low, low * up)), frame.at((high / up, high)), frame.at((high, high))]
    corners += [frame.at((high, high * down)), frame.at((low / down, low))]
    draw.polygon(corners, fill=_BAND)
    for power in range(frame.low, frame.high + 1):
        value = 10.0**power
        (left, y), (right, _) = frame.at((low, value)), frame.at((high, value))
        draw.line([left, y, right, y], fill=_GRID, width=_SCALE)
        draw.text((left - 8 * _SCALE, y), f"{value:g}", font=small, fill=_INK, anchor="rm")
        (x, bottom), (_, top) = frame.at((value, low)), frame.at((value, high))
        draw.line([x, bottom, x, top], fill=_GRID, width=_SCALE)
        draw.text((x, bottom + 8 * _SCALE), f"{value:g}", font=small, fill=_INK, anchor="ma")
    draw.line([frame.at((low, low)), frame.at((high, high))], fill=_INK, width=_SCALE)
    draw.text((16 * _SCALE, 14 * _SCALE), title, font=_font(17), fill=_INK, anchor="la")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2 * _SCALE
    draw.text((middle, (_HEIGHT - 12) * _SCALE), f"measured, {unit}", font=small, fill=_INK, anchor="ms")
    draw.text((16 * _SCALE, (_TOP - 8) * _SCALE), f"predicted, {unit}", font=small, fill=_INK, anchor="ls")
