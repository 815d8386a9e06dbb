"""When the parts of a step run, from the estimate's own terms: per rank a lane of compute and one of communication.

What is inside a pass (tensor, context and expert parallelism) stands after its compute, as the estimate adds it; what
hides behind compute stands below it. Gathers and reductions stand in the passes that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.plan.costs.links import collective_time, group_of
from shardwise.plan.plan import V_SHAPED, Plan
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division, divide
from shardwise.plan.ranks.imbalance import busiest
from shardwise.plan.repair import change
from shardwise.plan.schedule import table_of
from shardwise.plan.search import Candidate
from shardwise.plan.searching.space import Space
from shardwise.plan.spelled import seconds
from shardwise.plan.stack import Stack, stack_of
from shardwise.plan.time_terms.datatime import rounds_of, sends_of, wire_of
from shardwise.plan.time_terms.simulate import Costs, simulate
from shardwise.plan.timing import RankCosts, StepTime, rank_costs

MOST_SLICES = 16
"""Micro-batches that are drawn one by one; of more, several are one slice."""
INSIDE = ("compute", "recompute", "tensor", "context", "expert", "imbalance", "pipeline", "data")
"""Terms that have their place in the passes; the others follow them."""
SENT = ("stall", "offload", "update-sends", "loading")
"""Of the others, those in which the device waits for what is sent."""

GROWING = ("host", "stragglers")
"""Of the others, those that grow with the micro-batches."""
UPDATE = ("optimizer", "muon")
"""And those that compute the update."""


class Piece(NamedTuple):
    """From when to when, in seconds; `kind` is forward, recompute, backward, weights, exposed, hidden, ..."""

    start: float
    end: float
    kind: str
    what: str


@dataclass(frozen=True)
class Lane:
    """What a rank does."""

    rank: int
    compute: list[Piece] = field(default_factory=list)
    sent: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Lanes of the drawn ranks, and the seconds of the slowest rank's whole step."""

    lanes: tuple[Lane, ...]
    end: float
    """Seconds that are drawn."""
    seconds: Mapping[str, tuple[str, float]]
    """What -> (kind, seconds): all but those of kind `hidden` sum to the step."""
    drawn: int
    """Micro-batches that are drawn."""


class _Passes(NamedTuple):
    """Seconds of one micro-batch on a rank, all its stages."""

    forward: float
    recompute: float
    backward: float
    ahead: float
    """Exposed communication inside the forward pass."""
    back: float
    hidden: float


class _Data(NamedTuple):
    """Seconds per step of gathers and reductions: before forwards, behind them, behind backwards, after backwards."""

    ahead: float
    behind_forward: float
    behind_backward: float
    after: float
    each: tuple[bool, bool]
    """Whether every micro-batch has its part of the first two, and of the last two."""


def timeline_of(space: Space, chosen: Candidate) -> Timeline:
    """The step of a plan, rank by rank.

    Cost: that of the estimate, and with a pipeline of the simulation of the micro-batches that are drawn.
    """
    plan, step = chosen.plan, chosen.time
    stack = stack_of(plan, space.stack)
    workload = space.workload
    division = divide(busiest(space.profile, plan, workload), plan, workload, stack.cut)
    ranks = division.of_ranks(partial(rank_costs, division, cluster=space.cluster, stack=stack))
    slowest = max(ranks, key=lambda rank: rank.busy)
    heavy = max(ranks, key=lambda rank: rank.params)
    data = _data_of(division, space.cluster, stack, heavy, step)
    count = plan.batch.micro_batches
    if plan.axes.pp == 1:
        lanes, end, drawn = [Lane(0)], 0.0, count
        end = _draw_passes(lanes[0], _passes(slowest), data, count)
    else:
        lanes, end, drawn = _draw_pipeline(division, space.cluster, stack, ranks, data)
    ends = [_draw_rest(lane, end, step, data, plan, drawn / count) for lane in lanes]
    sums = _sums(step, _passes(slowest), count)
    return Timeline(lanes=tuple(lanes), end=max(ends), seconds=sums, drawn=drawn)


def _passes(rank: RankCosts) -> _Passes:
    """A rank's passes, divided as `blocktime` does: of context a third is forward, of the others half."""
    ahead = rank.tensor / 2 + rank.expert / 2 + rank.context / 3
    back = rank.tensor / 2 + rank.expert / 2 + rank.context * 2 / 3
    ahead = min(ahead, sum(rank.forward))
    forward = sum(rank.forward) - ahead
    backward = max(0.0, sum(rank.backward) - back - rank.recompute)
    return _Passes(forward, rank.recompute, backward, ahead, back, rank.hidden)


