"""What the model's own axes send in a step: activations and their gradients over `tp`, `cp`, `ep` and `pp`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from shardwise.plan.messages.scene import Collective, Messages, Scene, Stage
from shardwise.plan.plan import Recompute
from shardwise.plan.ranks.engines import uses_fully_shard
from shardwise.plan.ranks.groups import Member, is_float8
from shardwise.plan.schedule import stages_of

ROUTED = 2
"""Auxiliary losses per token that blocks with experts pass on."""
HALF = ("bf16", "fp16")
"""Precisions under which each group of `fully_shard` casts its inputs."""


class Sent(NamedTuple):
    """A message of a block in one micro-batch: how often in each direction."""

    kind: str
    axis: str
    num_bytes: int
    forward: int = 0
    backward: int = 0
    again: int = 0
    """In a forward that the backward pass repeats; it ends with the last tensor that is needed."""
    again_ops: int | None = None
    """The same under per-operator recompute, where it differs."""


def model_messages(scene: Scene) -> Messages:
    """Of blocks, embedding and head, over all micro-batches."""
    for stage in scene.stages:
        yield from _blocks(scene, stage)
        if scene.plan.axes.tp > 1:
            yield from _ends(scene, stage)


def _blocks(scene: Scene, stage: Stage) -> Messages:
    recompute, names = scene.plan.recompute, scene.spec.block_names
    for i in range(stage.first, stage.end):
        block = names[i]
        scales = _scales(scene, scene.block_members(block))
        for sent in (*_tensor(scene, block), *_context(scene, block), *_experts(scene, block), *scales):
            again = sent.again_ops if recompute.mode == "ops" and sent.again_ops is not None else sent.again
            times = sent.forward + sent.backward + _is_recomputed(i, recompute) * again
            yield Collective(sent.kind, sent.axis, sent.num_bytes), times * scene.micro_batches


def _is_recomputed(index: int, recompute: Recompute) -> bool:
    if recompute.mode == "every":
        return index % recompute.every == 0
    if recompute.mode == "ratio":
        return int((index + 1) * recompute.ratio + 1e-9) > int(index * recompute.ratio + 1e-9)
    return recompute.mode != "none"


# ---------------------------------------------------------------- tp


def _tensor(scene: Scene, block: str) -> Iterator[Sent]:
    """Column and row layers: arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2, with sequence shards.

    The gradients of the inputs of columns are summed together, but for a column that is gathered by itself (`wrap`, a
    precision rule): `fully_shard` watches its inputs, and has them whole.
    """
    plan, axis = scene.plan, scene.axis("tp")
    if plan.axes.tp == 1:
        return
    members = scene.block_members(block)
    for number, (row, weight) in enumerate(members):
        if weight.cut != "in":
            continue
        part = row.rpartition(".")[0]
        columns = {name for name, w in members if w.cut == "out" and name.startswith(f"{part}.")}
        outer, inner = scene.stream(part), scene.stream(row)
        # the block's last sum is behind all that is kept
        again = int(any(len(w.shape) > 1 and not name.startswith(f"{part}.") for name, w in members[number + 1 :]))
        for column in columns & scene.groups:
            yield Sent("all-reduce", axis, scene.stream(column), 0, 1)
        together = int(not columns <= scene.groups)
        if plan.tensor.sequence:
            yield Sent("all-gather", axis, outer, 1, 0, 1)
            yield Sent("all-gather", axis, inner, 0, 1)
            yield Sent("reduce-scatter", axis, inner, 1, 0, again, 0)
            yield Sent("reduce-scatter", axis, outer, 0, together)
        else:
            yield Sent("all-reduce", axis, inner, 1, 0, again)
            yield Sent("all-reduce", axis, outer, 0, together)


def _ends(scene: Scene, stage: Stage) -> Messages:
    """Embedding, head and loss; and where sequences are sharded, the first and the last block of the stage."""
    plan, axis, times, spec = scene.plan, scene.axis("tp"), scene.micro_batches, scene.spec
    table, head = ("wte", "lm_head") if spec.kind == "gpt" else ("embed", "head")
    if stage.number == 0 or (scene.weights.tied and stage.number == scene.last_stage):  # who has the table looks up
        yield Collective("all-reduce", axis, scene.stream(table)), times
    if plan.tensor.sequence:  # forward behind, backward before the blocks
        for block in (stage.end - 1, stage.first):
            yield Collective("all-gather", axis, scene.stream(spec.block_names[block])), times
        if spec.kind == "moe":
            yield from _losses(scene, stage)
    if stage.number == scene.last_stage:
        yield Collective("all-reduce", axis, scene.stream(head)), times
        if plan.tensor.loss:  # largest logit, sum of exponentials, the label's logit
            yield Collective("all-reduce", axis, scene.tokens * max(scene.width(head), 4)), 3 * times
        else:
            yield Collective("all-gather", axis, scene.tokens * spec.vocab_size * scene.width(head)), times
        for sent in _scales(scene, [(head, weight) for weight in scene.weights.after if weight.name == "head"]):
            yield Collective(sent.kind, sent.axis, sent.num_bytes), (sent.forward + sent.backward) * times


def _losses(scene: Scene, stage: Stage) -> Messages:
    """Auxiliary losses where sequences are sharded: gathered behind the stage's blocks, and what came with them before.

    That has a gradient where a stage behind sends one, zeros under a token loss; or where `fully_shard`, which watches
    all inputs of a block together, gives one to those of the second block.
    """
    axis, times, names = scene.axis("tp"), scene.micro_batches, scene.spec.block_names
    width = _losses_width(scene, stage.first, stage.end, inside=True)
    yield Collective("all-gather", axis, scene.tokens * ROUTED * width), times
    watched = uses_fully_shard(scene.plan) and not scene.groups.isdisjoint(names[stage.first + 1 : stage.end])
    if stage.number and (stage.number < scene.last_stage or watched):
        width = _taken_in(scene, names[stage.first], _between_stages(scene))
        yield Collective("all-gather", axis, scene.tokens * ROUTED * width), times


def _losses_width(scene: Scene, first: int, end: int, *, inside: bool = False) -> int:
    """Bytes of an auxiliary loss behind the blocks of a stage; `inside`: before the last one hands it on.

    Routers give fp32, or fp64. A module with a rule gives it in the type of what is around it; a sum has the wider one.
    """
    types = scene.types.keys() & scene.groups
    inner, found = 0, _between_stages(scene) if first else 0
    for block in scene.spec.block_names[first:end]:
        own = max(scene.width(f"{block}.moe.router"), 4)
        for part, around in ((".moe.router", f"{block}.moe"), (".moe", block)):
            own = scene.width(around) if block + part in types else own
        inner = max(own, _taken_in(scene, block, found))
        found = scene.width() if block in types else inner
    return inner if inside else found


def _between_stages(scene: Scene) -> int:
    """Bytes of an auxiliary loss as a stage takes it: in the plan's type, where `fully_shard` casts its inputs."""
    return scene.width() if scene.plan.precision in HALF else max(scene.width(), 4)


