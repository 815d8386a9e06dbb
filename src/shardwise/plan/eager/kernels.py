"""What torch's eager kernels keep and need on a CPU: bytes at each moment of a step that may be its largest.

The closed form of `plan.memory` is for compiled or fused kernels on accelerators. Without them every primitive keeps
its inputs, and what is offloaded to the host stays in the same memory. Counted operator by operator from autograd's
own rules, and held against `diagnose.tracing.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from shardwise.model.course import Course, Courses, Held, Seen
from shardwise.model.ops import Attention, Matmul, Op, Pointwise
from shardwise.model.profile import Block
from shardwise.plan.plan import ContextKind, Plan
from shardwise.plan.ranks.activations import compute_width
from shardwise.plan.ranks.division import Division
from shardwise.plan.ranks.stages import Stage


class Local(NamedTuple):
    """What decides on a block's bytes per token, besides the block."""

    tp: int
    sequence: bool
    ep: int
    width: float
    """Bytes of an element."""
    divided: bool
    """Sequences are divided over ranks."""
    synchronised: bool = False
    """Batch norms are Shardwise's own, over the rows of all data ranks."""
    recomputed: bool = False
    """Blocks are recomputed operator by operator."""


def local_of(plan: Plan) -> Local:
    """The same for all blocks of a plan."""
    axes = plan.axes
    norms = axes.data * axes.cp > 1
    by_operators = plan.recompute.mode == "ops"
    return Local(axes.tp, plan.tensor.sequence, axes.ep, compute_width(plan), axes.cp > 1, norms, by_operators)


def inputs_of(division: Division) -> float:
    """Bytes per token of what is given and of labels; with `cp` of the whole sequences too, and positions."""
    cp, both = division.plan.axes.cp, division.profile.given + division.profile.labels
    return both * cp + 8.0 if cp > 1 else both


def sent_by(kind: str, stages: Sequence[Stage]) -> float:
    """Elements per token that a rank's stages send and gloo holds until the step ends: all, and by 1F1B none."""
    if kind == "1f1b":
        return 0.0
    starts = {stage.start for stage in stages}
    ends = {stage.start + len(stage.blocks) for stage in stages}
    forth = sum(stage.handed for stage in stages if stage.start + len(stage.blocks) not in starts)
    return forth + sum(stage.given for stage in stages if stage.start not in ends)


def course_of(block: Block, local: Local) -> Course | None:
    """What a step of a block was seen to hold; None: none was run, or none in which it is divided as here."""
    course = _seen(block.courses, local)
    return _over_ranks(course, block, local) if course and local.synchronised and spread_of(block) else course


def course_ahead(block: Block, local: Local) -> Course | None:
    """The same of what runs before the first block."""
    return _seen(block.courses_ahead, local)


def _seen(courses: Courses, local: Local) -> Course | None:
    if local.tp > 1 or local.ep > 1 or local.divided:
        return None
    return dict(courses).get(Seen(local.width, local.recomputed))


@lru_cache(maxsize=4096)
def _over_ranks(course: Course, block: Block, local: Local) -> Course:
    """The same where its batch norms are Shardwise's own: they keep as much, and need more to go backward."""
    found, used_up, done = [], 0.0, 0.0
    for op in reversed(block.ops[block.ahead :]):
        if isinstance(op, Pointwise) and op.spread:  # an activation in the same chain is behind it
            behind = used_up + kept_op(op, local) - op.spread * local.width
            here = course.kept.per_token - behind + _norm_needs(op, block, local)
            found.append(Held(here, course.kept.once, gradients=done))
        used_up += kept_op(op, local)
        done += op.params if isinstance(op, Matmul) and op.trained else 0.0
    return course._replace(backward=(*course.backward, *found)) if course.backward else course


def _norm_needs(op: Pointwise, block: Block, local: Local) -> float:
    """Bytes per token in which a batch norm over ranks goes backward: its gradient, both centred, and its input's.

    And the gradient of the stream, which is its own where the stream is added to what it gives.
    """
    stream = 0.0 if "batch_norm+add" in op.name else block.width * local.width
    return op.spread * (3 * max(local.width, 4.0) + local.width) + stream


@lru_cache(maxsize=4096)
def spread_of(block: Block) -> float:
    """Elements per token of the widest batch norm."""
    return max((op.spread for op in block.ops if isinstance(op, Pointwise)), default=0.0)


@lru_cache(maxsize=4096)
def kept_by(block: Block, local: Local) -> float:
    """Bytes per token that a block keeps for its backward pass, of one call."""
    return sum(kept_op(op, local) for op in block.ops[block.ahead :]) / block.calls


