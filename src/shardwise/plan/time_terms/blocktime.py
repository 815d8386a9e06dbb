"""Seconds of one block, forward and backward, on one rank: its kernels, and the communication inside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from shardwise.model.ops import Attention, Matmul, Op, Pointwise
from shardwise.model.profile import Block
from shardwise.plan.costs.kernels import (
    BYTES,
    SCANS,
    attention_backward,
    attention_kernel,
    attention_time,
    fastest_matmul,
    matmul_time,
    passes_of,
    pointwise_time,
    unaligned_share,
)
from shardwise.plan.costs.links import group_of
from shardwise.plan.frozen import ADAPTER_KERNELS, adapter_time, whole_time
from shardwise.plan.stack import Stack
from shardwise.plan.time_terms.exchange import exchange_time, mask_time
from shardwise.plan.time_terms.inside import context_time, tensor_time
from shardwise.plan.time_terms.setting import Setting, Shape
from shardwise.plan.updating import apart


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one micro-batch through one block."""

    forward: float
    backward: float
    compute: float
    """Kernels of both, or the launch of them where that is longer."""
    tensor: float
    """Exposed communication of the tp axis, of both."""
    context: float
    expert: float
    hidden: float
    """Communication behind compute."""
    weight: float
    """The part of the backward that makes gradients of weights, which a zero-bubble schedule moves: what the kernels of
    the rest, or the launch of these, leave of it."""
    lag: float
    """Of the backward pass, seconds in which the device waits for the host and nothing is sent: none, where that is as
    far ahead."""
    whole: float
    """What repeating its forward pass adds to its backward pass."""
    light: float
    """What per-operator recompute adds: element-wise operators once more, and the products that it does not keep."""

    def again(self, mode: str) -> float:
        """Seconds that recomputing the block adds to its backward pass."""
        return self.light if mode == "ops" else self.whole


@lru_cache(maxsize=65536)
def block_time(block: Block, shape: Shape, setting: Setting) -> BlockTime:
    """Time a block on one rank.

    Sources: arXiv:1909.08053 and arXiv:2205.05198 for what tp and sequence parallelism send, arXiv:2310.01889 for the
    ring, arXiv:2006.16668 for the exchange of experts.
    """
    alike = setting if setting.context == "ring" else replace(setting, context="ring")  # kernels do not see it
    forward, backward, light, weight, kernels, apart = _kernel_times(block, shape, alike)
    device, started = (forward, backward), _host(block, shape[0], kernels, setting)
    host = started[0] + _waits_for_counts(block, shape, alike, started[0]), started[1]
    compute = max(forward, host[0]) + max(backward, host[1])
    # what is sent while the device waits for the host is behind that in `_passes`
    tensor, hidden = tensor_time(block, shape, setting, sum(device) if setting.stack.launches_hide else compute)
    ahead, back, _ = _passes(device, host, tensor, setting.stack)
    idle, late = ahead + back - sum(device) - tensor, back - backward - tensor / 2
    context = context_time(block, shape, setting, idle)
    filled = context_time(block, shape, setting, 0.0) - context
    tokens, there = shape[0] * shape[1] / setting.axes.cp / setting.axes.tp, (setting.cluster, setting.stack)
    expert = exchange_time(block.matmuls, tokens, setting.width, setting.axes.ep, there)
    tensor += _waits(host, compute + tensor + context + expert, setting)
    looks = _looks(block, setting)
    ahead, back, both = _passes(device, host, tensor, setting.stack, HOOKS * looks)
    _, inputs, _ = _passes(
        (forward, backward - weight), (host[0], host[1] - setting.launch * apart), tensor, setting.stack
    )
    sent = expert / 2 + context / 3, expert / 2 + context * 2 / 3
    again = expert / 2 + context / 3 * (not setting.stack.keeps_attention)
    exposed = ahead + back - compute
    return BlockTime(
        forward=ahead + sent[0],
        backward=back + sent[1],
        compute=compute,
        tensor=exposed,
        context=context,
        expert=expert,
        hidden=behind if (behind := hidden + tensor - exposed) > 1e-9 * compute else 0.0,  # to rounding
        weight=back - inputs,
        lag=max(0.0, late * (1 - filled / idle)) if idle > 0 else 0.0,
        whole=max(both - _unneeded(block, shape, alike) - back, 0.0) + again,
        light=_again_light(light, device, started, SELECTIVE * looks),
    )


