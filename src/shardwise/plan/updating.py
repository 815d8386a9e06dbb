"""What an optimizer's update takes: bytes of state, seconds, gathers, and what it needs for a moment. No torch.

An element-wise rule reads and writes its numbers once. Muon makes the momentum of each matrix orthogonal, and needs the
whole of it: `train.update_rules.Muon`, of which all that is said here is counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Attention, Block, Matmul, Pointwise
from shardwise.plan.division import Division, Stage
from shardwise.plan.kernels import TAIL, matmul_time, pointwise_time
from shardwise.plan.links import collective_time, group_of
from shardwise.plan.plan import Plan
from shardwise.plan.stack import Stack
from shardwise.plan.workload import STATE_BYTES

HOST_UPDATE = 0.6
"""Share of a device's link to the host at which the host's cores update its states: all ranks share that memory."""
OWN = ("shardwise", "shardwise-cpu")
"""Stacks whose checkpoints and optimizers are this library's: how others save, load and orthogonalize is not known."""
NOT_ORTHOGONAL = ("embed", "positions", "head")
"""Matrices of the reference models that Muon gives to AdamW, as `train.optimizers.NOT_MUON` names them."""
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
    def flops(self) -> float:
        """Operations of its update: each iteration multiplies `x xT`, its square, and that by `x`."""
        return ITERATIONS * (4.0 * self.short * self.num_params + 2.0 * self.short**3)


@lru_cache(maxsize=4096)
def matrices(block: Block) -> tuple[Matrix, ...]:
    """The matrices of a block, each as the module has it: what a profile multiplies in one product may be several.

    Experts are stacked along a third dim, and stepped by AdamW.
    """
    found: list[Matrix] = []
    heads = next((op for op in block.ops if isinstance(op, Attention)), None)
    gated = any(isinstance(op, Pointwise) and op.name == "swiglu" for op in block.ops)
    for op in block.matmuls:
        if op.experts or not op.own or not op.trained:
            continue
        for outs in _apart(op, heads, gated):
            found.append(Matrix(outs, op.ins, op.split in ("column", "row")))
    return tuple(found)


def _apart(op: Matmul, heads: Attention | None, gated: bool) -> tuple[int, ...]:
    """Output sizes of the parameters of a product: queries, keys and values; gate and up."""
    if op.name == "qkv" and heads is not None:
        keys = heads.kv_heads * heads.qk_dim
        return op.outs - 2 * keys, keys, keys
    if op.name in ("up", "shared-up") and gated:
        return op.outs // 2, op.outs // 2
    return (op.outs,)