def _data_of(division: Division, cluster: Cluster, stack: Stack, rank: RankCosts, step: StepTime) -> _Data:
    """Exposed and hidden seconds of the data axes, as estimated, each in the pass that it belongs to."""
    plan, exposed, hidden = division.plan, step.terms.get("data", 0.0), step.hidden.get("data", 0.0)
    if not plan.zero:
        return _Data(0.0, 0.0, hidden, exposed, (False, False))
    gather, again, reduce, across = sends_of(wire_of(division, rank.stages, cluster, stack))[:4]
    scatter, rounds = reduce + across, rounds_of(plan)
    if not rounds.frees:  # gathered once, behind the next step's first forward
        share = gather / max(gather + scatter * rounds.reductions, 1e-12)
        return _Data(0.0, hidden * share, hidden * (1 - share), exposed, (False, rounds.reductions > 1))
    blocks = sum(len(stage.blocks) for stage in rank.stages)
    first, last = gather / (blocks + 1), scatter / (blocks + 1)
    wait = stack.gather_wait * (blocks + (not plan.reshards))
    ahead = first + max(0.0, gather - stack.overlap_data * sum(rank.forward)) + wait
    after = last + max(0.0, again + scatter - stack.overlap_data * sum(rank.backward)) + wait * plan.reshards
    share = ahead / max(ahead + after, 1e-12)
    forward, backward = max(0.0, gather - ahead), max(0.0, again + scatter - after)
    part = forward / max(forward + backward, 1e-12)
    return _Data(exposed * share, hidden * part, hidden * (1 - part), exposed * (1 - share), (True, True))


def _draw_passes(lane: Lane, one: _Passes, data: _Data, count: int) -> float:
    """Micro-batch after micro-batch, without a pipeline; the second it ends at."""
    slices = min(count, MOST_SLICES)
    of, at = count / slices, 0.0
    for number in range(slices):
        name = f"micro-batch {number}" if of == 1 else f"micro-batches {number * of:.0f} to {(number + 1) * of - 1:.0f}"
        is_first, is_last = number == 0, number == slices - 1
        gathers = [_part(took, data.each[0], slices, is_first) for took in (data.ahead, data.behind_forward)]
        reduces = [_part(took, data.each[1], slices, is_last) for took in (data.behind_backward, data.after)]
        at = _add(lane.sent, at, gathers[0], "exposed", f"gathers, {name}")
        begin = at
        at = _add(lane.compute, at, one.forward * of, "forward", f"forward, {name}")
        at = _add(lane.sent, at, one.ahead * of, "exposed", f"inside the forward, {name}")
        _behind(lane, begin, at, ((gathers[1], f"gathers, {name}"), (one.hidden * of / 2, f"tensor, {name}")))
        begin = at
        at = _add(lane.compute, at, one.recompute * of, "recompute", f"recompute, {name}")
        at = _add(lane.compute, at, one.backward * of, "backward", f"backward, {name}")
        at = _add(lane.sent, at, one.back * of, "exposed", f"inside the backward, {name}")
        word = "gathers and reductions" if data.each[0] else "reductions"
        _behind(lane, begin, at, ((reduces[0], f"{word}, {name}"), (one.hidden * of / 2, f"tensor, {name}")))
        if data.each[1]:
            at = _add(lane.sent, at, reduces[1], "exposed", f"{word}, {name}")
    return at


def _part(took: float, each: bool, slices: int, is_its: bool) -> float:
    return took / slices if each else took if is_its else 0.0


def _add(pieces: list[Piece], start: float, took: float, kind: str, what: str) -> float:
    """Append a piece if it takes any time; its end."""
    if took > 0:
        pieces.append(Piece(start, start + took, kind, what))
    return start + max(took, 0.0)


def _behind(lane: Lane, start: float, end: float, hidden: Sequence[tuple[float, str]]) -> None:
    """Hidden communication below compute, where nothing exposed stands; it cannot be longer than that."""
    end = min([end, *(piece.start for piece in lane.sent if piece.start >= start and piece.kind == "exposed")])
    for took, what in hidden:
        start = _add(lane.sent, start, min(took, end - start), "hidden", f"{what} ({seconds(took)} behind compute)")


