"""What the data axes send in a step: gathers of parameters, sums of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from shardwise.plan.messages.scene import WIDTH, Collective, Messages, Scene, Stage
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.engines import is_replicated, uses_fully_shard
from shardwise.plan.ranks.groups import Group, groups_of, is_float8
from shardwise.plan.ranks.weights import Weight
from shardwise.plan.schedule import Action, actions

CARRIED = 21
"""Numbers that ride in DDP's bucket; up to `MAX_RANKS` ranks."""
MAX_RANKS = 512
READY = (
    ("w2", "w3", "w1", "router", "ffn_norm", "wo", "wv.bias", "wv", "k_norm", "wk.bias", "wk", "q_norm", "wq.bias")
    + ("wq", "attn_norm", "down.bias", "down", "fc.bias", "fc", "ln_2", "ln_2.bias", "proj.bias", "proj")
    + ("v.bias", "v", "k.bias", "k", "q.bias", "q", "ln_1", "ln_1.bias")
)
"""Parameters of a block in the order in which a backward pass has their gradients."""


def carries_numbers(plan: Plan, is_cpu: bool) -> bool:
    """True where the numbers of a step ride in a bucket of gradients."""
    axes, communication = plan.axes, plan.communication
    plain = not (communication.find_unused or communication.static_graph)
    return is_cpu and axes.data * axes.cp <= MAX_RANKS and plain


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
    """DDP's, of a reference model: its gradients in the order in which they are ready."""
    plan, weights = scene.plan, scene.weights
    blocks = scene.spec.num_layers
    order = [*weights.before, *weights.block * blocks, *weights.after]
    if not plan.communication.find_unused:  # else buckets stay as they were made: in the order of the parameters
        block = sorted(weights.block, key=lambda weight: READY.index(weight.name))
        order = [*_ready_after(weights.after), *block * blocks, *reversed(weights.before)]
    numbers = [prod(weight.shape) for weight in order]
    yield from bucket_messages(plan, numbers, scene.axis("dp_replicate", "cp"), is_cpu=scene.is_cpu)


def bucket_messages(plan: Plan, numbers: Sequence[int], axis: str, *, is_cpu: bool) -> Messages:
    """DDP's: one all-reduce per bucket and step.

    Args:
        plan: the layout.
        numbers: elements of each gradient, in the order in which they are ready.
        axis: the ranks that share them.
        is_cpu: whether the numbers of a step ride in a bucket.
    """
    width = WIDTH[plan.precision]
    sizes = [(each * width, width) for each in numbers]
    if carries_numbers(plan, is_cpu):
        own = 8 if plan.precision == "fp64" else 4
        sizes.insert(0, (CARRIED * own, own))
    for size in buckets_of(sizes, int(plan.communication.bucket_mb * 1024 * 1024)):
        yield Collective("all-reduce", axis, size), 1
    if plan.communication.find_unused:  # which parameters were used: an int32 each
        yield Collective("all-reduce", axis, 4 * len(numbers)), 1


def _ready_after(after: Sequence[Weight]) -> list[Weight]:
    """The head first, then the norm, its weight before its bias."""
    return [*(w for w in after if w.name == "head"), *(w for w in after if w.name != "head")]


def buckets_of(sizes: Iterable[tuple[int, int]], cap: int) -> Iterator[int]:
    """Buckets of one type each, closed as soon as they reach the cap."""
    open_: dict[int, int] = {}
    for size, width in sizes:
        open_[width] = open_.get(width, 0) + size
        if open_[width] >= cap:
            yield open_.pop(width)
    yield from open_.values()


# ---------------------------------------------------------------- fully_shard


