"""What a host takes to update states that a plan offloads, and what moves there and back. No torch."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.plan.stack import Stack
from shardwise.plan.workload import Workload

HOST_UPDATE = 0.6
"""Share of a device's link to the host at which the host's cores update its states: all ranks share that memory."""
HOST_ALONE = 2.0
"""Times that rate for a rank that has its host's cores for itself (fairseq's 13 billion offloaded parameters on V100:
an update takes 29 s alone, and an eighth of it 17 s among eight)."""
WIDE = 4.0
"""Bytes of a number of the update."""


class Moved(NamedTuple):
    """Bytes per parameter that a step moves between a device and its host."""

    beside: float
    """While the device computes."""
    alone: float
    """While it waits."""


def host_rate(cluster: Cluster, world: int) -> float:
    """Bytes per second at which a host updates the states of one of its ranks."""
    alone = min(cluster.per_node, world) == 1
    return cluster.host_bandwidth * HOST_UPDATE * (HOST_ALONE if alone else 1.0)


def moved_bytes(workload: Workload, rounds: tuple[int, int], stack: Stack) -> Moved:
    """What a step moves of states on the host; `rounds`: the plan's `zero`, and its micro-batches.

    Each micro-batch brings the weights for both passes and takes gradients back. Where both stay on the device (neither
    `Stack.offloads_weights` nor `offloads_grads`: Megatron-Core), a step takes gradients once and brings weights once.
    `Stack.adds_on_host`: gradients in their own type come back to the device, are added to, and leave again (the first
    to be added is not brought, with zero 3 it comes back for its norm); the sum goes in fp32, of zero 3 beside it; and
    new weights come, in fp32 unless the host casts them. All that is on the stream that reduces, which the backward
    pass waits for (DeepSpeed's `partition_grads`, `async_accumulate_grad_in_cpu_via_gpu`, and its issue 4113).
    """
    (zero, count), trained = rounds, workload.trained
    weights, gradients = (workload.packed.width if workload.packed else WIDE), WIDE * trained
    if stack.adds_on_host:
        summed = 2 * stack.grad_bytes * (count - (zero < 3)) + WIDE
        back = stack.grad_bytes if zero == 3 or stack.casts_on_host else WIDE
        gathered = 2 * stack.grad_bytes * count * (zero == 3 and stack.offloads_weights)
        return Moved(gathered, (summed + back) * trained)
    if not stack.offloads_weights and not stack.offloads_grads:
        return Moved(WIDE * trained + gradients, 0.0)
    return Moved((2 * weights + gradients) * count, 0.0)


def cast_bytes(zero: int, stack: Stack) -> float:
    """Bytes per parameter in the host's memory beside the update's own passes, where gradients add up there.

    What arrives is written, in place of being read for the norm, which the device has taken; new weights are read once
    more to be sent, and where the host casts them written in their type and read again.
    """
    casts = 2 * stack.grad_bytes * (zero == 3 or stack.casts_on_host)
    return (WIDE + casts) * stack.adds_on_host


def hosted_times(
    workload: Workload, rounds: tuple[int, int], stack: Stack, cluster: Cluster, world: int
) -> tuple[float, float]:
    """Seconds per parameter of a rank: of the host beside its update, and of what moves and does not hide."""
    moved = moved_bytes(workload, rounds, stack)
    sent = moved.beside * (1 - stack.overlap_data) + moved.alone
    cast = cast_bytes(rounds[0], stack) * workload.trained
    return cast / host_rate(cluster, world), sent / cluster.host_bandwidth