@lru_cache(maxsize=65536)
def _kernel_times(block: Block, shape: Shape, setting: Setting) -> tuple[float, float, float, float, int, int]:
    """Seconds of kernels: forward, backward, element-wise ones forward, gradients of weights; how many ahead, these."""
    forward = backward = light = weight = 0.0
    kernels = apart = 0
    batch, heads = shape[0], next(iter(block.attentions), None)
    for op in block.ops:
        ahead, back = _op_time(op, shape, setting)
        if setting.frozen and isinstance(op, Matmul) and op.name != "head":
            there = setting.axes, setting.adapters, setting.cluster.device, setting.width
            added = adapter_time(op, batch * shape[1] / setting.axes.cp, there, heads, fused=setting.stack.fused)
            ahead, back = ahead + added[0], back + added[1]
            if setting.packed:
                whole = whole_time(op, setting.axes, setting.packed, setting.cluster.device, setting.width)
                ahead, back = ahead + whole, back + whole * (not setting.packed.stays)
                kernels += setting.packed.kernels
        forward += ahead
        if isinstance(op, Matmul) and op.trained and not setting.frozen:
            weight += back / 2
            apart += _kernels(op, batch, setting)
        backward += back
        light += ahead * _ran_again(op, setting.stack)
        kernels += _kernels(op, batch, setting)
    masks = mask_time(block, shape, setting.axes.tp, (setting.cluster, setting.stack))
    forward, backward = forward + 2 * masks, backward + 3 * masks  # there and back; of the share of each, one more
    return forward, backward, light, weight, kernels, apart


def _unneeded(block: Block, shape: Shape, setting: Setting) -> float:
    """Seconds that recompute spares: attention that is kept; a last product, which but for routers nothing needs."""
    stack = setting.stack
    last = [op for op in block.matmuls[-1:] if stack.stops_early and not op.experts]  # a head may be a norm alone
    spared = [*block.attentions] * stack.keeps_attention + last
    return sum(_op_time(op, shape, setting)[0] for op in spared)


def _ran_again(op: Op, stack: Stack) -> float:
    """Share of an operator that per-operator recompute runs again."""
    if isinstance(op, Matmul):
        listed = not op.again and (stack.keeps_experts or not op.experts)
        return 1 - (stack.keeps_biased if op.biased else stack.keeps_products) * listed
    return float(isinstance(op, Pointwise))


def _passes(
    device: tuple[float, float], host: tuple[float, float], tensor: float, stack: Stack, hooks: float = 0.0
) -> tuple[float, float, float]:
    """Seconds of a forward pass, of a backward pass, and of a backward pass that repeats the forward pass first.

    A pass takes as long as its kernels and the tp axis' collectives, which are kernels of the same stream, or as long
    as the host needs to launch them all, whichever is longer: what is repeated and what follows it are launched in one
    go, so a host that is behind in the first catches up in the second. `hooks`: seconds of the host that recording and
    comparing what is repeated takes.
    """
    inside, outside = (tensor / 2, 0.0) if stack.launches_hide else (0.0, tensor / 2)
    ahead = max(device[0] + inside, host[0]) + outside
    back = max(device[1] + inside, host[1]) + outside
    return ahead, back, max(sum(device) + 2 * inside, sum(host) + hooks) + 2 * outside


