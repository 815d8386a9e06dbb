"""What the data axes send in a step: gathers of parameters, sums of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from shardwise.plan.messages import WIDTH, Collective, Messages, Scene, Stage
from shardwise.plan.plan import Plan
from shardwise.plan.schedule import actions
from shardwise.plan.weights import Weight

CARRIED = 21
"""Numbers that ride in DDP's bucket; up to `MAX_RANKS` ranks."""
MAX_RANKS = 512
READY = (
    ("w2", "w3", "w1", "router", "ffn_norm", "wo", "wv.bias", "wv", "k_norm", "wk.bias", "wk", "q_norm", "wq.bias")
    + ("wq", "attn_norm", "down.bias", "down", "fc.bias", "fc", "ln_2", "ln_2.bias", "proj.bias", "proj")
    + ("v.bias", "v", "k.bias", "k", "q.bias", "q", "ln_1", "ln_1.bias")
)
"""Parameters of a block in the order in which a backward pass has their gradients."""


def is_replicated(plan: Plan) -> bool:
    """True where DDP sums the gradients: plain replication in one type, with nothing else."""
    axes = plan.axes
    return axes.data * axes.cp > 1 and not uses_fully_shard(plan)


def uses_fully_shard(plan: Plan) -> bool:
    """True where `fully_shard` carries the data axes, as `parallel.data.uses_fully_shard` says."""
    axes = plan.axes
    composed = axes.data * axes.cp > 1 and max(axes.tp, axes.pp, axes.ep) > 1
    return plan.zero > 0 or plan.mixed or composed


def carries(scene: Scene) -> bool:
    """True where the numbers of a step ride in a bucket of gradients."""
    axes, communication = scene.plan.axes, scene.plan.communication
    plain = not (communication.find_unused or communication.static_graph)
    return scene.is_cpu and axes.data * axes.cp <= MAX_RANKS and plain


def data_messages(scene: Scene) -> Messages:
    """Of the parameters and gradients of all stages of the rank."""
    if is_replicated(scene.plan):
        yield from _buckets(scene)
    elif uses_fully_shard(scene.plan):
        for stage in scene.stages:
            yield from _groups(scene, stage)
    yield from _summands(scene)


# ---------------------------------------------------------------- DDP


def _buckets(scene: Scene) -> Messages:
    """One all-reduce per bucket and step: gradients in the order in which they are ready, cut at the bucket's size."""
    plan, weights = scene.plan, scene.weights
    axis, width = scene.axis("dp_replicate", "cp"), WIDTH[plan.precision]
    blocks = scene.spec.num_layers
    order = [*weights.before, *weights.block * blocks, *weights.after]
    if not plan.communication.find_unused:  # else buckets stay as they were made: in the order of the parameters
        block = sorted(weights.block, key=lambda weight: READY.index(weight.name))
        order = [*_ready_after(weights.after), *block * blocks, *reversed(weights.before)]
    sizes = [(prod(weight.shape) * width, width) for weight in order]
    if carries(scene):
        own = 8 if plan.precision == "fp64" else 4
        sizes.insert(0, (CARRIED * own, own))
    cap = int(plan.communication.bucket_mb * 1024 * 1024)
    for size in _cut(sizes, cap):
        yield Collective("all-reduce", axis, size), 1
    if plan.communication.find_unused:  # which parameters were used: an int32 each
        yield Collective("all-reduce", axis, 4 * len(order)), 1


def _ready_after(after: Sequence[Weight]) -> list[Weight]:
    """The head first, then the norm, its weight before its bias."""
    return [*(w for w in after if w.name == "head"), *(w for w in after if w.name != "head")]


def _cut(sizes: Iterable[tuple[int, int]], cap: int) -> Iterator[int]:
    """Buckets of one type each, closed as soon as they reach the cap."""
    open_: dict[int, int] = {}
    for size, width in sizes:
        open_[width] = open_.get(width, 0) + size
        if open_[width] >= cap:
            yield open_.pop(width)
    yield from open_.values()


# ---------------------------------------------------------------- fully_shard


