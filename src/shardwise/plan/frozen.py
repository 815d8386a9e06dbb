"""Frozen weights below adapters, whole or of few bits (arXiv:2305.14314): what they take, and each use. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardwise.hardware.cluster import Device
from shardwise.model.ops import Attention, Matmul
from shardwise.model.profile import Block, Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.costs.kernels import pointwise_time
from shardwise.plan.plan import Axes, Plan
from shardwise.plan.ranks.activations import compute_width, parts_of, recomputed_in
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN, apart
from shardwise.plan.workload import Adapters, Packed, Workload

ADAPTER_KERNELS = 4
"""Of an adapter forward: two products, a scale, an addition."""
GIVEN = {False: (6.0, 4.0), True: (2.0, 1.0)}
"""Times that an adapter (arXiv:2106.09685) reads or writes what its product gives, forward and backward: its own output
is written, scaled (2) and added (3), and its gradient scaled (2) and read by two products; fused, written, and read
where it is added."""
TAKEN = {False: (1.0, 5.0), True: (1.0, 2.0)}
"""The same of what its product is fed: read forward; backward read for the gradient of a weight, the gradient written
and added to the product's (3); fused, read and added in place."""
DROPPED = 2.5
"""And each way where dropout stands in front of it: read, written, with a byte of its mask."""


def adapted_share(spec: ModelSpec, rank: int, on: Sequence[str]) -> float:
    """Parameters of adapters of a rank beside some products of every block (`Adapters.on`), over the model's.

    >>> from shardwise.model.spec import preset
    >>> round(adapted_share(preset("llama-8b"), 16, ("q", "v")) * 8030261248)
    6815744
    """
    width, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sides = {"q": spec.dim + width, "k": spec.dim + keys, "v": spec.dim + keys, "o": spec.dim + width}
    sides["qkv"] = spec.dim + width + 2 * keys
    sides |= dict.fromkeys(("gate", "up", "down"), (spec.dim + spec.ffn_dim) * max(spec.num_experts, 1))
    return min(rank * sum(sides[part] for part in on) * spec.num_layers / spec.num_params, 1.0)


@lru_cache(maxsize=4096)
def packed_share(block: Block) -> float:
    """Share of a block's parameters that are weights of its products, which libraries pack; norms are not."""
    return sum(op.params for op in block.matmuls) / block.params if block.params else 0.0


def held_width(division: Division, stages: tuple[Stage, ...], width: float) -> float:
    """Bytes of a frozen weight, on average over some stages; `width`: where it is not packed."""
    packed, adapters = division.workload.packed, division.workload.adapters
    if packed is None or adapters is None:
        return width
    inside = sum(_weights(division, block) * n for stage in stages for block, n in stage.counts)
    share = inside / max(division.whole(stages), 1.0)  # some stacks leave the last ranks without any
    return share * packed.width + (1 - share) * (adapters.rest or width)


@lru_cache(maxsize=256)
def gathered_share(profile: Profile, packed: Packed | None, width: float) -> float:
    """Bytes of a block's weights as they are gathered, over those of as many that are not packed."""
    if packed is None:
        return 1.0
    blocks = [(packed_share(block), block.params) for block in profile.blocks]
    share = sum(part * params for part, params in blocks) / max(sum(params for _, params in blocks), 1)
    return 1 - share * (1 - packed.width / width)


