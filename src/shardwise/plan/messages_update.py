"""What the optimizer's update sends: Muon gathers every matrix that data or tensor parallelism shards."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwise.plan.messages import Collective, Messages, Scene
from shardwise.plan.updating import NOT_ORTHOGONAL
from shardwise.plan.weights import Weight


def update_messages(scene: Scene) -> Messages:
    """Of all stages of the rank; an optimizer that works on the local shards alone sends nothing.

    Source: `train.update_rules.Muon`, which takes the full tensor of one matrix after the other, and the order in which
    DTensor's `full_tensor` goes through the axes.
    """
    if scene.workload.optimizer != "muon":
        return
    for stage in scene.stages:
        for _, weight in scene.members(stage.number):
            if len(weight.shape) == 2 and weight.name not in NOT_ORTHOGONAL:
                for message in _gathered(scene, weight):
                    yield message, 1


def _gathered(scene: Scene, weight: Weight) -> Iterator[Collective]:
    """The gathers of a matrix: rows that both shard over the data axes first, else over `tp` first.

    Each shard is filled up to the largest one along the dim that is gathered.
    """
    plan, axes = scene.plan, scene.plan.axes
    width = 8 if plan.precision == "fp64" else 4  # the parameter's own type, or that of its master copy
    shards = axes.dp_shard * axes.cp if plan.zero else 1
    first, columns = weight.shape
    here = first
    if shards > 1:
        yield Collective("all-gather", scene.axis("dp_shard", "cp"), width * _padded(weight, scene, shards))
        place, step = scene.index["dp_shard"] * axes.cp + scene.index["cp"], -(-first // shards)
        here = max(0, min(step, first - place * step))
    if axes.tp > 1 and weight.cut == "out":
        yield Collective("all-gather", scene.axis("tp"), width * prod(weight.shape))
    if axes.tp > 1 and weight.cut == "in":
        yield Collective("all-gather", scene.axis("tp"), width * here * columns)


def _padded(weight: Weight, scene: Scene, shards: int) -> int:
    """Elements that a gather over the data axes gives; columns that `tp` shards are gathered before."""
    if weight.cut == "in":
        first, columns = weight.shape
        return -(-first // shards) * shards * columns
    return weight.padded(scene.plan, shards)
