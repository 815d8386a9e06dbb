"""What a rank needs outside of steps: while its weights are made, and while a checkpoint is loaded or saved. No torch.

As `parallel.init` and `checkpoint` do it, held against the live bytes of real processes
(`tests/parity/test_memory_around.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model.profile import Block
from shardwise.plan.frozen import held_width
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.engines import is_replicated
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.updating import OWN, state_bytes, update_spike

KEPT = ("weights", "master", "optimizer")
"""States that a checkpoint has."""


def outside_step(
    division: Division, stages: tuple[Stage, ...], stack: Stack, states: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Phase (place, load, save) -> bytes by term on the device, of a rank with these stages.

    place: the weights; beside them DDP's buckets and copies in fp32, and before those are made, on a CPU, one whole
    tensor, of which a rank keeps its shard.
    load: everything is read into fresh tensors, and checked there before the state is touched. An optimizer that has
    not stepped takes them over, so its own states are there once.
    save: on a CPU the copy that is written, which the next save uses again; of an accelerator it is in pinned memory of
    the host (`copied`).
    Gradients are those of DDP's buckets, which are made with the model and stay.

    Empty for a stack whose checkpoints are not this library's.
    """
    if stack.name not in OWN:
        return {}
    plan = division.plan
    kept = {name: states.get(name, 0.0) for name in KEPT}
    if stack.eager:
        kept |= {name: kept[name] * division.trained_share(stages) for name in ("master", "optimizer")}
    elif plan.offload.state:
        kept = dict.fromkeys(KEPT, 0.0)  # all of it is in the host's memory
    buckets: dict[str, float] = {"constants": float(division.buffers(stages))}
    if is_replicated(plan) and plan.communication.bucket_view:
        buckets["gradients"] = division.whole(stages) * division.profile.trained * compute_width(plan)
    drawn: dict[str, float] = {"drawn": 0.0}
    if stack.eager:
        drawn["drawn"] = _largest(division, stages) * 4.0  # drawn in the type of the constructor
    after = {"master": kept["master"], **buckets}
    place = {"weights": kept["weights"], **(after if sum(after.values()) > drawn["drawn"] else drawn)}
    load = {**kept, **buckets, "loaded": kept["weights"] + kept["master"]}
    if division.workload.optimizer == "muon":  # a step of each parameter by itself shows the form of its state
        load["temporary"] = update_spike(division, stages)
    save = {**kept, **buckets, "saved": copied(division, stages, stack) if stack.eager else 0.0}
    return {"place": place, "load": load, "save": save}


def copied(division: Division, stages: tuple[Stage, ...], stack: Stack) -> float:
    """Bytes of the copy that a save writes, in memory of the host: kept from the first save on.

    What several ranks hold is stored once, and they share the work by bytes.
    """
    plan, workload = division.plan, division.workload
    if stack.name not in OWN:
        return 0.0
    pure = plan.precision == "bf16-pure"
    wide = 8.0 if plan.precision == "fp64" else 4.0
    trained = workload.trained * division.trained_share(stages)  # the rest has neither states nor masters
    weight = 2.0 + 4.0 * trained if pure else wide
    if workload.trained < 1:  # frozen ones are written as they are
        weight = held_width(division, stages, compute_width(plan))
    each = weight + state_bytes(division, stages, stack) * trained
    whole = sum(_params(division, stage) for stage in stages) - division.second_table(stages) * plan.axes.tp
    return whole * each / (plan.world // plan.axes.pp)


def _params(division: Division, stage: Stage) -> float:
    """Parameters of a stage over all ranks that share it."""
    profile = division.profile
    total = float(sum(block.params * count for block, count in stage.counts))
    table = profile.vocab * profile.dim
    total += profile.embedding * stage.first + profile.head.params * stage.last
    return total - table * (profile.tied and stage.first and stage.last)


def _largest(division: Division, stages: tuple[Stage, ...]) -> float:
    """Elements of the largest parameter of some stages."""
    blocks = {block for stage in stages for block, _ in stage.counts}
    table = division.profile.vocab * division.profile.dim if any(s.first or s.last for s in stages) else 0
    return max([*map(_tensor, blocks), float(table)])


def _tensor(block: Block) -> float:
    return max((op.params / _joined(op.name) for op in block.matmuls), default=0.0)


def _joined(product: str) -> float:
    """Parameters that a product of a decoder's profile stands for: gate and up are two."""
    return 2.0 if product in ("up", "experts-up", "shared-up") else 1.0