def _taken_in(scene: Scene, block: str, width: int) -> int:
    """The same as a block takes it, which is cast under mixed precision."""
    casts = block in scene.groups and (block in scene.types or scene.plan.precision in HALF)
    return scene.width(block) if casts and width else width


# ---------------------------------------------------------------- scales of float8


def _scales(scene: Scene, members: Iterable[Member]) -> Iterator[Sent]:
    """The largest values of operands that `tp` divides, as DTensor reduces them, 8 bytes each.

    Divided are a column layer's weight and the gradient of its outputs, a row layer's weight and its inputs. Each is
    cast for each product it is in, with one scale (`tensorwise`) or one for each row that is multiplied: the outputs of
    a forward, the inputs and the tokens of a backward. `rowwise-hp` takes one scale of the weight in the backward.
    """
    recipe, axis = scene.plan.float8.recipe, scene.axis("tp")
    if recipe == "none" or not axis:
        return
    for path, weight in members:
        if not is_float8(scene.plan, weight, path, scene.types):
            continue
        outputs, inputs = weight.shape
        is_row = weight.cut == "in"
        if recipe == "tensorwise":
            yield Sent("all-reduce", axis, 8, 1 + is_row, 3 - is_row, 1 + is_row)
            continue
        yield Sent("all-reduce", axis, 8 * scene.tokens, int(is_row), int(not is_row), int(is_row))
        yield Sent("all-reduce", axis, 8 * outputs, int(is_row), 0, int(is_row))
        if recipe == "rowwise-hp":
            yield Sent("all-reduce", axis, 8, 0, 1)
        elif not is_row:
            yield Sent("all-reduce", axis, 8 * inputs, 0, 1)


# ---------------------------------------------------------------- cp