def _groups(scene: Scene, stage: Stage) -> Messages:
    """Gathers, reduce-scatters over the shards and all-reduces over the replicas, group by group."""
    plan, axes = scene.plan, scene.plan.axes
    more = ("cp",)
    shard = ("dp_shard", *(more if plan.zero else ()))
    replicate = ("dp_replicate", *(() if plan.zero else more))
    dense = (scene.axis(*shard), scene.axis(*replicate), prod(getattr(axes, axis) for axis in shard))
    experts = (scene.expert_axes[1], scene.axis("dp_replicate"), axes.dp_shard * axes.cp * axes.tp // axes.ep)
    for group in groups_of(plan, scene.members(stage.number), scene.groups):
        across, replicas, ranks = experts if group.is_experts else dense
        sizes = [_padded(scene, group, weight, ranks) for _, weight in group.members]
        reduced = sum(sizes) * reduce_width(plan)
        if ranks > 1:
            gathers = _gathers(scene, stage, plan.reshards and bool(group.name), ranks)
            cast = [plan.float8.all_gather and is_float8(plan, w, path, scene.types) for path, w in group.members]
            width = scene.width(group.name)
            gathered = sum(size * (1 if is_cast else width) for size, is_cast in zip(sizes, cast, strict=True))
            yield Collective("all-gather", across, gathered), gathers["all"]
            yield Collective("all-gather", _part(scene, across), gathered), gathers["part"]
            yield Collective("all-reduce", across, 4), sum(cast) * sum(gathers.values())  # each weight's largest value
            yield Collective("reduce-scatter", across, reduced), reductions(plan)
        yield Collective("all-reduce", replicas, reduced // ranks), 1


def _padded(scene: Scene, group: Group, weight: Weight, ranks: int) -> int:
    """Elements of a weight as its group gathers it; `reshard=n` has all cut along their first dim, but the root's."""
    if group.name and type(scene.plan.communication.reshard_after_forward) is int:
        rows, *rest = weight.local(scene.plan)
        return -(-rows // ranks) * ranks * prod(rest)
    return weight.padded(scene.plan, ranks)


def _part(scene: Scene, across: str) -> str:
    """The axis along which the neighbours lie that hold a group together under `reshard=n`."""
    count, cp = int(scene.plan.communication.reshard_after_forward or 1), scene.plan.axes.cp
    first = (scene.index["dp_shard"] * cp + scene.index["cp"]) // count * count
    if count > cp or first // cp != (first + count - 1) // cp:
        return f"part of {across}"
    return "cp" if count == cp else "part of cp"


def reduce_width(plan: Plan) -> int:
    """Bytes of a gradient on the wire."""
    return WIDTH[reduce_type(plan)]


def reduce_type(plan: Plan) -> str:
    """The type of a gradient on the wire."""
    given = plan.communication.reduce_dtype
    return given or ("fp32" if plan.mixed or plan.precision == "bf16-pure" else plan.precision)


def held_sums(plan: Plan) -> int:
    """Bytes of an element of what was summed over replicas, which torch holds until a backward pass ends.

    None where a gradient has the type on the wire: it is what was summed.
    """
    replicas = plan.axes.dp_replicate * (1 if plan.zero else plan.axes.cp)
    own = plan.precision if plan.precision in ("fp64", "bf16-pure") else "fp32"
    return reduce_width(plan) * (uses_fully_shard(plan) and replicas > 1 and WIDTH[own] != reduce_width(plan))


def reductions(plan: Plan) -> int:
    """How often a gradient is reduced over its shards in a step."""
    return reductions_of(plan.zero, plan.axes.pp, plan.batch.micro_batches)


def reductions_of(zero: int, pp: int, micro_batches: int) -> int:
    """The same, by what decides on it."""
    return micro_batches if zero >= 2 and pp == 1 else 1


def _gathers(scene: Scene, stage: Stage, reshards: bool, ranks: int) -> dict[str, int]:
    """How often a group is gathered in a step, from all its shards or from a part of the ranks that hold it.

    That is whenever a pass needs it and the pass before has let it go. `reshard=n` lets go of it after a forward but
    for what n neighbours hold together.
    """
    plan = scene.plan
    dial = plan.communication.reshard_after_forward
    lets_go = "part" if type(dial) is int and dial < ranks else "all"
    work = "FB" * scene.micro_batches
    frees = plan.zero == 3  # after each backward pass, and not after the last one only
    if plan.axes.pp > 1:
        work = "".join(action.work for action in _actions(scene, stage) if action.work != "W")
        frees = False
    needed, found = "all", {"all": 0, "part": 0}
    for each in work:
        if needed:
            found[needed] += 1
        needed = (lets_go if reshards else "") if each == "F" else ("all" if frees else "")
    return found


# ---------------------------------------------------------------- summands over tp


def _summands(scene: Scene) -> Messages:
    """Gradients of which each `tp` rank has a summand: added once per reduction by `fully_shard`, else once per step.

    What `fully_shard` has accumulated without a reduction is in the type of the wire.
    """
    plan, axis = scene.plan, scene.axis("tp")
    sharded = uses_fully_shard(plan)
    times = reductions(plan) if sharded else 1
    for stage in scene.stages:
        blocks = enumerate(scene.spec.block_names[stage.first : stage.end], stage.first)
        recomputed = tuple(f"{name}." for i, name in blocks if is_recomputed(i, plan))
        for path, weight in scene.members(stage.number):
            if weight.is_summand(plan):
                accumulated = sharded and _accumulates(scene, stage, path.startswith(recomputed))
                width = reduce_width(plan) if accumulated else scene.width(path)
                yield Collective("all-reduce", axis, prod(weight.shape) * width), times


def _accumulates(scene: Scene, stage: Stage, at_once: bool) -> bool:
    """Whether `fully_shard` holds gradients back for a later reduction.

    Under a pipeline it does so after every pass to the inputs, with the gradients that are there by then. The first
    stage has none: it goes backward as a whole when its weights are due. `at_once`: with the gradients of inputs, as in
    blocks that are recomputed for them.
    """
    if scene.plan.axes.pp == 1:
        return scene.micro_batches > reductions(scene.plan)
    work = "".join(action.work for action in _actions(scene, stage))
    due = "I" if at_once else "W"
    return not stage.number or "B" in work or "I" in work[work.index(due) + 1 :]


def _actions(scene: Scene, stage: Stage) -> list[Action]:
    """What the rank does for a stage of a pipeline, in order."""
    schedule, pp = scene.plan.schedule, scene.plan.axes.pp
    table = actions(schedule.kind, pp, schedule.stages, scene.micro_batches)[scene.index["pp"]]
    return [action for action in table if action.stage == stage.number]
