"""Terms as bars and their legends in a terminal: a name has one colour in all bars that one legend explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle

from rich.text import Text

COLOURS = (
    *("blue", "cyan", "green", "yellow", "magenta", "red"),
    *("bright_blue", "bright_green", "bright_magenta", "white"),
    *("bright_cyan", "bright_yellow", "bright_red", "bright_black"),
)
BAR = 48


def colours_of(several: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """A colour for each name of some terms, in the order in which names first stand there.

    >>> colours_of([{"weights": 1.0}, {"weights": 1.0, "logits": 2.0}])
    {'weights': 'blue', 'logits': 'cyan'}
    """
    names = dict.fromkeys(name for terms in several for name in terms)
    return dict(zip(names, cycle(COLOURS), strict=False))


def bar(terms: Mapping[str, float], limit: float, colours: Mapping[str, str], width: int = BAR) -> Text:
    """Terms side by side, to the scale of the limit; a bar that goes beyond it is cut with `>`."""
    text = Text()
    used = 0
    total = 0.0
    for name, value in terms.items():
        total += value
        cells = min(width, round(total / limit * width)) - used
        text.append("█" * cells, style=colours[name])
        used += cells
    text.append("·" * (width - used), style="dim")
    return text.append(">" if total > limit else "|")


def legend(terms: Mapping[str, float], spell: Callable[[float], str], colours: Mapping[str, str], width: int) -> Text:
    """Names and values of the terms in their colours, the largest first, in lines of so many letters at most."""
    text, at = Text(), 0
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        words = f"{name} {spell(value)}   "
        if at and at + 2 + len(words.rstrip()) > width:  # a square, its name and its value stay on one line
            text.append("\n")
            at = 0
        text.append("█ ", style=colours[name])
        text.append(words)
        at += 2 + len(words)
    return text