def whole_again(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes of what is made whole in a backward pass: a product's weight, or a recomputed block's, kept by autograd."""
    packed, plan = division.workload.packed, division.plan
    if packed is None:
        return 0.0
    counts = [each for stage in stages for each in recomputed_in(stage, plan)]
    if packed.stays:
        sizes = [_weights(division, block) for block, _, again in counts if again]
    else:
        sizes = [_largest(block, plan.axes.tp) for block, *_ in counts]
    return max(sizes, default=0.0) * compute_width(plan)


def kept_whole(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes of whole weights that autograd keeps between both passes, of blocks that are not recomputed."""
    packed, plan = division.workload.packed, division.plan
    if packed is None or not packed.stays:
        return 0.0
    counts = [each for stage in stages for each in recomputed_in(stage, plan)]
    return sum(_weights(division, block) * (n - again) for block, n, again in counts) * compute_width(plan)


def kept_on(division: Division, stages: tuple[Stage, ...]) -> float:
    """Bytes of recomputed blocks' inputs and of their gradients at the end of a backward pass that frees none."""
    adapters, plan = division.workload.adapters, division.plan
    if adapters is None or not adapters.stays:
        return 0.0
    again = sum(again for stage in stages for *_, again in recomputed_in(stage, plan))
    return 2 * again * division.tokens * division.profile.dim * compute_width(plan)


def _weights(division: Division, block: Block) -> float:
    """Weights of a block's products on a rank."""
    return packed_share(block) * (division.dense(block) + division.experts(block))


@lru_cache(maxsize=4096)
def _largest(block: Block, tp: int) -> float:
    """Elements of the largest weight of a block, each as the module has it."""
    heads = next(iter(block.attentions), None)
    gated = any(op.name.endswith("swiglu") for op in block.ops)
    return max(
        (max(apart(op, heads, gated)) * op.ins / (tp if op.split != "none" else 1) for op in block.matmuls), default=0.0
    )


def adapter_time(
    op: Matmul,
    tokens: float,
    setting: tuple[Axes, Adapters | None, Device, float],
    heads: Attention | None,
    *,
    fused: bool,
) -> tuple[float, float]:
    """Seconds of a product's adapters, forward and backward: what they move. None: each parameter has one.

    `setting`: axes, adapters, device, and bytes of an activation; `heads`: of its block.
    """
    axes, adapters, device, width = setting
    parts = parts_of(op) or (op.name,)
    sizes = apart(op, heads, len(parts) == 2)
    names = parts[: len(sizes)] if len(sizes) > 1 else parts
    on = names if adapters is None or "qkv" in adapters.on else adapters.on
    given = sum(size for part, size in zip(names, sizes, strict=False) if part in on) / op.outs
    count = 1 if adapters and "qkv" in adapters.on and len(names) == 3 else sum(part in on for part in names)
    if not count:
        return 0.0, 0.0
    sent = tokens * op.gives * given / (axes.tp if op.split == "column" else 1)
    fed = tokens * op.takes * count / (axes.tp if op.split == "row" else 1)
    dropped = DROPPED if adapters and adapters.copies > width else 0.0
    bytes_each = width * (2.0 if adapters and adapters.wide else 1.0)
    ahead, back = (
        pointwise_time(sent * out + fed * (into + dropped), device, bytes_each)
        for out, into in zip(GIVEN[fused], TAKEN[fused], strict=True)
    )
    return ahead, back


def whole_time(op: Matmul, axes: Axes, packed: Packed, device: Device, width: float) -> float:
    """Seconds of making a rank's weights of a product whole, for one of its uses: what its kernels move."""
    shared = axes.ep if op.experts and axes.ep > 1 else axes.tp if op.split in ("column", "row") else 1
    return pointwise_time(op.params / shared * (packed.moved + width), device, 1.0)


COPIED = 6
"""Times that `fully_shard` reads or writes a frozen weight that it gathers on a device alone: into its buffer, in the
place of the collective, and out."""


def gather_copied(workload: Workload, stack: Stack, width: float) -> float:
    """Bytes per parameter that `fully_shard` moves on a device that shares no shards; `width`: of the compute type."""
    if workload.trained == 1 or not stack.gather_copies:
        return stack.gather_copies
    return COPIED * (workload.packed.width if workload.packed else width)


def held_unpacked(plan: Plan, stack: Stack) -> float:
    """Bytes of a frozen weight that is not packed: in fp32 only where it is cast for use."""
    width, cast = compute_width(plan), stack.name not in OWN and not stack.master
    return width if not cast or plan.precision == "bf16-pure" else max(width, 4.0)


def cast_head(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of the head in the compute type, where frozen weights are packed and the rest is in fp32."""
    adapters, width = division.workload.adapters, compute_width(division.plan)
    wide = (adapters.rest if adapters else 0.0) > width or held_unpacked(division.plan, stack) > width
    return division.dense(division.profile.head) * width * any(stage.last for stage in stages) * wide
