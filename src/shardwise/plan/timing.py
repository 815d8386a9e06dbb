"""`estimate_time`: seconds of a step by term, from kernels, links and the pipeline's schedule, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import log2

from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Profile
from shardwise.plan.costs.kernels import pointwise_time
from shardwise.plan.costs.links import collective_time, group_of
from shardwise.plan.frozen import gather_copied
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import compute_width, is_gathered, is_held, kept_bytes, recomputed_in
from shardwise.plan.ranks.division import Division, divide
from shardwise.plan.ranks.engines import casts_weights
from shardwise.plan.ranks.imbalance import busiest
from shardwise.plan.ranks.stages import Stage
from shardwise.plan.rows.pipeline import micro_batches_fit
from shardwise.plan.schedule import stages_of
from shardwise.plan.stack import Stack, stack_of
from shardwise.plan.time_terms.blocktime import block_time
from shardwise.plan.time_terms.datatime import exposed_time, rounds_of, sends_of, wire_of
from shardwise.plan.time_terms.loading import loading_time
from shardwise.plan.time_terms.setting import Setting
from shardwise.plan.time_terms.simulate import Costs, pipeline_time
from shardwise.plan.time_terms.stalls import stalled
from shardwise.plan.updating import update_time
from shardwise.plan.workload import Workload

CROWDED = 0.86
"""Share of a device that live tensors of the first pipeline rank fill, from which an allocator of fixed segments runs
out of them in every micro-batch (seen with nanotron: 13 of 15 such runs, eleven of them by 1.1 to 1.5 s)."""
STRAGGLERS = 0.007
"""Share of a step that each doubling of the nodes adds, as the slowest of them sets the pace: the slope of published
weak scaling from 8 to 2,304 devices (NVIDIA's benchmarks of 2024 and 2025: 0.2 to 1.5 %)."""

ALONE = 0.003
"""Seconds at most of a step outside the model on one device, which waits for no other: measured with our own stack on
an H200 (docs/benchmarks.md)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of the slowest pipeline rank, by term; the terms sum to `total`."""

    terms: Mapping[str, float]
    """compute, recompute, tensor, context, expert, imbalance (of experts), pipeline (bubble and sends), data, copies,
    host, stall, optimizer, muon, update-sends, offload, other, loading, stragglers; what is sent as far as exposed."""
    hidden: Mapping[str, float]
    """Communication that runs behind compute, by term; and the loading of data, which runs behind the step before."""
    tokens: int
    world: int
    flops: float
    """Operations of the model per step, forward and backward, causal attention halved, no recompute."""
    rate: float
    """Nominal rate of a device in the compute dtype; of fp8 and fp4 that in bf16, as torchtitan counts MFU."""
    stages: tuple[float, ...] = field(default=())
    """Busy seconds of each pipeline rank."""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.total / self.world

    @property
    def mfu(self) -> float:
        """Model operations per second over the nominal rate."""
        return self.flops / self.total / self.world / self.rate


def estimate_time(
    profile: Profile, cluster: Cluster, plan: Plan, workload: Workload, *, stack: Stack | None = None
) -> StepTime:
    """Seconds of a step under a plan on a cluster.

    A pipeline rank's time is that of its micro-batches through the schedule; data-axis communication hides behind the
    last backward pass (or, gathered parameters, behind their block's compute) as far as the stack overlaps it.

    Raises:
        PlanError: a batch or a pipeline that the model does not divide.

    Cost: some 200 microseconds.

    >>> from shardwise.hardware.cluster import load_cluster
    >>> from shardwise.model.profile import profile_of
    >>> from shardwise.model.spec import preset
    >>> step = estimate_time(profile_of(preset("llama-8b")), load_cluster("h100:8"), Plan.parse("fsdp8 bf16"),
    ...     Workload(seq_len=8192, global_batch=8))
    >>> 0.2 < step.mfu < 0.6
    True
    """
    stack = stack_of(plan, stack)
    division = divide(busiest(profile, plan, workload), plan, workload, stack.cut)
    ranks = division.of_ranks(partial(rank_costs, division, cluster=cluster, stack=stack))
    pipeline = _pipeline(division, ranks, cluster, stack)
    slowest = max(ranks, key=lambda rank: rank.busy)
    count = plan.batch.micro_batches
    terms = {name: getattr(slowest, name) * count for name in ("compute", "recompute", "tensor", "context", "expert")}
    if division.profile is not profile:
        stages = divide(profile, plan, workload, stack.cut).ranks[ranks.index(slowest)]
        _part_imbalance(terms, rank_costs(division, stages, cluster, stack), count)
    terms["pipeline"] = pipeline - slowest.busy * count
    data, hidden = _data(division, cluster, stack, ranks)
    terms["data"], terms["copies"] = data, _copies(division, cluster, stack, max(rank.params for rank in ranks))
    passes = stack.starts(count, plan.schedule.stages if plan.axes.pp > 1 else 0)
    terms["host"] = stack.micro_host * passes + stack.fill_host * (plan.axes.pp - 1)
    terms["stall"] = _stalls(profile, division, cluster, stack)
    terms |= update_time(division, cluster, stack)
    if plan.offload.activations:
        terms["offload"] = (
            terms.get("offload", 0.0) + max(_offloaded(division, rank, cluster, stack) for rank in ranks) * count
        )
    terms["other"] = fixed_time(plan.world, stack)
    loading, step = loading_time(division, cluster), sum(terms.values())
    terms["loading"] = max(0.0, loading - step)
    if cluster.nodes > 1:
        terms["stragglers"] = sum(terms.values()) * STRAGGLERS * log2(cluster.nodes)
    dtype = _dtype(division)
    return StepTime(
        terms={name: value for name, value in terms.items() if value},
        hidden={"data": hidden, "tensor": slowest.hidden * count, "loading": min(loading, step)},
        tokens=workload.tokens,
        world=plan.world,
        flops=(3.0 if workload.trained == 1 else 2.0) * profile.forward_flops(workload.seq_len) * workload.tokens,
        rate=cluster.device.rates.of("bf16" if dtype in ("fp8", "fp4") else dtype),
        stages=tuple(rank.busy * count for rank in ranks),
    )


def fixed_time(world: int, stack: Stack) -> float:
    """Seconds of a step on so many devices outside the model."""
    return stack.step if world > 1 else min(stack.step, ALONE)


def _stalls(profile: Profile, division: Division, cluster: Cluster, stack: Stack) -> float:
    """Seconds that exchanges and a full device stop a step for, in the stacks that show it."""
    plan, count, seconds = division.plan, division.plan.batch.micro_batches, 0.0
    if stack.stall and stalled(division, cluster.nodes, cluster.domain):  # in full with two neighbours, half with one
        seconds = stack.stall * (count * (1 - 1 / plan.axes.pp) if plan.axes.pp > 1 else 0.5)
    if stack.retry:
        memory = estimate_memory(profile, plan, division.workload, stack=stack, device=cluster.device)
        seconds += stack.retry * count * (memory.stages[0].allocated > CROWDED * memory.limit)
    return seconds


def _part_imbalance(terms: dict[str, float], even: RankCosts, count: int) -> None:
    """Take out of a rank's terms what it has beyond an even spread of tokens over experts, as a term of its own."""
    beyond = {name: max(0.0, terms[name] - getattr(even, name) * count) for name in ("compute", "recompute", "expert")}
    for name, value in beyond.items():
        terms[name] -= value
    terms["imbalance"] = sum(beyond.values())


@dataclass(frozen=True)
class RankCosts:
    """Seconds of one micro-batch through all stages of a rank."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """The part of the backward that makes gradients of weights."""
    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    hidden: float
    params: float
    stages: tuple[Stage, ...]

    @property
    def busy(self) -> float:
        """Forward and backward of all its stages."""
        return sum(self.forward) + sum(self.backward)


def _dtype(division: Division) -> str:
    """Dtype of the matrix products."""
    plan = division.plan
    if division.compute:
        return division.compute
    if plan.precision == "bf16-pure":
        return "bf16"
    return "tf32" if plan.precision == "fp32" and plan.tf32 else plan.precision


def rank_costs(division: Division, stages: tuple[Stage, ...], cluster: Cluster, stack: Stack) -> RankCosts:
    """What a rank with these stages does for a micro-batch."""
    plan = division.plan
    frozen = division.workload.trained < 1
    held, casts = is_held(plan, stack), _casts(plan, stack) and not frozen
    setting = Setting(
        cluster, stack, plan.axes, _dtype(division), plan.tensor.sequence, plan.context.kind, frozen, held,
        division.workload.adapters, casts,
    )  # fmt: skip
    shape = (division.micro_batch, division.workload.seq_len)
    forward, backward, weight = [], [], []
    sums = dict.fromkeys(("compute", "recompute", "tensor", "context", "expert", "hidden"), 0.0)
    for stage in stages:
        ahead = back = grads = lag = 0.0
        for block, number, repeats in recomputed_in(stage, plan):
            time = block_time(block, shape, setting)
            again = time.again(plan.recompute.mode) * repeats if repeats else 0.0
            ahead += time.forward * number
            back += time.backward * number + again
            lag += time.lag * (number - repeats)
            grads += time.weight * (number - repeats)  # else with those of its input: one recompute serves both
            sums["recompute"] += again
            for term in ("compute", "tensor", "context", "expert", "hidden"):
                sums[term] += getattr(time, term) * number
        if stage.last:
            time = block_time(division.profile.head, shape, setting)
            loss = _loss(division, cluster, stack)
            ahead += time.forward + loss
            back += time.backward + loss
            grads += time.weight
            # the device is busy with these while the host goes on to the blocks: it is that far ahead of them
            hidden = min(lag, time.compute + 2 * loss) if plan.axes.pp == 1 else 0.0
            back -= hidden
            sums["compute"] += time.compute + 2 * loss - hidden
            sums["tensor"] += time.tensor
        forward.append(ahead)
        backward.append(back)
        weight.append(grads)
    return RankCosts(
        tuple(forward), tuple(backward), tuple(weight), **sums, params=division.whole(stages), stages=stages
    )


def _loss(division: Division, cluster: Cluster, stack: Stack) -> float:
    """Cross entropy: half of the passes over the logits, each way."""
    plan = division.plan
    shard = plan.axes.tp if plan.tensor.loss else 1
    return loss_time(division.tokens * division.profile.vocab / shard, cluster, stack)


def loss_time(logits: float, cluster: Cluster, stack: Stack) -> float:
    """Seconds of each way of the cross entropy of so many logits on a rank."""
    return pointwise_time(logits, cluster.device, stack.loss_bytes / 2 or stack.logit_bytes * 0.7)


def _pipeline(division: Division, ranks: list[RankCosts], cluster: Cluster, stack: Stack) -> float:
    """Seconds of all micro-batches through the schedule's own table, with the sends between stages."""
    plan = division.plan
    count, pp, turns = plan.batch.micro_batches, plan.axes.pp, plan.schedule.stages
    if pp == 1:
        return ranks[0].busy * count
    size = division.tokens * division.sent * compute_width(plan)
    size /= plan.axes.tp if plan.tensor.sequence or stack.splits_sends else 1
    send = collective_time("send", size, group_of(plan.axes, "pp"), cluster, stack.network)
    exposed = send * (1 - stack.overlap_pipeline)
    kind = plan.schedule.kind
    if not micro_batches_fit(kind, pp, count):  # no schedule of torch's; others fill up the last round
        bubble = (sum(rank.busy for rank in ranks) - max(rank.busy for rank in ranks)) / turns
        return (max(rank.busy for rank in ranks) + 2 * exposed * turns) * count + bubble + 2 * send * (pp - 1)
    places = [(stage, rank, turn) for rank in range(pp) for turn, stage in enumerate(stages_of(kind, rank, pp, turns))]
    chain = [(ranks[rank], turn) for _, rank, turn in sorted(places)]
    costs = Costs.of_stages(
        [rank.forward[turn] for rank, turn in chain],
        [rank.backward[turn] - rank.weight[turn] for rank, turn in chain],
        [rank.weight[turn] for rank, turn in chain],
    )
    return schedule_time(kind, (pp, turns, count), costs, max(rank.busy for rank in ranks), exposed)


def schedule_time(kind: str, shape: tuple[int, int, int], costs: Costs, slowest: float, exposed: float) -> float:
    """Seconds of all micro-batches through a schedule's own table.

    `shape`: ranks, stages of each, micro-batches; `slowest`: seconds of one on the busiest rank; `exposed`: of a send.
    """
    pp, turns, count = shape
    few = min(count, 8 * pp)  # beyond the first rounds, each micro-batch adds the same
    few += (count - few) % pp
    time = pipeline_time(kind, pp, costs, few, stages_per_rank=turns, transfer=exposed)
    if few == count:
        return time
    before = pipeline_time(kind, pp, costs, few - pp, stages_per_rank=turns, transfer=exposed)
    slowest += 2 * exposed if kind == "1f1b" else 0.0
    return time + (count - few) * max((time - before) / pp, slowest)


def _data(division: Division, cluster: Cluster, stack: Stack, ranks: list[RankCosts]) -> tuple[float, float]:
    """(exposed, hidden) seconds of gradient reduction and parameter gathering, of the rank that waits longest.

    That is the one with most parameters; with experts of their own, which fewer ranks share, it may be another. It goes
    at the pace of the pipeline's slowest rank: where it waits for others, as much is hidden.
    """
    heavy = max(ranks, key=lambda rank: rank.params)
    passes = max(sum(rank.forward) for rank in ranks), max(sum(rank.backward) for rank in ranks)
    found = []
    for rank in dict.fromkeys(ranks) if division.plan.axes.ep > 1 else [heavy]:
        blocks = sum(len(stage.blocks) for stage in rank.stages)
        sends = sends_of(wire_of(division, rank.stages, cluster, stack))
        found.append(exposed_time(rounds_of(division.plan), sends, passes, stack, waits=blocks, groups=blocks + 1))
    exposed, sent = max(found)
    return exposed, sent - exposed


def _casts(plan: Plan, stack: Stack) -> bool:
    """Whether each micro-batch casts weights: those of one process, and under autocast, whose residual stream tells."""
    return casts_weights(plan) or stack.residual_bytes > compute_width(plan)


def _copies(division: Division, cluster: Cluster, stack: Stack, params: float) -> float:
    """Seconds in which a device alone copies what `fully_shard` gathers from it and reduces on it, or casts weights."""
    plan, moved = division.plan, 0.0
    if _casts(plan, stack):
        moved = stack.cast_copies * plan.batch.micro_batches * division.workload.trained
    elif is_gathered(plan) and division.shards == 1:
        moved = gather_copied(division.workload, stack, compute_width(plan))
    return moved * params / (cluster.device.bandwidth * cluster.device.stream)


def _offloaded(division: Division, rank: RankCosts, cluster: Cluster, stack: Stack) -> float:
    """Seconds per micro-batch that saved tensors on their way to the host and back do not hide behind compute."""
    plan = division.plan
    how = division.saving(stack)
    blocks = [(block, stage.start + i) for stage in rank.stages for i, block in enumerate(stage.blocks)]
    moved = sum(kept_bytes(block, index, plan, how) for block, index in blocks) * division.tokens
    one_way = moved * stack.offloads_blocks / cluster.host_bandwidth
    return sum(max(0.0, one_way - stack.hides_copies * sum(work)) for work in (rank.forward, rank.backward))
