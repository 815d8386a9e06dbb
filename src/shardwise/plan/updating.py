"""What an optimizer's update takes: bytes of state, seconds, what it sends, and what it needs for a moment. No torch.

An element-wise rule reads and writes its numbers once. Muon makes the momentum of each matrix orthogonal, and needs the
whole of it on one rank: `train.updates.update_rules.Muon`, of which all that is said here is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from math import ceil, inf
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster, Device
from shardwise.model.ops import Attention, Matmul, Pointwise
from shardwise.model.profile import Block
from shardwise.plan.costs.hosts import host_rate, hosted_times
from shardwise.plan.costs.kernels import TAIL, matmul_time, pointwise_time
from shardwise.plan.costs.links import Group, collective_time, group_of, messages_time
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.workload import OWN_TYPE, STATE_BYTES, Workload

OWN = ("shardwise", "shardwise-cpu")
"""Stacks whose checkpoints and optimizers are this library's: how others save, load and orthogonalize is not known."""
NOT_ORTHOGONAL = ("embed", "positions", "head")
"""Matrices of the reference models that Muon gives to AdamW, which `NOT_MUON` names."""
NOT_MUON = ("*embed*", "*wte*", "*wpe*", "*head*")
"""Names of matrices that Muon leaves to AdamW, where nobody says which."""
RULES = ("muon", "adafactor", "lamb")
"""Optimizers whose rule is not element-wise: ranks that share a parameter exchange parts or sums of it."""
TEMPORARIES = {"adamw-bf16": 3, "adamw-8bit": 5.5, "lion": 1, "lamb": 1, "adafactor": 1}
"""Tensors of the size of a parameter's local part that a rule makes and drops again, where it is not one kernel."""
COMPARED = {True: 1 << 16, False: 1 << 18}
"""Elements of a tensor that are compared at once, on a CPU and on others."""
ITERATIONS = 5
"""Of Newton-Schulz, per matrix and step."""
KERNELS = 9 * ITERATIONS + 12
"""Kernels that a matrix takes: three products and six element-wise ones each time; momentum, norm, scale and step."""


class Matrix(NamedTuple):
    """A parameter that is made orthogonal."""

    rows: int
    columns: int
    split: bool
    """`tp` shards it."""

    @property
    def short(self) -> int:
        """The shorter side."""
        return min(self.rows, self.columns)

    @property
    def num_params(self) -> int:
        """Its elements."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Operations of its update."""
        return newton_schulz_flops(self.rows, self.columns)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Operations of a matrix's update: each iteration multiplies `x xT`, its square, and that by `x`.

    >>> newton_schulz_flops(3, 2) == newton_schulz_flops(2, 3) == 5 * (4 * 2 * 6 + 2 * 8)
    True
    """
    short = min(rows, columns)
    return ITERATIONS * (4 * short * rows * columns + 2 * short**3)


def part_sizes(length: int, count: int) -> list[int]:
    """Sizes of the parts of a dim that ranks split, as `torch.chunk` makes them; the last may be empty.

    >>> part_sizes(7, 4), part_sizes(5, 4)
    ([2, 2, 2, 1], [2, 2, 1, 0])
    """
    step = -(-length // count)
    return [max(0, min(step, length - i * step)) for i in range(count)]


@lru_cache(maxsize=4096)
def matrices(block: Block) -> tuple[Matrix, ...]:
    """The matrices of a block, each as the module has it: what a profile multiplies in one product may be several.

    Experts are stacked along a third dim, and stepped by AdamW.
    """
    found: list[Matrix] = []
    heads = next(iter(block.attentions), None)
    gated = any(isinstance(op, Pointwise) and op.name.endswith("swiglu") for op in block.ops)
    for op in block.matmuls:
        if op.experts or not op.own or not op.trained:
            continue
        for outs in apart(op, heads, gated):
            found.append(Matrix(outs, op.ins, op.split in ("column", "row")))
    return tuple(found)


def apart(op: Matmul, heads: Attention | None, gated: bool) -> tuple[int, ...]:
    """Output sizes of the parameters of a product: queries, keys and values; gate and up."""
    if op.name == "qkv" and heads is not None:
        keys = heads.kv_heads * heads.qk_dim
        return op.outs - 2 * keys, keys, keys
    if op.name in ("up", "shared-up") and gated:
        return op.outs // 2, op.outs // 2
    return (op.outs,)


def is_muon(workload: Workload, stack: Stack) -> bool:
    """Whether matrices are made orthogonal as this library does it: how others do is not known."""
    return workload.optimizer == "muon" and stack.name in OWN


def state_bytes(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of optimizer state per parameter that a rank with these stages updates.

    Muon keeps one average of a matrix, and AdamW's two of everything else: tables, heads, norms, experts.
    """
    optimizer, wide = division.workload.optimizer, 1 + (division.plan.precision == "fp64")
    if not is_muon(division.workload, stack):
        narrow = 2.0 if optimizer == "muon" and _in_16_bits(division.plan, stack) else 1.0  # the average's own type
        return STATE_BYTES[optimizer] * (1 if optimizer in OWN_TYPE else wide) / narrow
    share = _kept(division, stages) / max(division.owned(stages), 1.0)
    return (STATE_BYTES["adamw"] - (STATE_BYTES["adamw"] - STATE_BYTES["muon"]) * share) * wide