def head_kept(head: Block, width: float) -> float:
    """Bytes per token that the last norm and a head that was not seen keep."""
    return kept_by(head, Local(1, False, 1, width, False))


@lru_cache(maxsize=4096)
def kept_ahead(block: Block, local: Local) -> float:
    """Bytes per token that is kept of what runs before the first block."""
    return sum(kept_op(op, local) for op in block.ops[: block.ahead])


def kept_op(op: Op, local: Local) -> float:
    """Bytes per token that an operator keeps."""
    tp, _, ep, width, divided, *_ = local
    if isinstance(op, Attention):  # of ours keys and values are repeated for every query head
        whole = (op.kept or op.heads * (2 * op.qk_dim + 2 * op.v_dim)) * width + 4 * op.heads * op.rows
        copied = op.heads * op.v_dim * width + op.heads * 4 if divided else 0.0  # ours gives another layout, and merges
        tables = op.qk_dim * 4.0 if divided else 0.0  # of positions that are given
        return (whole + copied) / tp + tables
    if isinstance(op, Matmul):
        share = tp if op.experts or op.split == "row" else 1
        twice = 2 if op.experts and ep > 1 and op.split == "column" else 1
        return op.saves * width * max(op.chosen, 1) * twice / share
    return _kept_apart(op, local)


def _kept_apart(op: Pointwise, local: Local) -> float:
    tp, sequence, _, width, *_ = local
    choices = max(op.per_choice, 1)
    if op.name == "qk-norm":
        return op.saves_apart * max(width, 4.0) / tp
    if op.name == "norm":
        shard = tp if sequence else 1
        if op.upcast:  # RMSNorm computes in fp32
            return (op.saves_apart * max(width, 4.0) + 4) / shard
        if op.kernels == 1 and op.saves == op.saves_apart:  # LayerNorm: its input, mean and deviation
            return (op.saves_apart * width + 8) / shard
    if op.name == "combine":  # the results, and the same in the places of their tokens
        return 2 * op.saves_apart * width * choices / tp
    if op.name == "route":
        return op.saves_apart * 4.0 / (tp if sequence else 1)
    wide = op.widened if width < 4 else 0
    shard = tp if op.split == "heads" or op.per_choice else 1
    return (op.saves_apart * width + wide + op.masks) * choices / shard


@lru_cache(maxsize=4096)
def working_in(block: Block, local: Local) -> float:
    """Bytes per token, beside what is kept, at the largest moment of a block's backward: behind the last product.

    Of routed tokens the gradients of the stream take the place of what the sum over choices kept, which is used up.
    Where sequences are sharded, a product's input is gathered again for the gradient of its weight, and the gradient of
    the input is whole until it is summed and cut; the shards of both streams are there too.
    """
    tp, sequence, _, width, _, synchronised, _ = local
    if synchronised and spread_of(block):
        return _behind_norms(block, local)
    hidden, last = _before_last_product(block)
    if hidden is None or last is None:
        return max((op.takes + op.gives for op in block.matmuls), default=2 * block.width) * width
    # swiglu: three gradients, less the input of the product; of relu that is needed still
    inner = (hidden.saves * max(hidden.per_choice, 1) or 2 * last.takes) / tp
    stream = 0.0 if hidden.per_choice else (2 + 2 / tp) * block.width if sequence else block.width
    return (inner + stream) * width


def _behind_norms(block: Block, local: Local) -> float:
    """The same while one of its batch norms over the ranks goes backward, the one that needs most.

    What operators behind it kept is used up.
    """
    worst = used_up = 0.0
    for op in reversed(block.ops):
        if isinstance(op, Pointwise) and op.spread:
            worst = max(worst, _norm_needs(op, block, local) - used_up)
        used_up += kept_op(op, local)
    return worst


class Exchanged(NamedTuple):
    """The backward of attention over other ranks' keys."""

    held: float
    """Bytes per token, beside what is kept."""
    used_up: float
    """Bytes per token that what follows attention kept."""
    waiting: float
    """Bytes per token of gradients that wait there, where those of weights are made later."""
    done: float
    """Elements of the weights that follow."""


