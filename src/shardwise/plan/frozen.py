"""Frozen weights of few bits below adapters (arXiv:2305.14314): what they take, and each use of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardwise.hardware.cluster import Device
from shardwise.model.ops import Matmul
from shardwise.model.profile import Block, Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.activations import compute_width, recomputed_in
from shardwise.plan.division import Division
from shardwise.plan.kernels import pointwise_time
from shardwise.plan.plan import Axes, Plan
from shardwise.plan.stack import Stack
from shardwise.plan.stages import Stage
from shardwise.plan.updating import OWN, apart
from shardwise.plan.workload import Packed, Workload


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
    share = inside / division.whole(stages)
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
    gated = any(op.name == "swiglu" for op in block.ops)
    return max(
        (max(apart(op, heads, gated)) * op.ins / (tp if op.split != "none" else 1) for op in block.matmuls), default=0.0
    )


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
