"""What a plan makes of a profile on each rank: stages of the pipeline, local parameters, tokens per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from shardwise.errors import PlanError
from shardwise.model.profile import Block, Profile
from shardwise.plan.plan import Plan, Schedule
from shardwise.plan.ranks.activations import Saving, saving_of
from shardwise.plan.ranks.stages import Ranks, Stage, alike_ranks, stages_of_ranks
from shardwise.plan.stack import Stack
from shardwise.plan.workload import Workload

Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Division:
    """A profile under a plan and a workload. All counts are of one rank."""

    profile: Profile
    plan: Plan
    workload: Workload
    rule: str = "balanced"
    """How blocks are cut into stages: `Stack.cut`."""
    splits_experts: bool = True
    """`tp` divides experts where `ep` does not: `Stack.splits_experts`."""
    fills_up: bool = False
    """Stacks of experts are cut by `sharded_dim`, and filled up where shards do not divide them."""

    @property
    def compute(self) -> str:
        """Dtype of the products that are not in the plan's precision; empty: all are."""
        as_planned = "fp8" if self.plan.float8.recipe != "none" and not self.plan.float8.emulate else ""
        return self.workload.compute or as_planned

    def saving(self, stack: Stack) -> Saving:
        """What decides on the bytes that its operators keep."""
        return saving_of(self.plan, stack, self.workload.seq_len, self.compute, self.workload.adapters)

    @cached_property
    def micro_batch(self) -> float:
        """Sequences per micro-batch and data rank."""
        return self.workload.global_batch / (self.plan.axes.data * self.plan.batch.micro_batches)

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank (before `tp` shards sequences)."""
        return self.micro_batch * self.workload.seq_len / self.plan.axes.cp

    @cached_property
    def ranks(self) -> Ranks:
        """Stages of each rank of the `pp` axis, in the order of the chain."""
        return stages_of_ranks(*self._cut)

    @property
    def _cut(self) -> tuple[Profile, int, Schedule, str, int]:
        """What decides on the stages."""
        pp, schedule = self.plan.axes.pp, self.plan.schedule
        seq_len = self.workload.seq_len if pp > 1 and self.rule == "balanced" else 0
        return self.profile, pp, schedule if pp > 1 else Schedule(), self.rule, seq_len

    @property
    def firsts(self) -> tuple[int, ...]:
        """Index of the first block of each stage, as `parallel.pipeline.first_blocks` finds them with a sample."""
        return tuple(sorted(stage.start for stages in self.ranks for stage in stages))

    @cached_property
    def sent(self) -> float:
        """Elements per token of the largest message between two stages."""
        return max((stage.handed for stages in self.ranks for stage in stages), default=0.0)

    @cached_property
    def shards(self) -> int:
        """Ranks that share the optimizer state of a dense parameter."""
        axes = self.plan.axes
        return axes.dp_shard * axes.cp if self.plan.zero else 1

    @cached_property
    def parts(self) -> tuple[tuple[float, ...], ...]:
        """Of each rank of the pipeline, the shares that its stages have of its parameters."""
        sizes = [[self.whole([stage]) for stage in stages] for stages in self.ranks]
        return tuple(tuple(size / (sum(each) or 1.0) for size in each) for each in sizes)

    @cached_property
    def part_left(self) -> float:
        """Of a block's gathered weights, what stays from its forward to its backward pass: `reshard=2` leaves half."""
        dial = self.plan.communication.reshard_after_forward
        return 1 / dial if type(dial) is int and dial < self.shards else 0.0

    @cached_property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer state of an expert."""
        axes = self.plan.axes
        if not self.plan.zero:
            return 1
        return max(1, axes.dp_shard * axes.cp * axes.tp // axes.ep) if axes.ep > 1 else self.shards

    @property
    def expert_split(self) -> int:
        """Ranks that a layer's experts are divided over."""
        axes = self.plan.axes
        return axes.ep if axes.ep > 1 else axes.tp if self.splits_experts else 1

    def dense(self, block: Block) -> float:
        """Parameters of a block outside experts."""
        return _dense(block, self.plan.axes.tp)

    def experts(self, block: Block) -> float:
        """Expert parameters of a block."""
        return block.expert_params / self.expert_split

    def filled(self, block: Block) -> float:
        """Expert parameters of a block, as many for every shard as the fullest one has: it has whole experts."""
        shards, axes = self.expert_shards, self.plan.axes
        if not self.fills_up or shards == 1:
            return self.experts(block)
        return _filled(block, shards, axes.ep, 1 if axes.ep > 1 else axes.tp) / self.expert_split

    def whole_of(self, block: Block) -> float:
        """Parameters of a block on a rank, before data axes shard them, its experts filled up."""
        return self.dense(block) + self.filled(block)

    def sent_of(self, block: Block) -> float:
        """Those of them whose gradients are reduced together: of `ep`'s experts apart from the others."""
        dense, experts = self.dense(block), self.filled(block)
        return max(dense, experts) if self.plan.axes.ep > 1 else dense + experts

    def owned_by(self, block: Block) -> float:
        """Those of them that one rank updates."""
        return self.dense(block) / self.shards + self.filled(block) / self.expert_shards

    def largest_product(self, block: Block) -> float:
        """Parameters of the largest product of a block on a rank, as it is multiplied; of experts all of the rank's."""
        tp = self.plan.axes.tp
        sizes = (
            op.params / (self.expert_split if op.experts else tp if op.split != "none" else 1) for op in block.matmuls
        )
        return max(sizes, default=0.0)

    def whole(self, stages: Sequence[Stage]) -> float:
        """Parameters of some stages, before data axes shard them."""
        dense, experts, _ = self._rank_params.get(id(stages)) or self._params(stages)
        return dense + experts

    def buffers(self, stages: Sequence[Stage]) -> int:
        """Bytes of buffers on a rank with some stages: not of blocks of others."""
        elsewhere = sum(block.buffers for block in self.profile.blocks)
        return self.profile.buffers - elsewhere + sum(block.buffers for stage in stages for block in stage.blocks)

    def owned(self, stages: Sequence[Stage]) -> float:
        """Parameters of some stages that one rank updates: `zero` >= 1 shards them over the data axes."""
        dense, _, filled = self._rank_params.get(id(stages)) or self._params(stages)
        return dense / self.shards + filled / self.expert_shards

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For each rank the first of those that hold, and recompute, the same."""
        if self.plan.recompute.mode in ("every", "ratio"):  # these go by a block's place in the chain
            return tuple(range(len(self.ranks)))
        return alike_ranks(*self._cut)

    def of_ranks(self, ask: Callable[[tuple[Stage, ...]], Asked]) -> list[Asked]:
        """What `ask` finds for the stages of each rank; of ranks that hold the same blocks and ends, it is asked once.

        It must not go by where in the chain they lie, nor by what they are sent.
        """
        found = {rank: ask(self.ranks[rank]) for rank in dict.fromkeys(self._alike)}
        return [found[rank] for rank in self._alike]

    @cached_property
    def _rank_params(self) -> dict[int, tuple[float, float, float]]:
        """`_params` of each of `ranks`, by its `id`: they are asked for many times."""
        return dict(zip(map(id, self.ranks), self.of_ranks(self._params), strict=True))

    def _params(self, stages: Sequence[Stage]) -> tuple[float, float, float]:
        """(outside experts, in experts, in experts filled up) of some stages."""
        counts = [each for stage in stages for each in stage.counts]
        dense = sum(self.stage_dense(stage) for stage in stages)
        experts = sum(self.experts(block) * count for block, count in counts)
        return dense, experts, sum(self.filled(block) * count for block, count in counts)

    def stage_dense(self, stage: Stage) -> float:
        """Parameters of a stage outside experts, with embedding and head."""
        total = sum(self.dense(block) * count for block, count in stage.counts)
        if stage.first:
            total += self.embedding
        if stage.last:
            tied = self.profile.tied and stage.first
            total += self.dense(self.profile.head) - (self.embedding_table if tied else 0.0)
        return total

    def stage_experts(self, stage: Stage) -> float:
        """Expert parameters of a stage."""
        return sum(self.experts(block) * count for block, count in stage.counts)

    def frozen_outside(self, stages: Sequence[Stage]) -> float:
        """Parameters of some stages without a gradient, outside blocks."""
        profile, first = self.profile, any(stage.first for stage in stages)
        tied = profile.frozen if profile.tied and first else 0  # they count once
        head = profile.head.frozen - min(tied, profile.head.frozen) if any(stage.last for stage in stages) else 0
        return profile.frozen * first + head

    def trained_share(self, stages: Sequence[Stage]) -> float:
        """Share of the parameters of some stages that get a gradient."""
        frozen = self.frozen_outside(stages)
        frozen += sum(block.frozen * count for stage in stages for block, count in stage.counts)
        return 1 - frozen / self._all_params(stages) if frozen else 1.0

    def unused_outside(self, stages: Sequence[Stage]) -> int:
        """Those of `frozen_outside` that nobody froze."""
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        return self.profile.unused * first + self.profile.head.unused * last

    def reduced_share(self, stages: Sequence[Stage]) -> float:
        """Share of the parameters of some stages that ranks reduce gradients of: zeros, of those that nobody uses."""
        unused = self.unused_outside(stages)
        unused += sum(block.unused * count for stage in stages for block, count in stage.counts)
        return self.trained_share(stages) + (unused / self._all_params(stages) if unused else 0.0)

    def _all_params(self, stages: Sequence[Stage]) -> float:
        """All parameters of some stages, of a module that nothing but stages and data ranks divides."""
        whole = sum(block.params * count for stage in stages for block, count in stage.counts)
        outside = self.embedding * any(stage.first for stage in stages)
        if any(stage.last for stage in stages):
            tied = self.profile.tied and any(stage.first for stage in stages)
            outside += self.profile.head.params - (self.embedding_table if tied else 0.0)
        return whole + outside

    def second_table(self, stages: Sequence[Stage]) -> float:
        """Elements of a tied table that a rank has twice, in its first stage and in its last: the copy has no state."""
        apart = any(stage.first != stage.last for stage in stages)
        both = any(stage.first for stage in stages) and any(stage.last for stage in stages)
        return self.embedding_table if self.profile.tied and apart and both else 0.0

    @property
    def embedding_table(self) -> float:
        """The token table (or what patches are multiplied by), sharded by `tp`."""
        return min(self.profile.vocab * self.profile.dim, self.profile.embedding) / self.plan.axes.tp

    @property
    def embedding(self) -> float:
        """Token table and positions."""
        rest = self.profile.embedding - self.profile.vocab * self.profile.dim
        return self.embedding_table + max(rest, 0)


@lru_cache(maxsize=4096)
def _dense(block: Block, tp: int) -> float:
    whole = block.params - block.expert_params - block.split_params
    return whole + block.split_params / tp


@lru_cache(maxsize=4096)
def _filled(block: Block, shards: int, ep: int, inner: int) -> float:
    """Expert parameters, filled up; `inner`: ranks that divide an expert itself."""
    total = 0.0
    for op in (op for op in block.matmuls if op.experts):
        here = op.experts // ep
        halves = {"column": (op.outs // inner, op.ins), "row": (op.outs, op.ins // inner)}
        cut_inside = sharded_dim((here, *halves.get(op.split, (op.outs, op.ins))), shards) > 0
        total += op.params if cut_inside else op.params * -(-here // shards) * shards / here
    return total


def divide(profile: Profile, plan: Plan, workload: Workload, rule: str = "balanced") -> Division:
    """The division, checked.

    Raises:
        PlanError: a global batch that ranks and micro-batches do not divide, or more stages than blocks.
    """
    pieces = plan.axes.data * plan.batch.micro_batches
    if workload.global_batch % pieces:
        below = workload.global_batch // pieces * pieces
        near = f"{below} or {below + pieces}" if below else str(pieces)
        raise PlanError(
            f"global batch: found {workload.global_batch} sequences, which {plan.axes.data} data ranks x "
            f"{plan.batch.micro_batches} micro-batches do not divide; needed a multiple of {pieces}; nearest: {near}"
        )
    stages = plan.axes.pp * plan.schedule.stages if plan.axes.pp > 1 else 1
    if stages > len(profile.blocks) + 2 * (rule != "balanced"):  # others put embedding and head on stages of their own
        raise PlanError(
            f"pipeline: found {stages} stages for {len(profile.blocks)} blocks of {profile.name}; needed at most as "
            "many stages as blocks; use a smaller pp or fewer stages per rank"
        )
    return Division(profile, plan, workload, rule)


def sharded_dim(shape: Sequence[int], shards: int) -> int:
    """The dim along which `fully_shard` cuts a parameter: the first, or a later one of a stack of few matrices.

    A first dim is filled up to a multiple of the shards: eight stacked experts over 64 shards are sent and held as if
    they were 64. So a parameter of three dims or more with a first dim below the number of shards is cut along the
    first later one that they divide, as torch needs it there. Matrices are not: what is gathered along their columns
    is put together from runs of a few numbers (docs/decisions/0021-stacks-are-cut-inside.md).

    Args:
        shape: of the parameter on a rank, as `tp` and `ep` leave it.
        shards: ranks that share it out.

    >>> sharded_dim((8, 14336, 4096), 64), sharded_dim((8, 14336, 4096), 8), sharded_dim((8, 4096), 64)
    (1, 0, 0)
    """
    if len(shape) < 3 or shape[0] >= shards:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % shards == 0), 0)
