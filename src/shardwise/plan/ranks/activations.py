"""Bytes that a micro-batch leaves on a rank between its forward and its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardwise.model.ops import Attention, Matmul, Op, Pointwise
from shardwise.model.profile import Block
from shardwise.plan.costs.kernels import BYTES
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.engines import casts_weights
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.stack import Stack
from shardwise.plan.workload import PACKED, Adapters

PARTS = {
    "qkv": ("q", "k", "v", "qkv"),
    "q": ("q",),
    "q-down": ("q",),
    "kv-down": ("k",),
    "kv-up": ("v",),
    "out": ("o",),
    "up": ("gate", "up"),
    "down": ("down",),
}
"""Parameters in a product, as adapters name them."""


def parts_of(op: Matmul) -> tuple[str, ...]:
    """Parameters in it, as adapters name them."""
    return PARTS.get(op.name.removeprefix("shared-").removeprefix("experts-"), ())


GELU = 4
"""Tensors of `0.5 x (1 + tanh(a (x + b x^3)))` in primitives: `x`, the tanh, and both factors of the last product."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What decides on saved bytes, besides the block: sizes are per rank."""

    tp: int
    sequence: bool
    width: float
    """Bytes of an element in the compute dtype."""
    residual: float
    """Bytes of an element of the residual stream."""
    scores: float
    """Bytes of an element of probabilities, where attention keeps any."""
    attention: str
    drops: bool
    """Those are dropped in parts: `Stack.drops_scores`."""
    fused: bool
    mask: float
    """Bytes of an element of dropout's mask."""
    gelu: int
    """Tensors that an unfused GELU keeps."""
    keys: int
    """Sequence length."""
    inputs: float = 0.0
    """Bytes of an element of a product's kept input; 0: as `width`."""
    products: float = 1.0
    """Share of the products' outputs that per-operator recompute keeps."""
    biased: float = 1.0
    """The same of those with a bias: `Stack.keeps_biased`."""
    experts: bool = True
    """It keeps those of experts: `Stack.keeps_experts`."""
    gathered: bool = False
    """A column-sharded product keeps its gathered input (DTensor), not its shard of the sequence (Megatron)."""
    weighs_inside: bool = False
    """What experts give is not kept: `Stack.weighs_inside`."""
    weighs_wide: bool = False
    """It is kept in fp32: `Stack.weighs_wide`."""
    splits_gate: bool = False
    """A gated activation is two kernels: `Stack.splits_gate`."""
    adapters: Adapters | None = None
    exchanged: bool = False
    """Per-operator recompute keeps what ranks send each other of experts' tokens: `Stack.keeps_exchanged`."""
    attended: bool = False
    """Recomputed blocks keep what attention gives: `Stack.keeps_attention`."""
    once: bool = False
    """What comes back is summed up on its way: `Stack.once_per_node`."""
    returns: bool = False
    """Packed products give what they are given: their library computes in 16 bits and casts to its input's type."""


def saving_of(plan: Plan, stack: Stack, seq_len: int, compute: str = "", adapters: Adapters | None = None) -> Saving:
    """The knobs of a plan under a stack; `compute` and `adapters` are the workload's."""
    exchanged = stack.keeps_exchanged and plan.axes.ep > 1
    return _saving(plan.axes.tp, plan.tensor.sequence, plan.precision, exchanged, (stack, seq_len, compute, adapters))


@lru_cache(maxsize=1024)
def _saving(
    tp: int, sequence: bool, precision: str, exchanged: bool, rest: tuple[Stack, int, str, Adapters | None]
) -> Saving:
    stack, seq_len, compute, adapters = rest
    width = _WIDTHS[precision]
    return Saving(
        tp=tp,
        sequence=sequence,
        width=width,
        residual=max(stack.residual_bytes or width, adapters.rest if adapters else 0.0),
        scores=4.0 if stack.wide_softmax else max(stack.residual_bytes or width, adapters.rest if adapters else 0.0),
        attention=stack.attention,
        drops=stack.drops_scores,
        fused=stack.fused,
        mask=width if stack.wide_masks else 1.0,
        gelu=GELU if stack.gelu_apart else 1,
        keys=seq_len,
        inputs=BYTES[compute] if stack.saves_low and compute in ("fp8", "fp4") else 0.0,
        products=stack.keeps_products,
        biased=stack.keeps_biased,
        experts=stack.keeps_experts,
        gathered=stack.saves_gathered,
        weighs_inside=stack.weighs_inside,
        weighs_wide=stack.weighs_wide,
        splits_gate=stack.splits_gate,
        adapters=adapters,
        exchanged=exchanged,
        attended=stack.keeps_attention,
        once=stack.once_per_node,
        returns=bool(adapters and adapters.base and adapters.rest > width),
    )