def _kept(division: Division, stages: tuple[Stage, ...]) -> float:
    """Parameters of matrices that a rank with these stages updates."""
    tp, counts = division.plan.axes.tp, [pair for stage in stages for pair in stage.counts]
    held = sum(m.num_params / (tp if m.split else 1) * n for block, n in counts for m in matrices(block))
    return held / division.shards


def update_bytes(state: float, stack: Stack, precision: str = "bf16") -> float:
    """Bytes per parameter that an update moves through memory; `state`: bytes of optimizer state per parameter.

    States and weight there and back, the gradient for its norm and for the rule, and once more each way to be scaled.
    Of all parameters at once each operation of AdamW is a pass of its own (torch's `_multi_tensor_adamw`): decay, two
    averages in three operations, the root, two on it, the step; so states pass seven times and weights and gradients
    six, beside the norm.
    """
    width = 2.0 if precision == "bf16-pure" and not stack.pure_master else 4.0
    passes = (2, 4) if stack.fused_optimizer else (7, 7)
    return passes[0] * state + (passes[1] + 2 * stack.scales_grads) * width


def update_time(division: Division, cluster: Cluster, stack: Stack) -> dict[str, float]:
    """Seconds of the optimizer by term, on the rank that takes longest.

    `optimizer`: its states, weights and gradients go once through memory, of the host where they are offloaded.
    `offload`: what then moves (`costs.hosts.moved_bytes`) beyond what hides.
    `muon`: the iterations of the matrices, of which each rank that shares them makes its part.
    `update-sends`: what the rule sends.
    """
    plan, device = division.plan, cluster.device
    owned = max(division.of_ranks(division.owned))
    trained = division.workload.trained * division.profile.trained
    each = division.of_ranks(
        lambda s: division.owned(s) * update_bytes(state_bytes(division, s, stack), stack, plan.precision)
    )
    moved = max(each) * trained
    terms = {"optimizer": moved / (device.bandwidth * device.stream)}
    if plan.offload.state:
        rounds = plan.zero, plan.batch.micro_batches
        cast, sent = hosted_times(division.workload, rounds, stack, cluster, plan.world)
        terms = {"optimizer": moved / host_rate(cluster, plan.world) + owned * cast, "offload": owned * sent}
    if stack.name in OWN or plan.world == 1:  # alone, all iterate alike
        terms["muon"], terms["update-sends"] = rule_time(division, cluster, stack)
    return terms


def rule_time(division: Division, cluster: Cluster, stack: Stack) -> tuple[float, float]:
    """(seconds of Muon's iterations, of what the rule sends), on the rank that takes longest.

    Of an `OWN` stack, or on a device alone, where nothing is shared out.
    """
    optimizer = division.workload.optimizer
    if optimizer not in RULES:
        return 0.0, 0.0
    if optimizer == "muon":  # many ranks have as many of the same matrices
        alike = dict.fromkeys(frozenset(_matrices_of(stages).items()) for stages in division.ranks)
        return max((_muon_rank(dict(counts), division, cluster, stack) for counts in alike), key=sum)
    return 0.0, max(division.of_ranks(partial(_sums_time, division, cluster=cluster, stack=stack)))


def _matrices_of(stages: tuple[Stage, ...]) -> Counter[Matrix]:
    found: Counter[Matrix] = Counter()
    for block, n in (each for stage in stages for each in stage.counts):
        for matrix in matrices(block):
            found[matrix] += n
    return found


def _muon_rank(counts: Mapping[Matrix, int], division: Division, cluster: Cluster, stack: Stack) -> tuple[float, float]:
    """(seconds of the iterations, of what is sent) for the matrices of a rank."""
    tp = division.plan.axes.tp > 1
    kinds = ([each for each in counts.items() if (each[0].split and tp) == split] for split in (True, False))
    both = [_muon_time(some, division, cluster, stack) for some in kinds if some]
    return sum(busy for busy, _ in both), sum(sent for _, sent in both)


