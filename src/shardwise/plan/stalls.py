"""What a host that runs behind or ahead of its device costs: stalls between many nodes, and blocks that streams hold.

Both come from one thing. A host that is ahead issues some hundred kernels before the device reaches them, and what
another stream uses meanwhile is not given out again; a host that waits for the device (a pipeline that receives sizes
before tensors, an exchange that stalls) holds nothing, and costs time.
"""

from __future__ import annotations

from shardwise.hardware.cluster import Device
from shardwise.plan.activations import compute_width
from shardwise.plan.division import Division
from shardwise.plan.stack import Stack

STALLS_AT = (64, 4)
"""Nodes of a job, and nodes that a tp group of a pipeline spans, from which exchanges between nodes stall; half the
nodes where a message is four times `STALLS_WITH`."""
STALLS_WITH = 16 * 2**20
"""Bytes that stages send per micro-batch."""
NODE = 8
"""Devices of a node, where no cluster is given."""
BUFFERS = 3.0
"""Whole activations that a block with tensor parallelism works on, beside what it keeps: a gathered input, partial
sums, a gradient; on a stream of their own, they are not given back within the block."""
BUSY = 0.2
"""Share of the nominal rate at which a block with tensor parallelism keeps its device busy, with all that is not a
product: above it the host is ahead."""


def stalled(division: Division, nodes: int, domain: int) -> bool:
    """True where a job is so large that its exchanges between nodes stall; of smaller ones, few show it.

    `domain`: devices of a fast domain.
    """
    axes = division.plan.axes
    spread = nodes / STALLS_AT[0]
    if axes.pp > 1:
        sent = division.tokens * division.profile.dim * compute_width(division.plan)
        spread *= min(max(sent / STALLS_WITH, 1.0) ** 0.5, 2.0)
        spread = max(spread, axes.tp / domain / STALLS_AT[1])
    return spread >= 1


def held_ahead(division: Division, stack: Stack, device: Device | None) -> float:
    """Bytes of a rank that the allocator keeps for streams behind the host: `Stack.runs_ahead` whole activations.

    Half of it where the host meets a single micro-batch, `BUFFERS` where exchanges stall; and in a pipeline whose host
    waits for the ranks of tp, only what its first forward passes issue.
    """
    axes, count = division.plan.axes, division.plan.batch.micro_batches
    if axes.tp == 1 or not stack.runs_ahead:
        return 0.0
    whole = division.tokens * division.profile.dim * compute_width(division.plan)
    ahead = stack.runs_ahead if count > 1 else stack.runs_ahead / 2
    if axes.pp == 1:
        return ahead * whole
    if stalled(division, max(division.plan.world // NODE, 1), NODE):
        return BUFFERS * whole
    block = max(division.profile.blocks, key=lambda block: block.met_params)
    busy = 6.0 * block.met_params * division.tokens / axes.tp / (device.rates.bf16 * BUSY) if device else float("inf")
    if busy < stack.tensor_wait * axes.tp:
        ahead = min(ahead, 0.6 * len(division.profile.blocks) * (axes.pp - 2))
    return max(ahead, BUFFERS) * whole