def _context(scene: Scene, block: str) -> Iterator[Sent]:
    plan, width = scene.plan, scene.width(f"{block}.attn")
    if plan.axes.cp == 1:
        return
    heads = scene.rows * scene.spec.num_heads // plan.axes.tp * scene.spec.head_dim  # keys are repeated per query head
    sizes, here = scene.layout.sizes, scene.index["cp"]
    sums = max(width, 4)
    axis, ranks = scene.axis("cp"), plan.axes.cp
    if plan.context.kind == "gather":
        most = 2 * heads * max(sizes) * ranks  # keys and values, filled up to the longest rank's
        yield Sent("all-gather", axis, most * width, 1, 1, 1)
        yield Sent("reduce-scatter", axis, most * sums, 0, 1)
    elif plan.context.kind == "ulysses":
        local, whole = heads * sizes[here], heads // ranks * scene.workload.seq_len
        yield Sent("all-to-all", axis, max(local, whole) * width, 4, 4, 4)
    else:
        for step in range(ranks):  # keys and values go on while there is someone who has not seen them
            going, coming = sizes[(here - step) % ranks], sizes[(here - step - 1) % ranks]
            for kind, tokens in (("send", going), ("recv", coming)):
                if step < ranks - 1:
                    yield Sent(kind, axis, heads * tokens * width, 2, 2, 2)
                yield Sent(kind, axis, heads * tokens * sums, 0, 2)


# ---------------------------------------------------------------- experts


def _experts(scene: Scene, block: str) -> Iterator[Sent]:
    spec, plan = scene.spec, scene.plan
    if spec.kind != "moe":
        return
    tp, chosen, width = plan.axes.tp, spec.experts_per_token, scene.width(f"{block}.moe.experts")
    divided = scene.axis("cp", *(("tp",) if plan.tensor.sequence else ()))
    yield Sent("all-reduce", divided, scene.rows * spec.num_experts * 8, 1, 0, 1)  # how often each row chose each
    tokens = -(-scene.tokens // tp)
    if tp > 1 and not plan.tensor.sequence:  # each takes its share of the tokens that all have
        whole = tokens * tp
        yield Sent("all-gather", scene.axis("tp"), whole * spec.dim * width, 1, 1, 0)
        yield Sent("all-gather", scene.axis("tp"), whole * chosen * width, 0, 1)
    if plan.axes.ep > 1:
        axis = scene.expert_axes[0]
        yield Sent("all-to-all", axis, spec.num_experts * 8, 1, 0, 1)
        # tokens are spread evenly: as many come as go
        yield Sent("all-to-all", axis, tokens * chosen * spec.dim * width, 2, 2, 2)


# ---------------------------------------------------------------- pp


def pipeline_messages(scene: Scene) -> Messages:
    """Activations on, gradients back, per micro-batch and boundary; gradients of a parameter on two stages."""
    if scene.plan.axes.pp == 1:
        return
    here = {stage.number for stage in scene.stages}
    axis, times = scene.axis("pp"), scene.micro_batches
    for stage in here:
        for other, behind in ((stage - 1, stage), (stage + 1, stage + 1)):
            if 0 <= other <= scene.last_stage and other not in here:
                sizes = [scene.stream()]
                if scene.spec.kind == "moe":
                    first, end = scene.firsts[behind - 1 : behind + 1]
                    sizes.append(scene.tokens * ROUTED * _losses_width(scene, first, end))
                for size in sizes:  # activations one way, their gradients the other
                    yield Collective("send", axis, size), times
                    yield Collective("recv", axis, size), times
    if scene.weights.tied:
        yield from _copies(scene)


def _copies(scene: Scene) -> Messages:
    """The table that the first and the last stage hold: they exchange what they have of its gradient."""
    plan = scene.plan
    pp, schedule = plan.axes.pp, plan.schedule
    first = next(r for r in range(pp) if 0 in stages_of(schedule.kind, r, pp, schedule.stages))
    last = next(r for r in range(pp) if scene.last_stage in stages_of(schedule.kind, r, pp, schedule.stages))
    if first == last or scene.index["pp"] not in (first, last):
        return
    rows, *rest = scene.weights.before[0].local(plan)
    ranks = plan.axes.dp_shard * plan.axes.cp if plan.zero else 1
    place = scene.index["dp_shard"] * plan.axes.cp + scene.index["cp"] if plan.zero else 0
    share = -(-rows // ranks)
    width = {"fp64": 8, "bf16-pure": 2}.get(plan.precision, 4)
    mine = max(0, min(share, rows - place * share)) * prod(rest) * width
    for kind in ("send", "recv"):
        yield Collective(kind, scene.axis("pp"), mine), 1
