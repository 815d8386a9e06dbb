"""`plan_for`: the plan of a run for another number of processes. The maths stay: global batch, types, rules. No torch.

It is the nearest legal plan to the run's own, out of those whose micro-batches are no larger than its own were, and
that fit, where the model's sizes and the device are known. Where none is near, or the run's plan was the planner's
choice, the planner is asked. Nothing here looks at what ran before: back at its own size a run has its own plan again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.errors import PlanError
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.constraints import ROWS
from shardwise.plan.hosting import host_share
from shardwise.plan.memory import estimate_memory
from shardwise.plan.memory_terms.states import STATES
from shardwise.plan.plan import MATHS, Plan
from shardwise.plan.repair import Case, Hit, change, divisors, fit_world, nearest_legal
from shardwise.plan.search import HEADROOM, find_plan
from shardwise.plan.stack import stack_on
from shardwise.plan.workload import Workload

_MODEL_AXES = ("pp", "cp", "tp", "ep")
_LEANER = (
    {"recompute__mode": "ops"},
    {"recompute__mode": "blocks"},
    {"zero": 3},
    {"zero": 3, "recompute__mode": "blocks"},
    {"offload__state": True},
    {"offload__state": True, "recompute__mode": "blocks"},
)
"""What a plan that does not fit is tried with; each changes where numbers are kept, and no number."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run beside its plan; None: unknown, and not checked."""

    spec: ModelSpec | None = None
    cluster: Cluster | None = None
    """Its devices; how many does not matter."""
    workload: Workload | None = None
    device: str | None = None
    """`cpu`, `cuda`, ...: the type of torch's device."""
    planned: bool = False
    """The run's plan was the planner's choice."""


def plan_for(own: Plan, world: int, known: Known) -> Plan | None:
    """The plan of a run for another number of processes; None: there is no legal one of the same maths that fits.

    Args:
        own: the run's plan, for its own number of processes; its global batch is kept.
        world: processes.
        known: model, devices and workload.

    Cost: some milliseconds; where the planner is asked, as `find_plan`.

    >>> str(plan_for(Plan.parse("fsdp4 / gbs8"), 3, Known()))
    'fsdp3 / mb2 gbs8 / fp32'
    >>> str(plan_for(Plan.parse("dp4 / gbs8"), 2, Known()))  # micro-batches of 2 samples, as before
    'dp2 / mb2 gbs8 / fp32'
    """
    if world == own.world:
        return own
    chosen = _planned(own, world, known) if known.planned else None
    return chosen or _adapted(own, world, known) or (None if known.planned else _planned(own, world, known))


def _adapted(own: Plan, world: int, known: Known) -> Plan | None:
    """The nearest legal plan."""
    workload = known.workload
    seq_len = workload.seq_len if workload is not None else None
    case = Case(plan=own, spec=known.spec, world=world, device=known.device, seq_len=seq_len)

    def broken(case: Case) -> Hit | None:
        plan = case.plan
        if not has_same_maths(plan, own):
            return Hit(what="another result")
        if known.spec is None and any(getattr(own.axes, axis) % getattr(plan.axes, axis) for axis in _MODEL_AXES):
            fewer = divisors(own.axes.ep)  # what divided the model's sizes before: their divisors do too
            return Hit(what="a degree that may not divide", plans=[change(plan, axes__ep=ep) for ep in fewer])
        if _is_larger(plan, own):
            return Hit(what="larger micro-batches", plans=_accumulating(plan, own))
        for row in ROWS.values():
            hit = row.test(case)
            if hit is not None and hit.severity == "error":
                return hit
        if not _fits(plan, own, known):
            return Hit(what="too large", plans=[change(plan, **more) for more in (_sharded(plan), *_LEANER)])
        return None

    start = [change(plan, batch__micro_batches=next(_enough(plan, own), 1)) for plan in fit_world(own, world)]
    start += [change(plan, axes__ep=ep) for plan in start for ep in divisors(own.axes.ep)[:-1]]
    return nearest_legal(case, start, broken)


def has_same_maths(here: Plan, there: Plan) -> bool:
    """True where two plans differ in layout alone: types, rounding and the global batch are the same."""
    return not any(name.startswith((*MATHS, "batch.global_size")) for name in here.diff(there))