_WIDTHS = {**BYTES, "bf16-pure": BYTES["bf16"], "fp8": BYTES["bf16"]}


def compute_width(plan: Plan) -> float:
    """Bytes of an activation."""
    return width_of(plan.precision)


def width_of(precision: str) -> float:
    """Bytes of an activation under it. KeyError: there is no such precision."""
    return _WIDTHS[precision]


GATHERED = ("bf16", "fp16", "fp8")
"""Precisions in which `fully_shard` holds the parameters of several processes, whatever `zero` is."""


def is_gathered(plan: Plan) -> bool:
    """Whether `fully_shard` holds the parameters: zero 1 to 3, and mixed precision on more than one process."""
    return plan.zero > 0 or (plan.precision in GATHERED and not casts_weights(plan))


def is_held(plan: Plan, stack: Stack) -> bool:
    """Whether each block's parameters come and go by the host's hooks: other engines have some at zero 3 alone."""
    return is_gathered(plan) if stack.keeps_shards else plan.zero == 3


@lru_cache(maxsize=4096)
def saved_bytes(block: Block, how: Saving) -> float:
    """Bytes per token that a block keeps for its backward pass, without recompute.

    Source of the count: arXiv:2205.05198, section 4.1, per operator; fused attention keeps its inputs, output and one
    fp32 number per query and head (arXiv:2205.14135).
    """
    return sum(_saved(op, how) for op in block.ops[block.ahead :])


@lru_cache(maxsize=4096)
def saved_ahead(block: Block, how: Saving) -> float:
    """Bytes per token that is kept of what runs before the first block, whatever is recomputed."""
    return sum(_saved(op, how) for op in block.ops[: block.ahead])


def _saved(op: Op, how: Saving) -> float:
    if isinstance(op, Attention):
        return _saved_attention(op, how)
    if isinstance(op, Matmul):
        return _saved_input(op, how)
    shard = _shard(op, how)
    width = how.residual if (op.split == "sequence" and op.name == "norm") or how.returns else how.width
    if op.name == "combine" and how.weighs_inside:
        return 0.0
    if op.name == "combine" and how.weighs_wide:
        width = 4.0
    kept = op.saves * width
    if not how.fused:
        first = max(width, 4.0) if op.upcast else width
        kept = op.saves * first + (op.saves_apart - op.saves) * width + (op.widened if how.width < 4 else 0)
        kept *= how.gelu if op.name == "gelu" else 1
    elif how.splits_gate and op.name == "swiglu":
        kept += op.saves / 2 * (2 if op.per_choice and how.weighs_inside else 1) * width
    return (kept + op.masks * how.mask) * max(op.per_choice, 1) / shard


def _saved_input(op: Matmul, how: Saving) -> float:
    if not op.trained:
        return 0.0
    width = how.inputs if how.inputs and op.name not in ("head", "router") else how.width
    kept = (op.saves * width if how.adapters is None else _adapted(op, how, width)) * max(op.chosen, 1)
    if not how.fused and how.residual > how.width and how.adapters is None:
        kept *= op.parts
    if op.split == "row":  # its input is sharded along its own inner size
        return kept / (how.tp if not op.experts else 1)
    return kept / (how.tp if how.sequence and not (how.gathered and op.split == "column") else 1)


