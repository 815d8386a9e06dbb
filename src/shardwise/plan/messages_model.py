"""What the model's own axes send in a step: activations and their gradients over `tp`, `cp`, `ep` and `pp`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from shardwise.plan.messages import Collective, Messages, Scene, Stage
from shardwise.plan.plan import Recompute
from shardwise.plan.schedule import stages_of

ROUTED = 2
"""Auxiliary losses per token that blocks with experts pass on, in fp32."""


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
    recompute, count = scene.plan.recompute, stage.end - stage.first
    chosen = sum(_is_recomputed(i, recompute) for i in range(stage.first, stage.end))
    for sent in (*_tensor(scene), *_context(scene), *_experts(scene)):
        again = sent.again_ops if recompute.mode == "ops" and sent.again_ops is not None else sent.again
        times = count * (sent.forward + sent.backward) + chosen * again
        yield Collective(sent.kind, sent.axis, sent.num_bytes), times * scene.micro_batches


def _is_recomputed(index: int, recompute: Recompute) -> bool:
    if recompute.mode == "every":
        return index % recompute.every == 0
    if recompute.mode == "ratio":
        return int((index + 1) * recompute.ratio + 1e-9) > int(index * recompute.ratio + 1e-9)
    return recompute.mode != "none"


# ---------------------------------------------------------------- tp


def _tensor(scene: Scene) -> Iterator[Sent]:
    """Column and row layers: arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2, with sequence shards."""
    plan, axis = scene.plan, scene.axis("tp")
    if plan.axes.tp == 1:
        return
    pairs = 1 if scene.spec.kind == "moe" else 2  # attention, and a feed-forward that is not made of experts
    if plan.tensor.sequence:  # the sum behind the last row layer is behind all that is kept
        yield Sent("all-gather", axis, scene.stream, pairs, pairs, pairs)
        yield Sent("reduce-scatter", axis, scene.stream, pairs, pairs, 1, 0)
    else:
        yield Sent("all-reduce", axis, scene.stream, pairs, pairs, 1)


def _ends(scene: Scene, stage: Stage) -> Messages:
    """Embedding, head and loss; and where sequences are sharded, the first and the last block of the stage."""
    plan, axis, times = scene.plan, scene.axis("tp"), scene.micro_batches
    if stage.number == 0 or (scene.weights.tied and stage.number == scene.last_stage):  # who has the table looks up
        yield Collective("all-reduce", axis, scene.stream), times
    if plan.tensor.sequence:
        yield Collective("all-gather", axis, scene.stream), 2 * times  # forward behind, backward before the blocks
        if scene.spec.kind == "moe":
            yield Collective("all-gather", axis, scene.tokens * ROUTED * 4), times
    if stage.number == scene.last_stage:
        yield Collective("all-reduce", axis, scene.stream), times
        if plan.tensor.loss:  # largest logit, sum of exponentials, the label's logit
            yield Collective("all-reduce", axis, scene.tokens * max(scene.width, 4)), 3 * times
        else:
            yield Collective("all-gather", axis, scene.tokens * scene.spec.vocab_size * scene.width), times


# ---------------------------------------------------------------- cp


def _context(scene: Scene) -> Iterator[Sent]:
    plan = scene.plan
    if plan.axes.cp == 1:
        return
    heads = scene.rows * scene.spec.num_heads // plan.axes.tp * scene.spec.head_dim  # keys are repeated per query head
    sizes, here = scene.layout.sizes, scene.index["cp"]
    sums = max(scene.width, 4)
    axis, ranks = scene.axis("cp"), plan.axes.cp
    if plan.context.kind == "gather":
        most = 2 * heads * max(sizes) * ranks  # keys and values, filled up to the longest rank's
        yield Sent("all-gather", axis, most * scene.width, 1, 1, 1)
        yield Sent("reduce-scatter", axis, most * sums, 0, 1)
    elif plan.context.kind == "ulysses":
        local, whole = heads * sizes[here], heads // ranks * scene.workload.seq_len
        yield Sent("all-to-all", axis, max(local, whole) * scene.width, 4, 4, 4)
    else:
        for step in range(ranks):  # keys and values go on while there is someone who has not seen them
            going, coming = sizes[(here - step) % ranks], sizes[(here - step - 1) % ranks]
            for kind, tokens in (("send", going), ("recv", coming)):
                if step < ranks - 1:
                    yield Sent(kind, axis, heads * tokens * scene.width, 2, 2, 2)
                yield Sent(kind, axis, heads * tokens * sums, 0, 2)


# ---------------------------------------------------------------- experts


def _experts(scene: Scene) -> Iterator[Sent]:
    spec, plan = scene.spec, scene.plan
    if spec.kind != "moe":
        return
    tp, chosen = plan.axes.tp, spec.experts_per_token
    divided = scene.axis("cp", *(("tp",) if plan.tensor.sequence else ()))
    yield Sent("all-reduce", divided, scene.rows * spec.num_experts * 8, 1, 0, 1)  # how often each row chose each
    tokens = -(-scene.tokens // tp)
    if tp > 1 and not plan.tensor.sequence:  # each takes its share of the tokens that all have
        whole = tokens * tp
        yield Sent("all-gather", scene.axis("tp"), whole * spec.dim * scene.width, 1, 1, 0)
        yield Sent("all-gather", scene.axis("tp"), whole * chosen * scene.width, 0, 1)
    if plan.axes.ep > 1:
        axis = scene.expert_axes[0]
        yield Sent("all-to-all", axis, spec.num_experts * 8, 1, 0, 1)
        # tokens are spread evenly: as many come as go
        yield Sent("all-to-all", axis, tokens * chosen * spec.dim * scene.width, 2, 2, 2)


# ---------------------------------------------------------------- pp


def pipeline_messages(scene: Scene) -> Messages:
    """Activations on, gradients back, per micro-batch and boundary; gradients of a parameter on two stages."""
    plan = scene.plan
    if plan.axes.pp == 1:
        return
    sizes = [scene.stream, *([scene.tokens * ROUTED * 4] if scene.spec.kind == "moe" else [])]
    here = {stage.number for stage in scene.stages}
    axis, times = scene.axis("pp"), scene.micro_batches
    for stage in here:
        ways = ((stage - 1, stage > 0), (stage + 1, stage < scene.last_stage))
        for size in sizes:
            for other, exists in ways:
                if exists and other not in here:  # activations one way, their gradients the other
                    yield Collective("send", axis, size), times
                    yield Collective("recv", axis, size), times
    if scene.weights.tied:
        yield from _copies(scene, here)


def _copies(scene: Scene, here: set[int]) -> Messages:
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
    mine = max(0, min(share, rows - place * share)) * prod(rest) * (8 if plan.precision == "fp64" else 4)
    for kind in ("send", "recv"):
        yield Collective(kind, scene.axis("pp"), mine), 1