def _sums_time(division: Division, stages: tuple[Stage, ...], cluster: Cluster, stack: Stack) -> float:
    """Seconds of what the rules of LAMB and Adafactor send for some stages."""
    optimizer, axes = division.workload.optimizer, division.plan.axes
    tensors = sum(len([*block.matmuls]) * n for stage in stages for block, n in stage.counts)
    width, elements, seconds = _width(division.plan), division.whole(stages), 0.0
    for axis in ["data"] * (division.shards > 1) + ["tp"] * (axes.tp > 1):
        send = partial(messages_time, group=group_of(axes, axis), cluster=cluster, share=stack.network)
        if optimizer == "lamb":  # the norms of all tensors together
            seconds += send("all_reduce", 2 * tensors * width, 1)
        else:  # each gradient is gathered, and a square summed
            elements *= axes.tp if axis == "tp" else 1
            seconds += send("all_gather", elements * width, tensors) + send("all_reduce", tensors * width, tensors)
    return seconds


def _muon_time(
    counts: list[tuple[Matrix, int]], division: Division, cluster: Cluster, stack: Stack
) -> tuple[float, float]:
    """The same of matrices that are shared alike, with how many there are of each: see `train.updates.sharing`.

    A batch takes as long as its first matrix, the one with most work.
    """
    plan, axes, width = division.plan, division.plan.axes, _width(division.plan)
    tp = axes.tp if counts[0][0].split else 1
    alike = Group(axes.data * axes.cp // division.shards, division.shards * axes.tp)
    if tp < axes.tp > alike.size:
        alike = group_of(axes, "tp")
    team = division.shards * tp
    groups = [group_of(axes, axis) for axis in ["data"] * (division.shards > 1) + ["tp"] * (tp > 1)]
    busy = sent = before = 0.0
    for matrix, n in sorted(counts, key=lambda each: -each[0].flops):
        begun, told = (ceil((before + n) / ranks) - ceil(before / ranks) for ranks in (team * alike.size, team))
        before += n
        busy += newton_schulz_time(matrix, plan, cluster, stack) * begun
        size = matrix.num_params * width
        there = sum(collective_time("all_to_all", size, group, cluster, stack.network) for group in groups)
        sent += 2 * begun * there + messages_time("all_gather", n / team * size, told, alike, cluster, stack.network)
    return busy, sent


def _width(plan: Plan) -> float:
    """Bytes of the type of a parameter, or of its master copy."""
    return 8.0 if plan.precision == "fp64" else 4.0


def newton_schulz_time(matrix: Matrix, plan: Plan, cluster: Cluster, stack: Stack) -> float:
    """Seconds of a matrix's iterations, in its own type: fp32 (tf32 where the plan allows it), or fp64; others' bf16.

    Source: Jordan, kellerjordan.github.io/posts/muon: `x <- a x + (b g + c g g) x` with `g = x xT`, as
    `train.updates.update_rules.orthogonalize` computes it. Products by `matmul_time`; each iteration's sums and
    scalings pass `7 r^2 + 5 r c` elements through memory, r the shorter side.
    """
    dtype = "fp64" if plan.precision == "fp64" else "tf32" if plan.tf32 else "fp32"
    dtype, width = (dtype, _width(plan)) if stack.name in OWN else ("bf16", 2.0)  # as the source has it
    seconds = _iterations(matrix, cluster.device, dtype, width, stack.efficiency)
    return max(seconds, KERNELS * (cluster.launch or stack.launch))


@lru_cache(maxsize=4096)
def _iterations(matrix: Matrix, device: Device, dtype: str, width: float, efficiency: float) -> float:
    short, long = matrix.short, max(matrix.rows, matrix.columns)
    shapes = ((short, short, long), (short, short, short), (short, long, short))
    products = sum(matmul_time(m, n, k, device, dtype) for m, n, k in shapes) / efficiency
    sums = pointwise_time(7 * short**2 + 5 * matrix.num_params, device, width) + 5 * TAIL
    return ITERATIONS * (products + sums) + pointwise_time(10 * matrix.num_params, device, width)


def update_spike(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes that the optimizer's rule makes and drops again, of the parameter that takes most.

    LAMB keeps the steps of all parameters until their norms are summed up, and Adafactor gathers a gradient whole,
    makes a whole step of it, and copies its own part.
    """
    optimizer, width = division.workload.optimizer, _width(division.plan)
    if optimizer == "muon":
        return _orthogonal_spike(division, stages) * width
    local = largest_part(division, stages)
    spike = TEMPORARIES.get(optimizer, 0) * local
    if optimizer == "lamb":
        spike += division.owned(stages)
    parts = division.shards * division.plan.axes.tp
    if optimizer == "adafactor" and parts > 1:
        spike += 2 * local * parts
    return spike * width


def at_once(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes that an update at once makes beside its states (`Stack.fused_optimizer`, `widens_grads`).

    Of offloaded states, below zero 3, a rank's share of the weights comes from the host in fp32, all of it at once;
    nothing does where the weights stay there.
    """
    if division.plan.offload.state and stack.widens_grads:
        on_host = stack.casts_on_host if division.plan.zero < 3 else stack.offloads_weights
        if division.plan.zero < 3 or on_host:
            return division.owned(stages) * division.workload.trained * 4.0 * (not on_host)
    if stack.widens_grads and division.workload.trained == 1:
        low = "fp16", "bf16" if stack.grad_bytes < 4 else ""
        if division.plan.precision not in low:
            return 0.0
        once = stack.most_updated if division.plan.zero == 3 else inf
        flat = 2.0 if stack.flattens_grads and division.plan.zero else 0.0
        return min(division.owned(stages), once) * (4.0 + flat)
    if stack.fused_optimizer:
        return 0.0
    wide = 2.0 if _in_16_bits(division.plan, stack) else 4.0
    if stack.steps_singly:
        return largest_part(division, stages) * wide
    stepped = division.owned(stages)
    if division.workload.optimizer == "muon":  # matrix by matrix (torch's own), and the rest by AdamW
        stepped -= _kept(division, stages)
    return stepped * division.workload.trained * wide


def _in_16_bits(plan: Plan, stack: Stack) -> bool:
    """Whether an optimizer steps weights in 16 bits as they are."""
    return plan.precision == "bf16-pure" and not stack.pure_master


def compared(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes in which the first update compares replicas: a part of a tensor, its factors and the next, of 8 bytes each.

    As `train.guards.replicas.checksum` does it; ranks of `tp` are not compared.
    """
    axes = division.plan.axes
    if axes.tp > 1 or axes.data * axes.cp == division.shards:
        return 0.0
    blocks = {block for stage in stages for block in stage.blocks}
    sizes = [block.params for block in blocks if not any(block.matmuls)]  # a table's
    sizes += [op.params for block in blocks for op in block.matmuls if not op.trained]
    sizes += [division.profile.frozen * any(stage.first for stage in stages)]
    whole, part = max(largest_part(division, stages), *sizes), COMPARED[stack.eager]
    return 16.0 * min(part, whole) + 8.0 * min(part, max(0.0, whole - part))


def largest_part(division: Division, stages: tuple[Stage, ...]) -> float:
    """Elements of the largest part of a parameter that a rank updates."""
    blocks = {block for stage in stages for block, _ in stage.counts}
    if any(stage.last for stage in stages):
        blocks.add(division.profile.head)
    tp = division.plan.axes.tp
    parts = [m.num_params / (tp if m.split else 1) / division.shards for block in blocks for m in matrices(block)]
    parts += [_largest_stack(division, block) for block in blocks]
    if any(stage.first for stage in stages):
        parts.append(division.embedding_table / division.shards)
    return max(parts, default=0.0)


def _largest_stack(division: Division, block: Block) -> float:
    """Elements of the largest stack of experts on a rank: gate and up are two."""
    stacked = [op.params / (2 if op.name == "experts-up" else 1) for op in block.matmuls if op.experts]
    return max(stacked, default=0.0) / (division.expert_split * division.expert_shards)


def _orthogonal_spike(division: Division, stages: tuple[Stage, ...]) -> float:
    """Elements that Muon's update makes and drops again.

    Of a matrix of E elements whose shorter side is r: the iterate and its scaled copy with four `r x r` products, or
    these with two more of its size and one product. What is exchanged before and after is less. Of what AdamW steps,
    two temporaries of the local part.
    """
    most = 0.0
    for block in {block for stage in stages for block, _ in stage.counts}:
        for matrix in matrices(block):
            size, square = matrix.num_params, matrix.short**2
            most = max(most, 2 * size + 4 * square, 4 * size + square)
        most = max(most, 2 * _largest_stack(division, block))
    if any(stage.first or stage.last for stage in stages):
        most = max(most, 2 * division.embedding_table / division.shards)
    return most
