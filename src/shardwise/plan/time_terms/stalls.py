"""What a host that runs behind or ahead of its device costs: stalls between many nodes, and blocks that streams hold.

Both come from one thing. A host that is ahead issues some hundred kernels before the device reaches them, and what
another stream uses meanwhile is not given out again; a host that waits for the device (a pipeline that receives sizes
before tensors, an exchange that stalls) holds nothing, and costs time.
"""

from __future__ import annotations

from shardwise.hardware.cluster import Device
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division
from shardwise.plan.stack import Stack

STALLS_AT = (64, 4)
"""Nodes of a job, and nodes that a tp group of a pipeline spans, from which exchanges between nodes stall; half the
nodes where a message is four times `STALLS_WITH`, or where zero 1 gathers parameters over `RING` data ranks."""
STALLS_WITH = 16 * 2**20
"""Bytes that stages send per micro-batch."""
RING = 32
"""Data ranks whose exchange is a ring through so many nodes that the rest of a job's exchanges wait for it."""
SUMMED = (16, 8, 4)
"""Micro-batches of a pipeline whose replicas (zero 0) step together, from which on its exchanges stall; and nodes, or
replicas on several nodes. 26 of 28 such runs are 2 to 26 times slower, as much as others beyond `STALLS_AT`."""
NODE = 8
"""Devices of a node, where no cluster is given."""
BUFFERS = 3.0
"""Whole activations that a block with tensor parallelism works on, beside what it keeps: a gathered input, partial
sums, a gradient; on a stream of their own, they are not given back within the block."""
HELD = 2.0
"""Of them, those that a forward pass leaves to its streams per block."""
BUSY = 0.2
"""Share of the nominal rate at which a block with tensor parallelism keeps its device busy, with all that is not a
product: above it the host is ahead."""
HOST = 4.5e-3
"""Seconds of the host per block with tensor parallelism, forward and backward."""
OFTEN = 32
"""Micro-batches after which a host that is no faster than its device has, by chance, once been ahead in full."""


def stalled(division: Division, nodes: int, domain: int) -> bool:
    """True where a job is so large that its exchanges between nodes stall; of smaller ones, few show it.

    `domain`: devices of a fast domain.
    """
    axes = division.plan.axes
    spread = nodes / STALLS_AT[0]
    if axes.pp > 1 and division.plan.zero == 0 and axes.dp_replicate > 1:
        many, crowd, few = SUMMED
        lockstep = nodes >= crowd or (nodes > 1 and axes.dp_replicate >= few)
        if division.plan.batch.micro_batches >= many and lockstep:
            return True
    if axes.pp > 1:
        sent = division.tokens * division.sent * compute_width(division.plan)
        gathers = division.plan.zero > 0 and axes.data >= RING
        spread *= 2.0 if gathers else min(max(sent / STALLS_WITH, 1.0) ** 0.5, 2.0)
        spread = max(spread, axes.tp / domain / STALLS_AT[1])
    return spread >= 1


def held_ahead(division: Division, stack: Stack, device: Device | None) -> float:
    """Bytes of a rank that the allocator keeps for streams behind the host: at most `Stack.runs_ahead` activations."""
    axes = division.plan.axes
    if axes.tp == 1 or not stack.runs_ahead:
        return 0.0
    block = max(division.profile.blocks, key=lambda block: block.met_params)
    busy = 6.0 * block.met_params * division.tokens / axes.tp / (device.rates.bf16 * BUSY) if device else float("inf")
    ahead = _ahead_alone(division, stack, busy) if axes.pp == 1 else _ahead_in_pipeline(division, stack, busy)
    whole: float = division.tokens * division.profile.dim * compute_width(division.plan)
    return ahead * whole


def _ahead_alone(division: Division, stack: Stack, busy: float) -> float:
    """Activations held without a pipeline; `busy`: seconds of the device per block and micro-batch.

    A single micro-batch is followed by a wait: the host is ahead by what its forward pass has left to the device. In
    more of them it fills the device's queue, or, where the device is no slower, is ahead only now and then, the
    further the more micro-batches: a random walk. Between nodes the device waits for the links.
    """
    axes, count = division.plan.axes, division.plan.batch.micro_batches
    if stalled(division, max(division.plan.world // NODE, 1), NODE) and axes.data >= RING:
        return 0.0
    between = axes.tp > NODE
    if count == 1:
        left = 1.0 if between else max(0.0, 1.0 - HOST / busy)
        return min(stack.runs_ahead, HELD * left * len(division.profile.blocks))
    if busy < HOST and not between:
        return stack.runs_ahead * min(1.0, float((count / OFTEN) ** 0.5))
    return stack.runs_ahead


def _ahead_in_pipeline(division: Division, stack: Stack, busy: float) -> float:
    """The same with one, whose receives wait for the device.

    `BUFFERS` where exchanges stall; where the host waits for the ranks of tp, or has no more micro-batches than fill
    the pipeline, what its first forward passes issue.
    """
    axes, count, blocks = division.plan.axes, division.plan.batch.micro_batches, len(division.profile.blocks)
    if stalled(division, max(division.plan.world // NODE, 1), NODE):
        return BUFFERS
    ahead = stack.runs_ahead
    if count <= axes.pp or busy < stack.tensor_wait * axes.tp:
        ahead = min(ahead, 0.6 * blocks * (axes.pp - 2))
    if count == 1:
        ahead = max(ahead, HELD * blocks / axes.pp)
    return max(ahead, BUFFERS)
