"""What the hosts of a job hold: the states that a plan offloads. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.hardware.cluster import GIB, Cluster
from shardwise.plan.costs.hosts import host_rate
from shardwise.plan.memory import Memory
from shardwise.plan.plan import Plan

ASSUMED_HOST = 256 * GIB
"""Host memory per device where the cluster does not say."""


def host_share(cluster: Cluster) -> float:
    """Bytes of a node's memory for each of its devices."""
    return cluster.host_memory / cluster.per_node or ASSUMED_HOST


def on_host(memory: Memory, plan: Plan, per_node: int) -> float:
    """Bytes of offloaded states for each device of a node, on the node that holds most; 0: nothing is offloaded."""
    return on_node(memory.offloaded, plan.world, per_node) if any(memory.offloaded) else 0.0


def on_node(offloaded: Sequence[float], world: int, per_node: int) -> float:
    """The same of the bytes of each pipeline rank: stages hold unlike states, a node has ranks of one or several."""
    alike, here = world // len(offloaded), min(per_node, world)
    if alike % here == 0:
        return max(offloaded)
    nodes = (range(start, min(start + here, world)) for start in range(0, world, here))
    return max(sum(offloaded[rank // alike] for rank in ranks) for ranks in nodes) / here


def host_lack(memory: Memory, plan: Plan, cluster: Cluster) -> str:
    """What of the hosts' memory is missing, in words; empty: it suffices."""
    needed, there = on_host(memory, plan, cluster.per_node), host_share(cluster)
    if needed <= there:
        return ""
    return f"offloaded states need {needed / GIB:.0f} GiB of host memory per device, of {there / GIB:.0f}"


def assumed_of(plan: Plan, cluster: Cluster) -> list[str]:
    """What estimates assume of a plan, in words: of hosts that update states, and of dials that have no part in them.

    >>> from shardwise.hardware.cluster import load_cluster
    >>> assumed_of(Plan.parse("fsdp8 / bf16 precision=head:fp32"), load_cluster("h100:8"))
    ['modules with a type of their own (head) count like all others, in bf16']
    """
    rate, notes = host_rate(cluster, plan.world), []
    if plan.offload.state:
        share = f"{rate / 1e9:.0f} GB/s, {rate / cluster.host_bandwidth:.0%} of a device's link to its host"
        notes.append(f"offloaded states are updated at {share}")
    if plan.module_types:
        names = ", ".join(plan.module_types)
        notes.append(f"modules with a type of their own ({names}) count like all others, in {plan.precision}")
    if plan.float8.emulate:
        notes.append(f"emulated products in float8 are counted as those in {plan.precision}: in fp32 a step is longer")
    elif plan.float8.recipe != "none":
        notes.append("MFU is over the rate in bf16, of products in fp8 too, and so may be above 100%")
    if plan.wrap_min_params and plan.zero:
        notes.append(f"blocks are gathered whole, and not by the units of wrap={plan.wrap_min_params}")
    return notes