def rows_of(plan: Plan) -> float:
    """The most samples of a micro-batch; where no global batch is said, in parts of it."""
    size, data, micro = plan.batch.global_size, plan.axes.data, plan.batch.micro_batches
    return 1 / (data * micro) if size is None else math.ceil(math.ceil(size / data) / micro)


def _is_larger(plan: Plan, own: Plan) -> bool:
    """Whether a rank has more of a micro-batch than under the run's own plan, in samples, of which `cp` has parts.

    A whole sample is the least that a micro-batch has. Where no global batch is said nobody knows whether there are so
    few, and more micro-batches than samples only take time: some are empty then.
    """
    here, there = rows_of(plan) / plan.axes.cp, rows_of(own) / own.axes.cp
    least = 0.0 if plan.batch.global_size is None else 1 / plan.axes.cp
    return here > max(there, least) * (1 + 1e-9)


def _enough(plan: Plan, own: Plan) -> Iterator[int]:
    """Numbers of micro-batches that are no larger than before, the fewest first."""
    size = plan.batch.global_size
    most = size or own.axes.data * own.axes.cp * own.batch.micro_batches
    for count in range(1, most + 1):
        if not _is_larger(change(plan, batch__micro_batches=count), own):
            yield count


def _accumulating(plan: Plan, own: Plan) -> list[Plan]:
    return [change(plan, batch__micro_batches=count) for _, count in zip(range(4), _enough(plan, own), strict=False)]


def _sharded(plan: Plan) -> dict[str, int]:
    """The same ranks with everything sharded over those that see different samples."""
    return {"zero": 3, "axes__dp_replicate": 1, "axes__dp_shard": plan.axes.data}


def _share(plan: Plan) -> tuple[float, float]:
    """The part of the parameters, and of the optimizer's state, that a rank holds between steps."""
    model, shards = plan.axes.pp * plan.axes.tp, plan.axes.dp_shard * plan.axes.cp
    return 1 / (model * (shards if plan.zero == 3 else 1)), 1 / (model * (shards if plan.zero else 1))


def _fits(plan: Plan, own: Plan, known: Known) -> bool:
    """Whether the estimate leaves some memory free.

    Where nothing can be estimated: whether a rank's part of the state has grown by no more than ranks were lost.
    """
    if known.spec is None or known.cluster is None or known.workload is None:
        grown = max(1.0, own.world / plan.world) * (1 + 1e-9)
        return all(now <= before * grown for now, before in zip(_share(plan), _share(own), strict=True))
    unit = plan.axes.data * plan.batch.micro_batches
    rows = -(-known.workload.global_batch // unit) * unit  # of an uneven window the fullest rank
    workload, stack = replace(known.workload, global_batch=rows), stack_on(known.device)
    cluster, profile = known.cluster, profile_of(known.spec)
    try:
        memory = estimate_memory(profile, plan, workload, stack=stack, device=cluster.device)
        here = estimate_memory(profile, change(plan, offload__state=False), workload, stack=stack)
    except PlanError:  # more stages than blocks: a row of the table says it too
        return False
    if plan.offload.state:
        host = host_share(cluster)
        if sum(here.worst.terms.get(name, 0.0) for name in STATES) > host:
            return False
    return not memory.limit or memory.fits_in(memory.limit * (1 - HEADROOM))


def _planned(own: Plan, world: int, known: Known) -> Plan | None:
    """The planner's choice for so many devices; None where too little is known, or it has none of the same maths."""
    if known.spec is None or known.cluster is None or known.workload is None:
        return None
    cluster = known.cluster.with_(nodes=1, per_node=world, domain=world)
    stack = stack_on(known.device)
    allow = (own.precision,) if own.precision in ("fp32", "fp16", "bf16-pure") else ()
    forbid = () if own.compile else ("compile",)
    try:
        found = find_plan(
            profile_of(known.spec), known.spec, cluster, known.workload, stack=stack, allow=allow, forbid=forbid
        )
    except PlanError:  # a batch that so many ranks do not divide evenly: the nearest plan may be uneven
        return None
    batch = own.batch.global_size
    plans = [change(each.plan, batch__global_size=batch) for each in found.ranked]
    return next((plan for plan in plans if has_same_maths(plan, own)), None)