def _adapted(op: Matmul, how: Saving, width: float) -> float:
    """Bytes per row that the adapters of a frozen product keep of its input."""
    adapters = how.adapters or Adapters(on=())
    beside = sum(part in adapters.on for part in parts_of(op))
    own = PACKED[adapters.base].inputs if adapters.base else 0.0
    shared = adapters.keeps or own > 0 or (beside > 0 and not adapters.copies)
    own += width * adapters.lasts
    if how.returns:  # each parameter's own copy in 16 bits
        return op.ins * op.rows * (width * adapters.keeps * op.parts + own + beside * adapters.copies)
    return op.saves * width * shared + op.ins * op.rows * (own + beside * adapters.copies)


def _saved_attention(op: Attention, how: Saving) -> float:
    fused = op.saves * how.width + 4 * op.heads * op.rows
    if how.attention in ("unfused", "fused-softmax"):
        scores = op.heads * op.rows * how.keys * op.reach
        behind = how.width + how.mask if how.drops else how.width * (how.scores > how.width)
        kept = how.scores + behind  # probabilities, and behind them dropout's with its mask, or what they are cast to
        return (op.saves * how.width + scores * kept) / how.tp
    return fused / how.tp


def _shard(op: Pointwise, how: Saving) -> float:
    if op.per_choice:
        return how.tp if how.sequence or op.split == "heads" else 1
    if op.split == "heads":
        return how.tp
    return how.tp if op.split == "sequence" and how.sequence else 1


@lru_cache(maxsize=4096)
def kept_outputs(block: Block, how: Saving) -> float:
    """Bytes per token under per-operator recompute: it keeps the outputs of products and attention, and its input.

    And what experts' ranks send each other, where the stack's list has that. Operator by operator a share of the
    products is every second, say, from the first on; of what a compiler needs behind them it is as much in bytes.
    """
    total, passed = _kept_inputs(block, how), 0
    for op in block.ops[block.ahead :]:
        if isinstance(op, Matmul):
            shard = how.tp if op.split == "column" or how.sequence else 1
            listed = not op.again and (how.experts or not op.experts)
            given = op.gives * (how.biased if op.biased else how.products)
            if listed and 0 < how.products < 1 and not (how.fused or op.experts or op.biased):
                each = outputs_of(op, block)
                given = sum(size for n, size in enumerate(each, start=passed) if n % round(1 / how.products) == 0)
                passed += len(each)
            total += given * how.width / shard * listed
        elif isinstance(op, Attention):
            total += _given(op, how)
        elif how.exchanged and op.name == "permute":
            row = op.moved / 2  # a token goes to each of its experts, and comes back from each, or summed up
            total += row * (op.per_choice + (1 if how.once else op.per_choice)) * how.width / _shard(op, how)
    return min(total, saved_bytes(block, how))


def outputs_of(op: Matmul, block: Block) -> tuple[float, ...]:
    """Elements per token that each of a product's parameters gives, in the order in which they run."""
    if op.name == "qkv" and op.parts == 3 and len(block.attentions) == 1:
        core = block.attentions[0]
        return core.heads * core.qk_dim, core.kv_heads * core.qk_dim, core.kv_heads * core.v_dim
    return (op.gives / max(op.parts, 1),) * max(op.parts, 1)


@lru_cache(maxsize=4096)
def working_bytes(block: Block, how: Saving) -> float:
    """Bytes per token alive for a moment in the backward pass: gradients of the widest operator's input and output.

    Of attention in primitives those of its probabilities and scores, once what is behind it has gone. Of what experts
    give and an operator weighs in fp32 three: its gradient, that of the weighed, and their product before it is summed;
    beside compiled blocks one product (`torch.bmm`) weighs: its gradient, and that in 16 bits in two orders.
    """
    widest = behind = 0.0
    for op in reversed(block.ops) if how.attention == "unfused" else block.ops:
        behind += _saved(op, how)
        if isinstance(op, Attention) and how.attention == "unfused":
            scores = op.heads * op.rows * how.keys * op.reach / how.tp
            widest = max(widest, 2 * how.scores * scores + _saved(op, how) - behind)
        if isinstance(op, Matmul):
            outs = op.gives / (how.tp if op.split == "column" else 1)
            ins = op.takes / (how.tp if op.split == "row" else 1)
            widest = max(widest, (outs + ins) * (how.residual if how.returns else how.width))
        if op.name == "combine" and how.weighs_wide:
            widest = max(widest, (2 if how.fused else 3) * _saved(op, how))
    return widest


