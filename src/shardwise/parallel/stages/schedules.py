"""Two pictures of a pipeline schedule's timeline: text for a terminal, and a PNG."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.text import Text

from shardwise.plan.time_terms.simulate import Timeline

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def picture(timeline: Timeline, width: int = 4) -> list[Text]:
    """One line of coloured text per rank: letters are work, numbers are micro-batches, dots are waiting.

    Args:
        timeline: from `simulate`.
        width: characters per unit of time.

    >>> from shardwise.plan.schedule import actions
    >>> from shardwise.plan.time_terms.simulate import simulate
    >>> print(picture(simulate(actions("gpipe", 2, 1, 1)), width=3)[0].plain)
    rank 0  F0 .........B0
    """
    digits = len(str(len(timeline.ranks) - 1))
    num_ranks = len(timeline.ranks)
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        line = Text(f"rank {rank:>{digits}}  ", no_wrap=True)
        end = 0
        for action, start, stop in spans:
            column, stop_column = round(start * width), round(stop * width)
            line.append("." * (column - end), style="dim")
            label = f"{action.work}{action.micro_batch}".ljust(stop_column - column)[: stop_column - column]
            style = "reverse " if action.stage >= num_ranks else ""
            line.append(label, style=f"{style}bold {COLOURS[action.work]}")
            end = stop_column
        line.append("." * (round(timeline.total * width) - end), style="dim")
        line.rstrip()
        lines.append(line)
    return lines


def save_png(timeline: Timeline, path: Path | str, title: str = "") -> None:
    """Draw a timeline: one row per rank, colours for kinds of work, paler for later stages of a rank.

    Raises:
        OSError: the file cannot be written.
    """
    unit = max(24.0, min(44.0, 1800 / timeline.total))
    left, top, row = 84, 74, 44
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    num_ranks = len(timeline.ranks)
    size = (int(left + timeline.total * unit) + 24, top + row * num_ranks + 66)
    image = Image.new("RGB", (max(size[0], 640), size[1]), "white")
    draw = ImageDraw.Draw(image)
    draw.text((16, 16), title, fill="#222222", font=font)
    draw.text((16, 40), f"bubble {100 * timeline.bubble:.1f} %", fill="#b22222", font=font)
    for rank, spans in enumerate(timeline.ranks):
        y = top + row * rank
        draw.text((16, y + 10), f"rank {rank}", fill="#222222", font=font)
        draw.rectangle((left, y + 4, left + timeline.total * unit, y + row - 5), fill="#eeeeee")
        for action, start, end in spans:
            box = (left + start * unit, y + 4, left + end * unit - 1, y + row - 5)
            draw.rectangle(box, fill=_shade(COLOURS[action.work], action.stage // num_ranks), outline="white")
            centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            draw.text(centre, str(action.micro_batch), fill="#111111", font=small, anchor="mm")
    x, y = left, top + row * num_ranks + 22
    for work in sorted({span.action.work for spans in timeline.ranks for span in spans}, key="FBIW".index):
        draw.rectangle((x, y, x + 18, y + 18), fill=COLOURS[work])
        draw.text((x + 26, y + 1), NAMES[work], fill="#222222", font=font)
        x += 44 + int(draw.textlength(NAMES[work], font=font))
    if any(span.action.stage >= num_ranks for spans in timeline.ranks for span in spans):
        draw.text((x, y + 1), "paler: a rank's later stage", fill="#222222", font=font)
    image.save(path)


def _shade(colour: str, turn: int) -> tuple[int, int, int]:
    """A colour, paler for each further stage on the same rank."""
    strength = max(0.4, 1 - 0.3 * turn)
    red, green, blue = (round(255 - (255 - int(colour[i : i + 2], 16)) * strength) for i in (1, 3, 5))
    return red, green, blue