def _draw_pipeline(
    division: Division, cluster: Cluster, stack: Stack, ranks: list[RankCosts], data: _Data
) -> tuple[list[Lane], float, int]:
    """Every action of every rank; (lanes, the second they end at, micro-batches that are drawn)."""
    plan = division.plan
    pp, turns, count = plan.axes.pp, plan.schedule.stages, plan.batch.micro_batches
    stages = pp * turns
    most = (4 if stages <= 16 else 2 if stages <= 64 or plan.schedule.kind in V_SHAPED else 1) * pp  # suits every kind
    drawn = change(plan, batch__micro_batches=most) if count > most else plan
    table = table_of(drawn)
    chain: dict[int, tuple[RankCosts, int]] = {}
    for rank, row in zip(ranks, table, strict=True):
        chain |= {stage: (rank, turn) for turn, stage in enumerate(sorted({action.stage for action in row}))}
    parts = [chain[stage] for stage in range(stages)]
    costs = Costs.of_stages(
        [rank.forward[turn] for rank, turn in parts],
        [rank.backward[turn] - rank.weight[turn] for rank, turn in parts],
        [rank.weight[turn] for rank, turn in parts],
    )
    size = division.tokens * division.sent * compute_width(plan)
    size /= plan.axes.tp if plan.tensor.sequence or stack.splits_sends else 1
    send = collective_time("send", size, group_of(plan.axes, "pp"), cluster, stack.network)
    timeline = simulate(table, costs, send * (1 - stack.overlap_pipeline))
    lanes = []
    for number, (spans, rank) in enumerate(zip(timeline.ranks, ranks, strict=True)):
        lane, one = Lane(number), _passes(rank)
        whole = sum(rank.backward)
        shares = {"F": (0.0, one.ahead / max(sum(rank.forward), 1e-12)), "W": (0.0, 0.0)}
        usual = (one.recompute / max(whole, 1e-12), one.back / max(whole, 1e-12))
        for action, start, end in spans:
            again, sent = shares.get(action.work, usual)
            kind = {"F": "forward", "W": "weights"}.get(action.work, "backward")
            at = _add(lane.compute, start, (end - start) * again, "recompute", f"recompute of {action}")
            at = _add(lane.compute, at, (end - start) * (1 - again - sent), kind, f"{kind} {action}")
            _add(lane.sent, at, end - at if sent else 0.0, "exposed", f"inside {action}")
        if spans:  # reductions run behind the rank's last backward
            last = spans[-1]
            took = min(data.behind_forward + data.behind_backward, last.end - last.start)
            _add(lane.sent, last.end - took, took, "hidden", "gathers and reductions, where they hide last")
        lanes.append(lane)
    return lanes, timeline.total, drawn.batch.micro_batches


def _draw_rest(lane: Lane, at: float, step: StepTime, data: _Data, plan: Plan, share: float) -> float:
    """What follows the passes: what is left of the data axes, then the update and the other terms.

    Of what grows with the micro-batches the `share` that is drawn.
    """
    if plan.axes.pp > 1:
        parts = zip((data.ahead, data.after), data.each, strict=True)
        left = sum(took * (share if each else 1.0) for took, each in parts)
        at = _add(lane.sent, at, left, "exposed", "gathers and reductions that nothing hides")
    elif not data.each[1]:
        at = _add(lane.sent, at, data.after, "exposed", "gathers and reductions that nothing hides")
    rest = {name: value for name, value in step.terms.items() if name not in INSIDE}
    for name in sorted(rest, key=lambda name: (name not in SENT, name == "stragglers")):
        kind = "exposed" if name in SENT else "optimizer" if name in UPDATE else "other"
        took = rest[name] * (share if name in GROWING else 1.0)
        at = _add(lane.sent if name in SENT else lane.compute, at, took, kind, name)
    return at


def _sums(step: StepTime, one: _Passes, count: int) -> dict[str, tuple[str, float]]:
    """The slowest rank's step by what it is, of all micro-batches."""

    def every() -> Iterator[tuple[str, str, float]]:
        terms = step.terms
        uneven = terms.get("imbalance", 0.0)  # drawn where it is: in the passes
        yield "forward", "forward", one.forward * count
        yield "recompute", "recompute", one.recompute * count
        yield "backward", "backward", terms.get("compute", 0.0) + uneven - one.forward * count
        for name in ("tensor", "context", "expert", "data", *SENT):
            yield f"{name}, exposed", "exposed", terms.get(name, 0.0)
        for name, value in step.hidden.items():
            yield f"{name}, hidden", "hidden", value
        yield "bubble and sends", "bubble", terms.get("pipeline", 0.0)
        for name, value in terms.items():
            if name not in (*INSIDE, *SENT):
                yield name, "optimizer" if name in UPDATE else "other", value

    return {name: (kind, value) for name, kind, value in every() if value > 1e-12}
