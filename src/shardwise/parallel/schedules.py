"""Pipeline schedules as data: torch's own order of work, when each piece runs, and two pictures of it.

Nothing here needs a process group. The bubble is the share of rank-time in which nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont
from rich.text import Text

from shardwise.errors import PlanError
from shardwise.parallel.torch_private import schedule_order
from shardwise.plan.plan import V_SHAPED, Plan

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


class Action(NamedTuple):
    """One piece of work of a rank: `F`, `B` (whole backward), `I` (to the inputs) or `W` (to the weights)."""

    work: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


ActionTable = list[list[Action]]
"""Per rank, its actions in the order in which it runs them."""


class Span(NamedTuple):
    """An action with its time, in units of one stage's forward."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every action runs, and what is lost to waiting."""

    ranks: tuple[tuple[Span, ...], ...]
    total: float
    """Time of a step's pipeline, in units of one stage's forward."""
    bubble: float
    """Share of rank-time that is idle, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of one stage's work; the unit is free."""

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, action: Action) -> float:
        """Time of one action."""
        return {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}[action.work]


def stages_of(kind: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages on a rank, ascending: `rank, rank + pp, ...` in a loop, `rank` and `2 pp - 1 - rank` in a V.

    >>> stages_of("zero-bubble-v", 0, 4, 2)
    (0, 7)
    """
    if kind in V_SHAPED:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(rank + num_ranks * turn for turn in range(stages_per_rank))


def action_table(kind: str, num_ranks: int, stages_per_rank: int, micro_batches: int) -> ActionTable:
    """What each rank does, in order, as torch's schedule of this kind runs it.

    Args:
        kind: one of `shardwise.plan.plan.SCHEDULES`.
        num_ranks: size of the pp axis.
        stages_per_rank: 1 for gpipe and 1f1b, 2 for V-shaped schedules, 2 or more for the other looped ones.
        micro_batches: micro-batches per step.

    Raises:
        PlanError: torch's schedule does not take this combination.

    >>> [str(action) for action in action_table("1f1b", 2, 1, 2)[1]]
    ['1F0', '1B0', '1F1', '1B1']
    """
    try:
        rows = schedule_order(kind, num_ranks, stages_per_rank, micro_batches)
    except (ValueError, AssertionError) as error:
        raise PlanError(
            f"schedule {kind}: torch refuses {num_ranks} ranks x {stages_per_rank} stages with {micro_batches} "
            f"micro-batches: {str(error).splitlines()[0]} Change mb, pp or the stages per rank"
        ) from error
    return [list(_renumbered(Action(*row) for row in rank)) for rank in rows]


def table_of(plan: Plan) -> ActionTable:
    """The action table of a plan. Raises `PlanError` for a plan without a pipeline."""
    if plan.axes.pp == 1:
        raise PlanError(f"schedule: the plan `{plan}` has no pipeline (pp is 1), so there is nothing to draw; add pp2")
    return action_table(plan.schedule.kind, plan.axes.pp, plan.schedule.stages, plan.batch.micro_batches)


def _renumbered(actions: Iterator[Action]) -> Iterator[Action]:
    """Forwards of a stage numbered in their order, as they run: torch 2.13 counts 1F1B's last rank from 1."""
    seen: dict[int, int] = {}
    for action in actions:
        if action.work == "F":
            action = action._replace(micro_batch=seen.get(action.stage, 0))
            seen[action.stage] = action.micro_batch + 1
        yield action


def simulate(table: ActionTable, costs: Costs | None = None) -> Timeline:
    """Run a table against the clock: an action starts when its rank is free and its operand is there.

    A forward needs the forward of the stage before, a backward that of the stage behind, and both of them the
    earlier work of their own stage. Transport takes no time. With measured costs this predicted a step of
    4-stage pipelines within 0.6 to 3.6 % (stages of about a second).

    Raises:
        PlanError: the table can never finish: ranks wait for each other.

    Cost: linear in the number of actions.

    >>> round(simulate(action_table("1f1b", 4, 1, 8)).bubble, 3)
    0.273
    """
    costs = costs or Costs()
    num_stages = 1 + max(action.stage for rank in table for action in rank)
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * len(table), [0] * len(table)
    spans: list[list[Span]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = [done.get(key) for key in _needs(action, num_stages)]
                ready = [time for time in needed if time is not None]
                if len(ready) < len(needed):
                    break
                start = max([free[rank], *ready])
                free[rank] = start + costs.of(action)
                done[_key(action)] = free[rank]
                spans[rank].append(Span(action, start, free[rank]))
                position[rank] += 1
                moved = True
    stuck = [str(actions[at]) for actions, at in zip(table, position, strict=True) if at < len(actions)]
    if stuck:
        raise PlanError(f"schedule: the table cannot finish, {', '.join(stuck)} wait for each other; correct the order")
    total = max(free)
    busy = sum(span.end - span.start for rank in spans for span in rank)
    return Timeline(ranks=tuple(map(tuple, spans)), total=total, bubble=1 - busy / (total * len(table)))


def _key(action: Action) -> tuple[str, int, int]:
    # the gradient of the inputs is there after I or after B
    return ("I" if action.work == "B" else action.work, action.stage, action.micro_batch)


def _needs(action: Action, num_stages: int) -> list[tuple[str, int, int]]:
    work, stage, micro_batch = action
    if work == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if work == "W":
        return [("I", stage, micro_batch)]
    behind = [("I", stage + 1, micro_batch)] if stage < num_stages - 1 else []
    return [("F", stage, micro_batch), *behind]


def picture(timeline: Timeline, width: int = 4) -> list[Text]:
    """One line of coloured text per rank: letters are work, numbers are micro-batches, dots are waiting.

    Args:
        timeline: from `simulate`.
        width: characters per unit of time.

    >>> print(picture(simulate(action_table("gpipe", 2, 1, 1)), width=3)[0].plain)
    rank 0  F0 ......... B0
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
    image.save(path)


def _shade(colour: str, turn: int) -> tuple[int, int, int]:
    """A colour, paler for each further stage on the same rank."""
    strength = max(0.4, 1 - 0.3 * turn)
    red, green, blue = (round(255 - (255 - int(colour[i : i + 2], 16)) * strength) for i in (1, 3, 5))
    return red, green, blue
