"""Seconds of the communication inside a block: of the tp and of the cp axis. No torch."""

from __future__ import annotations

from shardwise.model.profile import Block
from shardwise.plan.costs.kernels import TAIL, attention_backward, attention_time, pointwise_time
from shardwise.plan.costs.links import Group, collective_time, group_of
from shardwise.plan.time_terms.setting import Setting, Shape


def tensor_time(block: Block, shape: Shape, setting: Setting, compute: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of the tp axis: per row-sharded product a reduction forward and one backward."""
    if setting.axes.tp == 1:
        return 0.0, 0.0
    group = group_of(setting.axes, "tp")
    tokens = shape[0] * shape[1] / setting.axes.cp
    size = tokens * block.width * setting.width
    reductions = sum(op.split == "row" and not (op.experts and setting.axes.ep > 1) for op in block.matmuls)
    if block.name == "head":
        reductions = 1  # the gradient of its input
    one = _reduction(size, group, setting)
    total = one * reductions * (1 if block.name == "head" else 2)
    hides = setting.stack.overlap_tensor * min(total, compute)
    return total - hides, hides


def _reduction(size: float, group: Group, setting: Setting) -> float:
    share = setting.stack.network
    if setting.sequence:
        gather = collective_time("all_gather", size, group, setting.cluster, share)
        return gather + collective_time("reduce_scatter", size, group, setting.cluster, share)
    return collective_time("all_reduce", size, group, setting.cluster, share)


def context_time(block: Block, shape: Shape, setting: Setting, idle: float) -> float:
    """Exposed seconds of the cp axis: keys and values, forward once and backward twice, behind attention.

    `idle`: seconds that the device waits for launches, behind which they are sent too.
    """
    cp = setting.axes.cp
    if cp == 1:
        return 0.0
    group = group_of(setting.axes, "cp")
    tokens = shape[0] * shape[1] / cp
    total = 0.0
    for op in block.attentions:
        share = setting.stack.network
        if setting.context == "ulysses":
            size = tokens * (op.heads + op.kv_heads) * (op.qk_dim + op.v_dim) * setting.width / setting.axes.tp
            total += 2 * collective_time("all_to_all", size, group, setting.cluster, share)
            continue
        size = tokens * cp * op.kv_heads * (op.qk_dim + op.v_dim) * setting.width / setting.axes.tp
        sent = 3 * collective_time("all_gather", size, group, setting.cluster, share)
        ahead = attention_time(
            op,
            (shape[0], shape[1] // cp, shape[1]),
            setting.axes.tp,
            setting.cluster.device,
            setting.stack,
            setting.dtype,
        )
        behind = ahead + attention_backward(ahead, setting.stack)
        if setting.context == "gather":
            total += sent
            continue
        part = tokens * op.heads * op.v_dim / setting.axes.tp  # each turn merges its part into the output, in fp32
        merge = pointwise_time(3 * part, setting.cluster.device, 4.0) + 3 * TAIL
        total += max(sent - behind * 0.9 - idle, 0.1 * sent) + 3 * (cp - 1) * merge
    return total