def state_bytes(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of optimizer state per parameter that a rank with these stages updates, in fp32.

    Muon keeps one average of a matrix, and AdamW's two of everything else: tables, heads, norms, experts.
    """
    optimizer = division.workload.optimizer
    if optimizer != "muon" or stack.name not in OWN:
        return STATE_BYTES[optimizer]
    tp, shards = division.plan.axes.tp, division.shards
    counts = [pair for stage in stages for pair in stage.counts]
    kept = sum(m.num_params / (tp if m.split else 1) * n for block, n in counts for m in matrices(block)) / shards
    share = kept / max(division.owned(stages), 1.0)
    return STATE_BYTES["adamw"] - (STATE_BYTES["adamw"] - STATE_BYTES["muon"]) * share


def update_time(division: Division, cluster: Cluster, stack: Stack) -> dict[str, float]:
    """Seconds of the optimizer by term, on the rank that takes longest.

    `optimizer`: its states, weights and gradients go once through memory, of the host where they are offloaded.
    `offload`: what then moves beyond what hides; each micro-batch brings the shards to the device for both passes and
    takes gradients back. `muon`: the iterations of all matrices, which each rank that shares them makes in full;
    `muon-gather`: what brings them together.
    """
    plan, device = division.plan, cluster.device
    owned = max(division.owned(stages) for stages in division.ranks)
    trained = division.workload.trained * division.profile.trained
    each = (division.owned(s) * (2 * state_bytes(division, s, stack) + 4 + 2 * 4 + 4) for s in division.ranks)
    moved = max(each) * trained
    terms = {"optimizer": moved / (device.bandwidth * device.stream)}
    if plan.offload.state:
        terms["optimizer"] = moved / (cluster.host_bandwidth * HOST_UPDATE)
        sent = owned * (2 * 4 + 4) * plan.batch.micro_batches
        terms["offload"] = sent / cluster.host_bandwidth * (1 - stack.overlap_data)
    if division.workload.optimizer == "muon" and stack.name in OWN:
        ranks = [_orthogonal_time(division, stages, cluster, stack) for stages in division.ranks]
        terms["muon"], terms["muon-gather"] = max(ranks, key=sum)
    return terms


def _orthogonal_time(
    division: Division, stages: tuple[Stage, ...], cluster: Cluster, stack: Stack
) -> tuple[float, float]:
    """(seconds of the iterations, of the gathers) of all matrices of some stages."""
    counts = [(matrix, n) for stage in stages for block, n in stage.counts for matrix in matrices(block)]
    seconds = sum(newton_schulz_time(matrix, division.plan, cluster, stack) * n for matrix, n in counts)
    return seconds, sum(_gather_time(matrix, division, cluster, stack) * n for matrix, n in counts)


def newton_schulz_time(matrix: Matrix, plan: Plan, cluster: Cluster, stack: Stack) -> float:
    """Seconds of a matrix's iterations, in its own type: fp32 (tf32 where the plan allows it), or fp64.

    Source: Jordan, kellerjordan.github.io/posts/muon: `x <- a x + (b g + c g g) x` with `g = x xT`, as
    `train.update_rules.orthogonalize` computes it. Products by `matmul_time`; each iteration's sums and scalings pass
    `7 r^2 + 5 r c` elements through memory, r the shorter side.
    """
    device, short, long = cluster.device, matrix.short, max(matrix.rows, matrix.columns)
    dtype = "fp64" if plan.precision == "fp64" else "tf32" if plan.tf32 else "fp32"
    width = 8.0 if dtype == "fp64" else 4.0
    shapes = ((short, short, long), (short, short, short), (short, long, short))
    products = sum(matmul_time(m, n, k, device, dtype) for m, n, k in shapes) / stack.efficiency
    sums = pointwise_time(7 * short**2 + 5 * matrix.num_params, device, width) + 5 * TAIL
    ends = pointwise_time(10 * matrix.num_params, device, width)
    return max(ITERATIONS * (products + sums) + ends, KERNELS * (cluster.launch or stack.launch))


def _gather_time(matrix: Matrix, division: Division, cluster: Cluster, stack: Stack) -> float:
    """Seconds of bringing the shards of a matrix together: over the data axes, then over `tp`."""
    plan, axes = division.plan, division.plan.axes
    size = matrix.num_params * (8.0 if plan.precision == "fp64" else 4.0)
    split = axes.tp if matrix.split else 1
    seconds = 0.0
    if division.shards > 1:
        seconds += collective_time("all_gather", size / split, group_of(axes, "data"), cluster, stack.network)
    if split > 1:
        seconds += collective_time("all_gather", size, group_of(axes, "tp"), cluster, stack.network)
    return seconds


def update_spike(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes that Muon's update makes and drops again, of the tensor that takes most.

    Of a matrix of E elements whose shorter side is r: the gathered matrix, the iterate and its scaled copy with four
    `r x r` products, or these with two more of its size and one product; beside its local part where it is sharded.
    Of what AdamW steps, two temporaries of the local part.
    """
    plan, width = division.plan, 8.0 if division.plan.precision == "fp64" else 4.0
    most = 0.0
    for block in {block for stage in stages for block, _ in stage.counts}:
        for matrix in matrices(block):
            size, square = matrix.num_params, matrix.short**2
            parts = division.shards * (plan.axes.tp if matrix.split else 1)
            most = max(most, max(3 * size + 4 * square, 5 * size + square) + (size / parts if parts > 1 else 0.0))
        stacked = [op.params / (2 if op.name == "experts-up" else 1) for op in block.matmuls if op.experts]
        local = max(stacked, default=0.0) / (division.expert_split * division.expert_shards)
        most = max(most, 2 * local)
    if any(stage.first or stage.last for stage in stages):
        most = max(most, 2 * division.embedding_table / division.shards)
    return most * width