@lru_cache(maxsize=4096)
def attention_in(block: Block, local: Local, kind: ContextKind, ranks: int) -> Exchanged | None:
    """What is there in a block while its attention goes backward; None: it has no other ranks' keys.

    Gathered: whole keys and values, their gradients in the type of sums, those of the longest piece (three quarters of
    a zigzag's keys), and those of the queries. Ring: keys and values of another rank, those that come next, gradients
    of both in the type of sums (that are made, that go, that come), and what a kernel takes of half the queries. Of
    both the gradients of the result and of the stream.
    """
    place = next((i for i, op in enumerate(block.ops) if isinstance(op, Attention)), None)
    if place is None or ranks == 1 or kind == "ulysses":
        return None
    core, width = block.ops[place], local.width
    assert isinstance(core, Attention)
    wide = max(width, 4.0)
    keys, queries = core.heads * (core.qk_dim + core.v_dim), core.heads * core.qk_dim
    if kind == "gather":
        held = keys * ranks * (wide + width + 0.75 * width) + queries * wide + keys * width
    else:
        held = (queries + 3 * keys) * wide + keys * width * (1 + (ranks > 2)) + queries * width
    behind = block.ops[place + 1 :]
    products = [(op, local.tp if op.split in ("column", "row") else 1) for op in behind if isinstance(op, Matmul)]
    return Exchanged(
        held=held / local.tp + 2 * block.width * width,
        used_up=sum(kept_op(op, local) for op in behind),
        waiting=sum(op.gives / (share if op.split == "column" else 1) for op, share in products) * width,
        done=sum(map(partial(_waits, local=local), block.ops[place + 1 :])),
    )


def _before_last_product(block: Block) -> tuple[Pointwise | None, Matmul | None]:
    """The activation whose result the last row-sharded product takes, and that product."""
    places = [place for place, op in enumerate(block.ops) if isinstance(op, Matmul) and op.split == "row"]
    if not places:
        return None, None
    before = reversed(block.ops[: places[-1]])
    hidden = next((op for op in before if isinstance(op, Pointwise) and (op.split == "heads" or op.per_choice)), None)
    last = block.ops[places[-1]]
    assert isinstance(last, Matmul)
    return hidden, last


@lru_cache(maxsize=4096)
def outputs_of(block: Block, local: Local) -> tuple[float, float]:
    """Per-operator recompute: bytes per token kept besides the stream, of one call.

    And those of them that backward has twice or has used up.
    """
    tp, sequence, _, width, *_ = local
    kept = used = 0.0
    for op in block.ops[block.ahead :]:
        if isinstance(op, Attention):
            share = (op.heads * op.v_dim * width + 4 * op.heads) * op.rows / tp
            kept, used = kept + share + op.scores * width / tp, used + share
        elif isinstance(op, Matmul) and not op.again:
            share = op.gives * width / (tp if op.split == "column" else 1)
            kept += share
            used += share if op.name != "down" else 0.0
            if sequence and op.split == "row" and not op.experts:  # what is summed up and cut is kept besides
                kept += share / tp
    return kept / block.calls, used / block.calls


@lru_cache(maxsize=4096)
def deferred_in(block: Block, local: Local) -> float:
    """Bytes per token of gradients that wait for the weights' part of a divided backward: of what each weight gives.

    That of a norm over the stream is mostly another's too, but not where it computes in fp32.
    """
    tp = local.tp
    outs = sum(op.gives / (tp if op.split == "column" else 1) for op in block.matmuls if op.trained)
    norms = sum(op.saves for op in block.ops if isinstance(op, Pointwise) and op.name == "qk-norm")
    streams = 4.0 * upcast_norms(block) / (tp if local.sequence else 1) if local.width < 4 else 0.0
    return (outs + norms / tp) * local.width + block.width * (streams or local.width)


@lru_cache(maxsize=4096)
def norms_in(block: Block, local: Local) -> tuple[Held, ...]:
    """What is there, beside what is kept, while each norm that computes in fp32 goes backward.

    Five tensors in fp32 of its input's size in the place of the one that it has used up, and the stream's gradient.
    What operators behind it kept is used up.
    """
    found, used_up, done = [], 0.0, 0.0
    for op in reversed(block.ops[block.ahead :]):
        if isinstance(op, Pointwise) and op.name == "norm" and op.upcast:
            size = op.saves / (local.tp if local.sequence else 1)
            found.append(Held(size * (4 * max(local.width, 4.0) + local.width) - used_up, gradients=done))
        used_up += kept_op(op, local)
        done += _waits(op, local)
    return tuple(found)


def _waits(op: Op, local: Local) -> float:
    """Elements of an operator's weight on a rank whose gradient waits for those of its block: not of `ep`'s experts."""
    if not isinstance(op, Matmul) or not op.trained or (op.experts and local.ep > 1):
        return 0.0
    return op.params / (local.tp if op.split in ("column", "row") else 1)


def upcast_norms(block: Block) -> int:
    """Norms over the stream that compute in fp32 whatever the type, operator by operator."""
    return sum(op.name == "norm" and op.upcast for op in block.ops if isinstance(op, Pointwise))
