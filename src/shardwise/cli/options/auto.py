"""`--plan auto`: the fastest plan for this machine, with its reasons, for sizes and for modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.cli.options.planning import Question
from shardwise.errors import PlanError
from shardwise.hardware.cluster import Cluster, load_cluster
from shardwise.hardware.host import host_memory
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.reasons import decisions
from shardwise.plan.search import find_plan
from shardwise.plan.spelled import spelled
from shardwise.plan.workload import Workload

AUTO = "auto"


def this_machine(found: Cluster | None, num_ranks: int, hosts: int = 1) -> Cluster:
    """`num_ranks` devices of this machine, or of several like it; `found`: its accelerators, None: cores of its CPU.

    Cores have a share of its memory for each rank.

    >>> this_machine(None, 2).world
    2
    """
    here = num_ranks // hosts
    cluster = found or load_cluster("cpu:1")
    if found is None:
        cluster = cluster.with_(device=replace(cluster.device, memory=host_memory() / here))
    return cluster.with_(nodes=hosts, per_node=here, domain=here)


def auto_plan(asked: Question, *, compiles: bool = False) -> tuple[Plan, Mapping[str, str]]:
    """The fastest plan that fits with some memory to spare, and why each field is what it is.

    `compiles`: this machine can compile blocks.

    Raises:
        PlanError: no plan fits, with what the smallest needs; or no legal plan at all.
        ModelError: nothing of the model is trained.

    Cost: about 0.2 s for a few devices.

    >>> from shardwise.model.spec import preset
    >>> spec, workload = preset("tiny"), Workload(seq_len=64, global_batch=4)
    >>> str(auto_plan(of_sizes(spec, load_cluster("cpu:2"), workload))[0])
    'dp2 / fp32'
    """
    cluster = asked.cluster
    found = find_plan(
        asked.profile, asked.limits, cluster, asked.workload, top=1, stack=asked.stack(""),
        forbid=() if compiles else ("compile",), left_out=asked.left_out,
    )  # fmt: skip
    if found.best is None:
        least = found.nearest
        needs = f"; `{least.plan}` needs the least, {spelled(least.memory.device)}" if least else ""
        raise PlanError(
            f"plan auto: {asked.profile.name} does not fit {cluster.world} x {cluster.device.name} with "
            f"{spelled(cluster.device.memory)} each{needs}; use more devices, a smaller model or shorter samples"
        )
    reasons = {each.field: each.reason for each in decisions(found.best, found.space) if each.reason}
    data = reasons.pop("data", "")  # one decision on three fields
    others = [reasons[name] for name in ("axes.tp", "axes.pp", "axes.cp") if name in reasons]
    split = {"axes.dp_replicate": "; ".join(filter(None, [data, *others])), "axes.dp_shard": data, "zero": data}
    return found.best.plan, {name: why for name, why in split.items() if why} | reasons


def of_sizes(spec: ModelSpec, cluster: Cluster, workload: Workload) -> Question:
    """The question of a model whose sizes are known."""
    return Question(profile=profile_of(spec), spec=spec, cluster=cluster, workload=workload, limits=spec)
