"""What of a family decides on what a bound has of it: keys under which bounds are kept. No torch."""

from __future__ import annotations

from shardwise.plan.plan import V_SHAPED, Schedule
from shardwise.plan.searching.families import Core, Flow, Pipe, Spread


def states_as(flow: Flow, spread: Spread) -> tuple[object, ...]:
    """What decides on the states of a spread."""
    pipe, core = flow.pipe, flow.pipe.core
    shards = spread.dp_shard * core.cp if spread.zero else 1
    kinds = core.tp, core.ep, core.precision, shards, spread.zero
    several = pipe.data > 1, core.cp > 1, spread.dp_replicate > 1, pipe.micro_batches > 1
    return *kinds, *several, pipe.pp, *cut_as(flow.schedule)


def cut_as(schedule: Schedule) -> tuple[int, bool]:
    """What a schedule decides of where stages lie."""
    return schedule.stages, schedule.kind in V_SHAPED


def kept_as(core: Core) -> tuple[object, ...]:
    """What decides on the bytes per token that a core's blocks keep."""
    return core.tp, core.cp > 1, core.sequence, core.precision, core.float8


def flow_as(flow: Flow) -> tuple[object, ...]:
    """What decides on what a flow's micro-batches keep: how context is exchanged changes no size."""
    pipe, core = flow.pipe, flow.pipe.core
    sizes = (core.tp, core.cp, core.ep, core.samples, core.sequence, core.loss, core.precision, core.float8)
    return *sizes, pipe.pp, pipe.micro_batches, flow.schedule, flow.policy, flow.offload


def sent_as(pipe: Pipe) -> tuple[object, ...]:
    """What of a pipe decides on what data axes send."""
    core = pipe.core
    return core.tp, core.cp, core.ep, core.precision, pipe.pp
