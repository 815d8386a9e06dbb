"""How long a collective takes: the alpha-beta model per algorithm and tier of links.

A group is `size` ranks that stand `stride` apart. Ranks that share a fast domain talk over `Cluster.local`, the rest
over `Cluster.network`; a group with several ranks in a domain uses as many network adapters. Sources: Thakur et al.,
Optimization of Collective Communication Operations in MPICH (2005), for ring and tree; Chan et al. (2007) for bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from shardwise.hardware.cluster import Cluster, Link
from shardwise.plan.plan import Axes


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks, `stride` apart: the ranks of an axis that share all other coordinates."""

    size: int
    stride: int

    def inside(self, cluster: Cluster) -> int:
        """Ranks of the group in one fast domain."""
        return max(1, min(self.size, cluster.domain // self.stride))


def group_of(axes: Axes, axis: str) -> Group:
    """The group of an axis.

    `data` is the group that sharded gradients are reduced over, `dp_shard x cp`; `expert_data` the same for experts.

    >>> group_of(Axes(dp_shard=4, tp=8), "dp_shard")
    Group(size=4, stride=8)
    """
    if axis == "ep":
        return Group(axes.ep, 1)
    if axis == "expert_data":
        return (
            Group(max(1, axes.dp_shard * axes.cp * axes.tp // axes.ep), axes.ep)
            if axes.ep > 1
            else group_of(axes, "data")
        )
    if axis == "data":
        return Group(axes.dp_shard * axes.cp, axes.tp)
    sizes = {"tp": axes.tp, "cp": axes.cp, "dp_shard": axes.dp_shard, "dp_replicate": axes.dp_replicate, "pp": axes.pp}
    stride = 1
    for name, size in sizes.items():
        if name == axis:
            return Group(size, stride)
        stride *= size
    raise AssertionError(axis)


HOP = 0.25
"""A step inside a node, over a step between nodes, of a ring through several. NCCL's tuner: 3.4 us of NVLink, or 3 of
the network's proxy, beside 14 of InfiniBand. With EFA, tensor parallelism over two and four nodes shows 0.2 to 0.3."""
SWITCHED = 72
"""Devices of the largest fast domain that is a switch, as NVLink's are. Larger ones are tori (slices of TPUs), whose
rings run along one axis after the other."""


BESIDE = 3
"""Power by which the times that a byte takes on the network and in a device's own copying combine: 1 where they take
turns, the slower alone where it is large. Fitted with the `network` of fsdp1 and megatron-flash, over nodes that have
45 to 360 GB/s (`tools/published/elsewhere.csv`: yafsdp, ibmblog, modalities; the study of Aleph Alpha)."""


def ring_latency(group: Group, cluster: Cluster) -> float:
    """Seconds of the steps of a ring through a group, whatever is sent.

    A ring crosses from node to node once per node, and stays inside for the other steps: `nsteps - nInterSteps` of
    them in `ncclTopoTuneModel` of NCCL (src/graph/tuning.cc); see arXiv:2507.04786, section 5. In a torus, one ring per
    axis: Chan et al. (2007), section 7; of two axes, as of the slices with fewest.
    """
    ranks, inside = group.size, group.inside(cluster)
    if inside == ranks:
        steps = ranks - 1.0 if cluster.domain <= SWITCHED else 2 * (ranks**0.5 - 1)
        return steps * cluster.local.latency
    domains = ranks / inside
    return (domains - 1 + HOP * (ranks - domains)) * cluster.network.latency


def _tree_latency(group: Group, cluster: Cluster) -> float:
    """The same of a double binary tree over nodes, with a chain through each: up and down (NCCL's tuner, as above)."""
    ranks, inside = group.size, group.inside(cluster)
    if inside == ranks:
        return 4 * log2(ranks) * cluster.local.latency
    return 2 * (log2(ranks / inside) + HOP * (inside - 1)) * cluster.network.latency


def _among(link: Link, ranks: int) -> float:
    """Bandwidth of a device in a group of so many: without a switch, over its wires to the others alone.

    >>> _among(Link(bandwidth=448e9, latency=1e-5, wires=7), 2)
    64000000000.0
    """
    return link.bandwidth * min(ranks - 1, link.wires) / link.wires if link.wires and ranks > 1 else link.bandwidth


@lru_cache(maxsize=65536)
def collective_time(
    kind: str, size: float, group: Group, cluster: Cluster, share: float = 1.0, once: float = 1.0
) -> float:
    """Seconds of a collective of `size` bytes: the whole tensor, gathered or to be reduced, on each rank.

    `kind`: all_gather, reduce_scatter, all_reduce, all_to_all, send. `share`: of the fast tier's bandwidth that it
    gets; what it lacks is time of the device's own copying, beside kernels that compute: the same per byte on any link.
    A ring copies pieces of a message while others are on the network, so that mostly the slower of both counts.
    A send goes to a neighbour on an axis: of ranks that share a domain, one at its edge, which all wait for where the
    network is slower, has one of its two neighbours inside, so that a send takes the mean of both ways.
    `once`: of what an all_to_all sends to other domains, the share that crosses; inside them it is handed on.

    Gathers and reduce-scatters are rings, an all-reduce is a ring or a tree, whichever is faster: latency and transfer
    add up, as in NCCL's tuner. From 2.23 on it has trees for the first two as well (PAT, arXiv:2506.20252), in groups
    with one rank per node; they are not counted.
    """
    ranks, inside = group.size, group.inside(cluster)
    if ranks == 1 or size <= 0:
        return 0.0
    local, network = _among(cluster.local, inside), cluster.network
    crosses = inside < ranks
    latency = network.latency if crosses else cluster.local.latency
    copying = (1 / share - 1) / cluster.local.bandwidth
    if kind == "send":
        pair = _among(cluster.local, 2)
        here = cluster.local.latency + size * (1 / pair + copying)
        # by the adapters of the stages beside it, which send nothing out, too: over what joins it to them
        out = max(network.bandwidth, min(pair, inside * network.bandwidth))
        away = network.latency + size * (1 / out + copying)
        if inside == 1 or not crosses:
            return away if crosses else here
        return max((here + away) / 2, here if inside > 2 else 0.0)
    wire, device = min(local, inside * network.bandwidth) if crosses else local, 1 / (1 / local + copying)
    wide: float = (wire**-BESIDE + device**-BESIDE - local**-BESIDE) ** (-1 / BESIDE)
    part = size * (ranks - 1) / ranks
    if kind == "all_to_all":
        out = once * size * (ranks - inside) / ranks  # leaves the domain, through one adapter
        here = size * (inside - 1) / ranks
        if 0 < cluster.local.wires < inside - 1:
            local /= 2  # no wire to some of the others (a node of eight V100s): what goes there takes two
        seconds = max(out * (1 / network.bandwidth + copying), here * (1 / local + copying))
        return seconds + latency * (1 + log2(ranks))
    ring = ring_latency(group, cluster) + part / wide
    if kind in ("all_gather", "reduce_scatter"):
        return ring
    return min(2 * ring, _tree_latency(group, cluster) + 2 * size / (wide * 0.9))


def messages_time(kind: str, size: float, count: int, group: Group, cluster: Cluster, share: float = 1.0) -> float:
    """Seconds of `count` collectives that carry `size` bytes together: each pays its latency."""
    return count * collective_time(kind, size / count, group, cluster, share) if count else 0.0
