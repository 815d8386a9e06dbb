"""`collectives_of`: every message that a rank takes part in during one step, in closed form. No torch.

Kind, axis, bytes and number of times are those of this implementation and of the reference models, and equal what
`diagnose.tracing.step` counts in the real step. What each engine sends is read off its own rules: `fully_shard`'s
groups and their padding, DDP's buckets, DTensor's redistributions, torch's pipeline schedules.
"""

from __future__ import annotations

from collections import Counter

from shardwise.errors import PlanError
from shardwise.model.spec import ModelSpec
from shardwise.plan.messages.data import carries_numbers, data_messages
from shardwise.plan.messages.model import model_messages, pipeline_messages
from shardwise.plan.messages.scene import Collective, Messages, Scene
from shardwise.plan.messages.update import update_messages
from shardwise.plan.plan import AXES, Plan
from shardwise.plan.ranks.engines import is_replicated
from shardwise.plan.workload import Workload


def collectives_of(
    spec: ModelSpec, plan: Plan, workload: Workload, *, rank: int = 0, is_cpu: bool = False
) -> dict[Collective, int]:
    """What one rank sends and receives in a step, each with how often.

    A step after the first few: DDP has put its buckets in order. A token loss and the norm of the gradient are assumed,
    and tokens that are spread evenly over the experts.

    Args:
        spec: sizes of a reference model.
        plan: any layout; its batch is the workload's.
        workload: sequence length and global batch in sequences.
        rank: of `plan.world`.
        is_cpu: under DDP on CPUs the step's own numbers ride with the gradients.

    Raises:
        PlanError: a batch that is not divided.
        ModelError: the spec has a part that no reference model has.

    Cost: below a millisecond; with a pipeline, linear in its actions.

    >>> from shardwise.model.spec import preset
    >>> found = collectives_of(preset("tiny"), Plan.parse("fsdp2"), Workload(seq_len=64, global_batch=4))
    >>> sorted({each.kind for each in found})
    ['all-gather', 'all-reduce', 'reduce-scatter']
    """
    _refuse_undivided(plan, workload)
    scene = Scene(spec=spec, plan=plan, workload=workload, rank=rank, is_cpu=is_cpu)
    own = (data_messages(scene), model_messages(scene), pipeline_messages(scene))
    parts = (*own, update_messages(scene), _numbers(scene))
    found: Counter[Collective] = Counter()
    for part in parts:
        for message, times in part:
            if message.num_bytes and times and message.axis:
                found[message] += times
    return dict(found)


def _refuse_undivided(plan: Plan, workload: Workload) -> None:
    pieces = plan.axes.data * plan.batch.micro_batches
    if workload.global_batch % pieces:
        raise PlanError(
            f"traffic: global batch: found {workload.global_batch} sequences, which {plan.axes.data} data ranks x "
            f"{plan.batch.micro_batches} micro-batches do not divide; needed a multiple of {pieces}"
        )


def _numbers(scene: Scene) -> Messages:
    """Seven numbers of a step, the gradient's sum of squares among them; and counts of tokens by expert."""
    plan, width = scene.plan, 8
    gradient_axes = ("dp_replicate", "dp_shard", "cp")
    if not is_replicated(plan):
        yield Collective("all-reduce", scene.axis(*AXES), 7 * width), 1
    elif not carries_numbers(plan, scene.is_cpu):  # every rank has the whole gradient, and its norm
        yield Collective("all-reduce", scene.axis(*gradient_axes), 6 * width), 1
    if scene.spec.kind == "moe":
        layers = sum(stage.end - stage.first for stage in scene.stages)
        axes = (*gradient_axes, *(("tp",) if plan.tensor.sequence else ()))
        yield Collective("all-reduce", scene.axis(*axes), layers * (scene.spec.num_experts + 1) * 8), 1