def _op_time(op: Op, shape: Shape, setting: Setting) -> tuple[float, float]:
    """(forward, backward) seconds of an operator's kernels."""
    batch, length = shape
    tp, stack, device = setting.axes.tp, setting.stack, setting.cluster.device
    tokens = batch * length / setting.axes.cp
    if isinstance(op, Matmul):
        return _matmul(op, tokens, setting)
    if isinstance(op, Attention):
        queries, keys = round(length // setting.axes.cp * op.rows), round(length * op.reach)
        ahead = attention_time(op, (batch, max(queries, 1), max(keys, 1)), tp, device, stack, setting.dtype)
        return ahead, attention_backward(ahead, stack)
    shard = tp if op.split == "heads" or setting.sequence and op.split == "sequence" or op.per_choice else 1
    moved = op.moved * max(op.per_choice, 1) * tokens / shard
    if op.name == "scan":
        moved *= max(1.0, device.bandwidth / SCANS)
    passes, back = passes_of(op, stack, setting.width)
    ahead = pointwise_time(moved * passes, device, setting.width)
    return ahead, ahead * back


CAST = {"fp8": 3.0, "fp4": 6.0}
"""Bytes per element that making a product's input in a low precision moves, and the gradient of its output: read in 16
bits, written by rows and, for the product of the other pass, by columns, some of it fused with what goes before; those
of fp4 are read for their largest first. So small products gain least (NVFP4 against Llama's sizes: -22 to -4 %)."""
EXPERT_CASTS = 0.5
"""What casting the operands of an expert's products costs the host, over starting these: one call casts those of all
experts, a kernel for each (Transformer Engine's `split_quantize`)."""
WIDE = ("head", "router")
"""Products that stay in 16 bits."""


def _matmul(op: Matmul, tokens: float, setting: Setting) -> tuple[float, float]:
    axes, device = setting.axes, setting.cluster.device
    tokens *= op.rows
    ins, outs, rows, groups = op.ins, op.outs, ceil(tokens), 1
    if op.experts:
        local = op.experts / axes.ep
        groups = max(1, round(local))
        rows = max(1, ceil(tokens * op.chosen / local / (axes.tp if axes.ep > 1 else 1)))
        if axes.ep > 1:  # tokens of all ranks of the exchange come together
            rows = max(1, ceil(tokens * op.chosen * axes.ep / op.experts / axes.tp))
        rows += round(setting.stack.expert_tile * (groups - 1) / groups)
    if not op.experts or axes.ep == 1:
        outs = ceil(outs / axes.tp) if op.split == "column" else outs
        ins = ceil(ins / axes.tp) if op.split == "row" else ins
    dtype = setting.dtype if op.name not in WIDE or setting.dtype not in CAST else "bf16"
    scale = 1.0 / setting.stack.efficiency
    if setting.stack.unpadded and BYTES[dtype] == 2:
        scale /= unaligned_share(outs, ins, device)
    least = fastest_matmul(rows, outs, ins, device, dtype, groups)
    ahead = max(least, matmul_time(rows, outs, ins, device, dtype, groups) * scale)
    back = max(least, matmul_time(rows, ins, outs, device, dtype, groups) * scale)
    if op.trained and not setting.frozen:
        back += max(least, matmul_time(ins, outs, rows, device, dtype, groups) * scale)
        back += groups * ins * outs * setting.stack.adds_bytes / (device.bandwidth * device.stream)
    cast = CAST.get(dtype, 0.0) * groups * rows / (device.bandwidth * device.stream)
    return ahead + cast * ins, back + cast * outs


HOOKS = 27.0
"""Launches that the host needs per operator of a recomputed block that is not compiled, beyond those of its kernels:
Python's hooks record what the forward pass keeps, find it and compare it (measured: SmolLM-360M on an H200)."""
SELECTIVE = 33.0
"""The same by operator: Python looks at each, in both passes (measured: four models of 0.4 to 1 billion on an H200)."""


def _looks(block: Block, setting: Setting) -> float:
    """Seconds of as many launches as an uncompiled block of our own has operators; 0: others recompute otherwise."""
    return 0.0 if setting.stack.fused or not setting.stack.compiles else setting.launch * len(block.ops)


def _again_light(light: float, device: tuple[float, float], host: tuple[float, float], looks: float) -> float:
    """Seconds that per-operator recompute adds to a block, in both passes."""
    forward, backward = device
    if not looks:
        return max(backward + light, host[1] + host[0] / 2) - max(backward, host[1])
    return max(light, looks + host[0] / 2) + max(0.0, host[0] + looks - max(forward, host[0]))


def _host(block: Block, batch: float, kernels: int, setting: Setting) -> tuple[float, float]:
    """Seconds that the host needs to start a block's forward and backward kernels."""
    stack, slower = setting.stack, setting.launch / setting.stack.launch
    if setting.axes.tp > 1:  # a collective costs the host several kernels: checks, events, another stream
        kernels += 4 * (2 if setting.sequence else 1) * sum(op.split == "row" for op in block.matmuls)
    routed = _routed(block, setting)
    shards = stack.shard_host * slower if setting.gathers else 0.0
    if setting.casts and not stack.fused:
        shards = setting.launch * _casts(block)
    if setting.frozen and not stack.fused:
        kernels += ADAPTER_KERNELS * _products(block)
    picks = (setting.product_launch - setting.launch) * _products(block)
    biases = 0.0 if stack.fused else (setting.biased_launch - setting.product_launch) * _products(block, biased=True)
    slow = sum(attention_kernel(op, batch, setting.axes.tp, stack) != stack.attention for op in block.attentions)
    own = stack.block_host + stack.softmax_host * slow + stack.tensor_host * (setting.axes.tp > 1 and not stack.fused)
    forward = setting.launch * kernels + picks + biases + own * slower + routed + shards
    backward = setting.launch * 2 * kernels + 2 * picks + own * slower * stack.backward_host + routed + 1.2 * shards
    return forward, backward


def _routed(block: Block, setting: Setting) -> float:
    """Seconds of the host, in each pass, that sorting tokens by expert and starting each expert's kernels take."""
    stack, local = setting.stack, max((op.experts / setting.axes.ep for op in block.matmuls), default=0.0)
    each = stack.expert_host * (1 + EXPERT_CASTS * (setting.dtype in CAST))
    return (stack.route_host + each * local) * setting.launch / stack.launch if local else 0.0


def _waits_for_counts(block: Block, shape: Shape, setting: Setting, host: float) -> float:
    """Seconds of a forward pass in which the host waits for the device to count the tokens of each expert.

    What is before that is launched ahead; what is behind it only once the device is there. `host`: of all launches.
    Source: `_maybe_dtoh_and_synchronize` of Megatron-Core's dispatcher; DeepEP's `dispatch`, whose CPU waits for counts
    as well.
    """
    first = next((i for i, op in enumerate(block.ops) if _is_routed(op)), None)
    if not setting.stack.waits_for_counts or first is None:
        return 0.0
    device = sum(_op_time(op, shape, setting)[0] for op in block.ops[:first])
    behind = setting.launch * sum(_kernels(op, shape[0], setting) for op in block.ops[first:])
    return max(0.0, device - (host - behind - _routed(block, setting)))


def _is_routed(op: Op) -> bool:
    """Whether it is on tokens by their experts."""
    return bool((isinstance(op, Matmul) and op.experts) or (isinstance(op, Pointwise) and op.per_choice))


@lru_cache(maxsize=4096)
def _products(block: Block, *, biased: bool = False) -> int:
    """Matrix products of its forward pass, each of one weight, or those with a bias; experts: `Stack.expert_host`."""
    heads = next(iter(block.attentions), None)
    gated = any(op.name.endswith("swiglu") for op in block.ops)
    return sum(len(apart(op, heads, gated)) for op in block.matmuls if not op.experts and op.biased >= biased)


def _casts(block: Block) -> int:
    """Kernels that cast its parameters: one of each product's weight, and one of all that is small."""
    return _products(block) + 1


def _waits(host: tuple[float, float], busy: float, setting: Setting) -> float:
    """Seconds by which the host's waits for the ranks of its tp group exceed what the device has to do meanwhile."""
    axes, group = setting.axes, group_of(setting.axes, "pp")
    if axes.tp == 1 or not setting.stack.tensor_wait or group.inside(setting.cluster) == group.size:
        return 0.0
    return max(0.0, sum(host) + setting.stack.tensor_wait * axes.tp - busy)


def _kernels(op: Op, batch: float, setting: Setting) -> int:
    if isinstance(op, Matmul):  # below 16 bits what it is fed is cast by a kernel of its own
        return 3 if op.experts else 1 + (setting.dtype in CAST and op.name not in WIDE)
    if isinstance(op, Attention):
        kernel = attention_kernel(op, batch, setting.axes.tp, setting.stack)
        return {"unfused": 7, "fused-softmax": 4}.get(kernel, 1)
    return 1 if setting.stack.fused else op.kernels