@lru_cache(maxsize=4096)
def widest_bytes(block: Block, how: Saving) -> float:
    """Bytes per token of the largest tensor: what a product takes or gives, or probabilities of attention."""
    widest = 0.0
    for op in block.ops:
        if isinstance(op, Attention) and how.attention in ("unfused", "fused-softmax"):
            widest = max(widest, op.heads * op.rows * how.keys * op.reach / how.tp * how.scores)
        if isinstance(op, Matmul):
            outs = max(outputs_of(op, block)) / (how.tp if op.split == "column" else 1)
            widest = max(widest, outs * how.width, op.takes / (how.tp if op.split == "row" else 1) * how.width)
    return widest


def kept_bytes(block: Block, index: int, plan: Plan, how: Saving) -> float:
    """Bytes per token that block `index` of the chain keeps under the plan's recompute."""
    return _kept(block, plan.recompute.mode if is_recomputed(index, plan) else "none", how)


def _kept(block: Block, mode: str, how: Saving) -> float:
    ahead = saved_ahead(block, how) if block.ahead else 0.0
    if mode == "none":
        return ahead + saved_bytes(block, how)
    if mode == "ops":
        return ahead + kept_outputs(block, how)
    kept = sum(_given(op, how) for op in block.attentions) if how.attended else 0.0
    return ahead + _kept_inputs(block, how) + kept


def _given(op: Attention, how: Saving) -> float:
    """Bytes per token of what fused attention gives: its output, and a number per head in fp32."""
    return (op.heads * op.v_dim * how.width + 4 * op.heads) * op.rows / how.tp


def _kept_inputs(block: Block, how: Saving) -> float:
    """Bytes per token of what all calls of a block are given."""
    return (block.width + block.beside) * block.calls * how.residual / (how.tp if how.sequence else 1)


def kept_in(stage: Stage, plan: Plan, how: Saving) -> float:
    """Bytes per token that a stage keeps under the plan's recompute."""
    total = 0.0
    for block, count, repeats in recomputed_in(stage, plan):
        total += _kept(block, plan.recompute.mode, how) * repeats if repeats else 0.0
        total += _kept(block, "none", how) * (count - repeats) if count > repeats else 0.0
    return total


def again_in(stage: Stage, plan: Plan, how: Saving) -> float:
    """Bytes per token of a block that is computed again, beyond what the stage has kept.

    Those behind it have given back what they kept, all of it where they are not recomputed; of activations on the host
    that took no room.
    """
    alike = len(stage.counts) < 2 and plan.recompute.mode in ("blocks", "ops")
    if alike or plan.offload.activations:
        return max((saved_bytes(block, how) / block.calls for block, _ in stage.counts), default=0.0)
    most = behind = 0.0
    for n, block in reversed([*enumerate(stage.blocks, start=stage.start)]):
        if is_recomputed(n, plan):
            most = max(most, saved_bytes(block, how) / block.calls - behind)
        behind += kept_bytes(block, n, plan, how)
    return most


def recomputed_in(stage: Stage, plan: Plan) -> Iterator[tuple[Block, int, int]]:
    """Distinct blocks of a stage, how many there are of each, and how many of them the plan recomputes."""
    if plan.recompute.mode in ("every", "ratio"):
        on = Counter(block for i, block in enumerate(stage.blocks, start=stage.start) if is_recomputed(i, plan))
        yield from ((block, count, on[block]) for block, count in stage.counts)
    else:
        yield from ((block, count, count * (plan.recompute.mode != "none")) for block, count in stage.counts)


def is_recomputed(index: int, plan: Plan) -> bool:
    """True where the plan recomputes block `index` of the whole chain."""
    recompute = plan.recompute
    if recompute.mode in ("blocks", "ops"):
        return True
    if recompute.mode == "every":
        return recompute.every > 0 and index % recompute.every == 0
    if recompute.mode == "ratio":
        return int((index + 1) * recompute.ratio + 1e-9) > int(index * recompute.ratio + 1e-9)
    return False