def _groups(scene: Scene, stage: Stage) -> Messages:
    """Blocks, their experts where `ep` divides them, and what is outside of blocks."""
    plan, weights = scene.plan, scene.weights
    more = ("cp",)
    shard = ("dp_shard", *(more if plan.zero else ()))
    replicate = ("dp_replicate", *(() if plan.zero else more))
    dense = [w for w in weights.block if w.cut != "experts" or plan.axes.ep == 1]
    experts = [w for w in weights.block if w.cut == "experts" and plan.axes.ep > 1]
    blocks = stage.end - stage.first
    names = (scene.axis(*shard), scene.axis(*replicate))
    size = prod(getattr(plan.axes, axis) for axis in shard)
    yield from _group(scene, stage, dense, names, size, blocks)
    axes = plan.axes
    yield from _group(
        scene,
        stage,
        experts,
        (scene.expert_axes[1], scene.axis("dp_replicate")),
        axes.dp_shard * axes.cp * axes.tp // axes.ep,
        blocks,
    )
    yield from _group(scene, stage, outside(scene, stage), names, size, 0)


def outside(scene: Scene, stage: Stage) -> list[Weight]:
    """Parameters of a stage that are in no block."""
    weights, is_last = scene.weights, stage.number == scene.last_stage
    found = [*weights.before] if stage.number == 0 else []
    if is_last:
        found += weights.after
        if weights.tied and stage.number:
            found.append(weights.before[0])
    return found


def _group(
    scene: Scene, stage: Stage, members: Sequence[Weight], names: tuple[str, str], ranks: int, blocks: int
) -> Messages:
    """Gathers, reduce-scatters over the shards and all-reduces over the replicas of parameters that go together.

    `names`: the axes of shards and of replicas; `ranks`: number of shards; `blocks`: how many such groups there are;
    0: the one that is outside of the blocks, which stays gathered.
    """
    plan, times = scene.plan, max(blocks, 1)
    elements = sum(weight.padded(plan, ranks) for weight in members)
    reduced = elements * reduce_width(plan)
    if ranks > 1:
        gathers = _gathers(scene, stage, plan.reshards and blocks > 0)
        yield Collective("all-gather", names[0], elements * WIDTH[plan.precision]), gathers * times
        yield Collective("reduce-scatter", names[0], reduced), reductions(plan) * times
    yield Collective("all-reduce", names[1], reduced // ranks), times


def reduce_width(plan: Plan) -> int:
    """Bytes of a gradient on the wire."""
    given = plan.communication.reduce_dtype
    if given:
        return WIDTH[given]
    return 4 if plan.mixed or plan.precision == "bf16-pure" else WIDTH[plan.precision]


def reductions(plan: Plan) -> int:
    """How often a gradient is reduced over its shards in a step."""
    return plan.batch.micro_batches if plan.zero >= 2 and plan.axes.pp == 1 else 1


def _gathers(scene: Scene, stage: Stage, reshards: bool) -> int:
    """How often a group is gathered in a step: whenever a pass needs it and the pass before has let it go."""
    plan = scene.plan
    count = scene.micro_batches
    work = "FB" * count
    frees = plan.zero == 3  # after each backward pass, and not after the last one only
    if plan.axes.pp > 1:
        table = actions(plan.schedule.kind, plan.axes.pp, plan.schedule.stages, count)[scene.index["pp"]]
        work = "".join(action.work for action in table if action.stage == stage.number and action.work != "W")
        frees = False
    held, found = False, 0
    for each in work:
        found += not held
        held = not reshards if each == "F" else not frees
    return found


# ---------------------------------------------------------------- summands over tp


def _summands(scene: Scene) -> Messages:
    """Gradients of which each `tp` rank has a summand: added once per reduction by `fully_shard`, else once per step.

    What `fully_shard` has accumulated without a reduction is in the type of the wire.
    """
    plan, axis = scene.plan, scene.axis("tp")
    sharded = uses_fully_shard(plan)
    accumulated = sharded and scene.micro_batches > reductions(plan)
    width = reduce_width(plan) if accumulated else WIDTH[plan.precision]
    for stage in scene.stages:
        for weight in scene.weights.block:
            if weight.is_summand(plan):
                times = (stage.end - stage.first) * (reductions(plan) if sharded else 1)
                yield Collective("all-reduce", axis, prod(weight.shape) * width), times
