"""When each action of a pipeline schedule runs, with stages that differ, and what is lost to waiting.

The model is that of torch 2.13's pipeline runtime, measured against it by `bench/pipeline.py`:
- a rank does one action at a time, in the order of its table;
- a forward needs the forward of the stage before, a backward (`B` or `I`) that of the stage behind;
- between ranks a tensor takes `transfer`, from when it is computed *and* its receive is posted; the sender goes on
  computing meanwhile, and transfers do not slow each other. Stages on one rank hand over at once;
- with one stage per rank and whole backwards (gpipe, 1f1b) a receive is posted when it is needed, so its transfer is
  never hidden; else where torch's lowering of the table puts it: at the earliest, when the sender's turn comes;
- an overlapped forward and backward run one after the other and are sent together, when both are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from shardwise.errors import PlanError
from shardwise.plan.plan import ZERO_BUBBLE
from shardwise.plan.schedule import Action, ActionTable, actions, stages_of

Times = float | Sequence[float]


class Span(NamedTuple):
    """An action with its time, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When every action runs, and what is lost to waiting. Times are in the unit of the costs."""

    ranks: tuple[tuple[Span, ...], ...]
    total: float
    """Time of a step's pipeline, from the first forward to the end of the last backward."""
    bubble: float
    """Share of rank-time that is idle, 0 to 1."""
    busy: tuple[float, ...]
    """Time in which each rank computes."""

    @property
    def idle(self) -> tuple[float, ...]:
        """Time in which each rank waits; with `busy` it sums to `total`."""
        return tuple(self.total - busy for busy in self.busy)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of one micro-batch through each stage, in any unit: one number for all stages, or one for each.

    Raises:
        PlanError: a time is negative or not a number.
    """

    forward: Times = 1.0
    backward: Times = 2.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            row = (given,) if isinstance(given, int | float) else tuple(given)
            if not row or not all(0 <= time < float("inf") for time in row):
                raise PlanError(
                    f"schedule costs: {field.name}={given!r} is not a time for every stage; "
                    "give one number, or one per stage, 0 or more"
                )
            if not isinstance(given, int | float):
                object.__setattr__(self, field.name, row)

    @classmethod
    def of_stages(
        cls, forward: Sequence[float], backward_input: Sequence[float], backward_weight: Sequence[float]
    ) -> Costs:
        """Costs as torch spends them: a whole backward is both halves, and stage 0 has no gradient of its inputs.

        Its `I` takes no time there, and its `W` is the whole backward.

        >>> Costs.of_stages([1, 1], [1, 1], [0.5, 0.5]).backward_weight
        (1.5, 0.5)
        """
        whole = [inputs + weights for inputs, weights in zip(backward_input, backward_weight, strict=True)]
        return cls(
            forward=forward,
            backward=whole,
            backward_input=(0.0, *backward_input[1:]),
            backward_weight=(whole[0], *backward_weight[1:]),
        )

    def by_work(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """Time of each kind of work for every stage. Raises `PlanError` for costs of another number of stages."""
        rows = {}
        for work, field in zip(WORK, fields(self), strict=True):
            given = getattr(self, field.name)
            rows[work] = (float(given),) * num_stages if isinstance(given, int | float) else given
            if len(rows[work]) != num_stages:
                raise PlanError(
                    f"schedule costs: {field.name} has {len(rows[work])} times, and the schedule has {num_stages} "
                    "stages; give one per stage, or one number for all"
                )
        return rows


WORK = "FBIW"
NOTHING, MISSING, LOCAL = -1, -2, -3

_Step = tuple[int, int, int, int, int]
"""One action, in an order in which all of them can be computed. Actions are numbered rank after rank. Its number, its
rank, the place of its time (`4 * stage + WORK.index(work)`), the action at whose end its operand is ready or `NOTHING`,
and the one at whose end its receive is posted: `NOTHING` from the start, `LOCAL` where the rank has the operand."""


def simulate(table: ActionTable, costs: Costs | None = None, transfer: float = 0.0) -> Timeline:
    """Run a table against the clock.

    Args:
        table: from `actions`, or any table of that form.
        costs: time of each stage's work; None: forward 1, backward 2, halves 1.
        transfer: time of one tensor between stages of different ranks, in the unit of the costs.

    Raises:
        PlanError: the table can never finish: ranks wait for each other; or costs are for other stages.

    Cost: linear in the number of actions, about 2 microseconds each.

    >>> timeline = simulate(actions("1f1b", 4, 1, 8))
    >>> round(timeline.bubble, 3), timeline.idle
    (0.273, (9.0, 9.0, 9.0, 9.0))
    """
    num_stages = 1 + max(action.stage for row in table for action in row)
    times = _flat(costs or Costs(), num_stages)
    starts, ends = _run(_order(table), times, len(table), transfer)
    spans, busy, first = [], [], 0
    for row in table:
        part = slice(first, first + len(row))
        spans.append(tuple(map(Span, row, starts[part], ends[part])))
        busy.append(sum(times[4 * action.stage + WORK.index(action.work)] for action in row))
        first += len(row)
    total = max(ends)
    return Timeline(
        ranks=tuple(spans),
        total=total,
        bubble=1 - sum(busy) / (total * len(table)) if total else 0.0,
        busy=tuple(busy),
    )


def pipeline_time(
    kind: str, ranks: int, costs: Costs, micro_batches: int, *, stages_per_rank: int = 1, transfer: float = 0.0
) -> float:
    """Time of a step's pipeline: `simulate(actions(...)).total`, by a formula where one is exact, and kept.

    Raises:
        PlanError: torch's schedule does not take this combination, or costs are for other stages.

    Cost: microseconds for gpipe, and for equal stages of 1f1b, interleaved and looped-bfs without transfer; else about
    2 microseconds per action for the first costs of a shape and 0.3 for further ones.

    >>> pipeline_time("1f1b", 4, Costs(), 8)
    33.0
    """
    return _pipeline_time(kind, (ranks, stages_per_rank, micro_batches), costs, float(transfer))


@lru_cache(maxsize=1 << 16)
def _pipeline_time(kind: str, shape: tuple[int, int, int], costs: Costs, transfer: float) -> float:
    ranks, stages_per_rank, micro_batches = shape
    if kind == "gpipe" and stages_per_rank == 1:
        return _gpipe_time(ranks, costs, micro_batches, transfer)
    if _least_is_exact(kind, shape, costs, transfer):
        return least_time(kind, ranks, costs, micro_batches, stages_per_rank=stages_per_rank)
    steps = _order_of(kind, *shape)
    return max(_run(steps, _flat(costs, ranks * stages_per_rank), ranks, transfer)[1])


def _gpipe_time(ranks: int, costs: Costs, micro_batches: int, transfer: float) -> float:
    """Two lines of machines that equal jobs pass: the first job's way, and the slowest machine for each further one.

    A stage receives when it is free, so that a transfer lengthens its work.
    """
    by_work = costs.by_work(ranks)
    forward = [time + transfer * (stage > 0) for stage, time in enumerate(by_work["F"])]
    backward = [time + transfer * (stage < ranks - 1) for stage, time in enumerate(by_work["B"])]
    return sum(forward) + sum(backward) + (micro_batches - 1) * (max(forward) + max(backward))


def _least_is_exact(kind: str, shape: tuple[int, int, int], costs: Costs, transfer: float) -> bool:
    ranks, stages_per_rank, micro_batches = shape
    rows = costs.by_work(ranks * stages_per_rank)
    if transfer or kind in ZERO_BUBBLE or any(len(set(rows[work])) > 1 for work in "FB"):
        return False
    return micro_batches >= ranks or stages_per_rank == 1


def least_time(
    kind: str, ranks: int, costs: Costs, micro_batches: int, *, stages_per_rank: int = 1, transfer: float = 0.0
) -> float:
    """A time that `pipeline_time` is never below, in microseconds: for a search to drop layouts by.

    The largest over ranks of: the way of a first micro-batch to the rank, all work of the rank, and where backwards
    are whole, the way of a last gradient from it to the first stage. It is the exact time for equal stages of gpipe,
    1f1b, interleaved and looped-bfs (with as many micro-batches as ranks, or more): (v m + p - 1) (F + B),
    Narayanan et al., arXiv:2104.04473, section 2.2.

    Raises:
        PlanError: costs are for another number of stages.

    >>> least_time("1f1b", 2, Costs(forward=(1, 2), backward=(2, 4)), 4)
    27.0
    """
    rows = costs.by_work(ranks * stages_per_rank)
    split = kind in ZERO_BUBBLE
    # where a backward is split the table may still hold whole ones: the cheaper of the two is sure
    halves = [inputs + weights for inputs, weights in zip(rows["I"], rows["W"], strict=True)]
    backward = [min(both) for both in zip(rows["B"], halves, strict=True)] if split else rows["B"]
    least = 0.0
    for rank in range(ranks):
        stages = stages_of(kind, rank, ranks, stages_per_rank)
        work = micro_batches * sum(rows["F"][stage] + backward[stage] for stage in stages)
        way = sum(rows["F"][: stages[0]]) + transfer * stages[0]
        back = 0.0 if split else sum(rows["B"][: stages[0]]) + transfer * stages[0]
        least = max(least, way + work + back)
    return least


# ---------------------------------------------------------------- the order of steps, and the clock


@lru_cache(maxsize=64)
def _order_of(kind: str, ranks: int, stages_per_rank: int, micro_batches: int) -> list[_Step]:
    return _order(actions(kind, ranks, stages_per_rank, micro_batches))


def _flat(costs: Costs, num_stages: int) -> list[float]:
    rows = costs.by_work(num_stages)
    return [rows[work][stage] for stage in range(num_stages) for work in WORK]


def _run(steps: list[_Step], times: list[float], num_ranks: int, transfer: float) -> tuple[list[float], list[float]]:
    """Start and end of every action."""
    free = [0.0] * num_ranks
    starts, ends = [0.0] * len(steps), [0.0] * len(steps)
    for number, rank, place, operand, posted in steps:
        start = free[rank]
        if operand >= 0:
            ready = ends[operand]
            if transfer and posted != LOCAL:
                if posted >= 0 and ends[posted] > ready:
                    ready = ends[posted]
                ready += transfer
            if ready > start:
                start = ready
        starts[number] = start
        ends[number] = free[rank] = start + times[place]
    return starts, ends


class _Rows(NamedTuple):
    """Every action of a table in columns, numbered rank after rank."""

    ranks: list[int]
    places: list[int]
    operands: list[int]
    """The action that makes its operand, `NOTHING`, or `MISSING` when it can never run."""
    readers: list[int]
    """The other rank that takes its result, or `NOTHING`."""
    overlapped: list[bool]


def _rows(table: ActionTable) -> _Rows:
    flat = [action for row in table for action in row]
    ranks = [rank for rank, row in enumerate(table) for _ in row]
    rank_of = {action.stage: rank for rank, row in enumerate(table) for action in row}
    last, width = max(rank_of), 1 + max(action.micro_batch for action in flat)
    half = (last + 1) * width
    # results have keys: forwards, gradients of inputs, a gap of `width`, gradients of weights, a gap; what stage 0 and
    # the last stage need falls into a gap (a negative key counts from the end)
    keys = {"F": 0, "B": half, "I": half, "W": 2 * half + width}
    needs = {"F": -width, "B": width, "I": width, "W": -half - width}
    made = [MISSING] * (3 * half + 2 * width)
    made[2 * half : 2 * half + width] = made[3 * half + width :] = [NOTHING] * width
    goes_to = {"F": 1, "B": -1, "I": -1, "W": 0}
    own = [keys[work] + stage * width + micro_batch for work, stage, micro_batch, _ in flat]
    for number, key in enumerate(own):
        made[key] = number
    operands, readers = [], []
    for number, (key, rank, (work, stage, _, _)) in enumerate(zip(own, ranks, flat, strict=True)):
        backward_first = work in "BI" and not 0 <= made[key - half] < number
        operands.append(MISSING if backward_first else made[key + needs[work]])
        taker = rank_of.get(stage + goes_to[work], rank)
        readers.append(NOTHING if taker == rank else taker)
    return _Rows(
        ranks=ranks,
        places=[4 * stage + WORK.index(work) for work, stage, _, _ in flat],
        operands=operands,
        readers=readers,
        overlapped=[action.overlapped for action in flat],
    )


def _order(table: ActionTable) -> list[_Step]:
    """Steps in the order in which torch lowers a table: round after round, each rank its next action if it can.

    When an action is done whose result another rank needs, the receive is put at that rank's next place. After a
    stage's last action its gradients are reduced and its parameters let go, which takes a rank two rounds. (With 4
    stages or more on a rank torch also gathers and lets go of stages in between: not counted here.)
    """
    ranks, places, operands, readers, overlapped = _rows(table)
    starts = [ranks.index(rank) if row else 0 for rank, row in enumerate(table)]
    ends = [start + len(row) for start, row in zip(starts, table, strict=True)]
    position = list(starts)
    done, posted = [False] * len(ranks), [LOCAL] * len(ranks)
    order: list[int] = []
    last = {(rank, place // 4): number for number, (rank, place) in enumerate(zip(ranks, places, strict=True))}
    pauses = {number + 1: 2 for number in last.values() if number + 1 not in ends}
    waiting = [rank for rank, row in enumerate(table) if row]
    while waiting:
        moved = False
        for rank in waiting:
            at = position[rank]
            if pauses.get(at):
                pauses[at] -= 1
                moved = True
                continue
            until = at + 1 + overlapped[at]
            for number in range(at, until):
                operand = operands[number]
                if operand == MISSING or (operand >= 0 and not done[operand]):
                    break
            else:
                for number in range(at, until):
                    done[number] = True
                    order.append(number)
                    reader = readers[number]
                    if reader >= 0:
                        posted[number] = position[reader] - 1 if position[reader] > starts[reader] else NOTHING
                position[rank] = until
                moved = True
        if not moved:
            stuck = ", ".join(str(table[rank][position[rank] - starts[rank]]) for rank in waiting)
            raise PlanError(f"schedule: the table cannot finish, {stuck} wait for each other; correct the order")
        waiting = [rank for rank in waiting if position[rank] < ends[rank]]
    posts_late = len(set(places)) == 2 * len(table)  # one stage per rank, with whole backwards
    steps = []
    for number in order:
        operand, rank = operands[number], ranks[number]
        receive = LOCAL
        if operand >= 0 and ranks[operand] != rank:
            receive = posted[operand] if not posts_late else number - 1 if number > starts[rank] else NOTHING
            operand += overlapped[operand]  # what a pair makes is sent when both are done
        steps.append((number, rank, places[number], operand, receive))
    return steps
