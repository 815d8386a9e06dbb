"""`estimate_by_trace`: a large model's step from the traced steps of the same model with few layers.

Peaks of a part of a step, and numbers of collectives, are linear in the number of equal layers: two depths give both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch

from shardwise.diagnose.tracing.step import StepPeaks, StepTrace, trace_step
from shardwise.diagnose.tracing.without_values import Training, token_loss
from shardwise.errors import ModelError, PlanError
from shardwise.model.profile import profile_of
from shardwise.model.spec import ModelSpec
from shardwise.models.moe import MoEOutput
from shardwise.models.presets import build
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Batch, Placed
from shardwise.plan.messages.scene import Collective
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.activations import is_recomputed
from shardwise.plan.ranks.division import Division
from shardwise.plan.schedule import stages_of
from shardwise.plan.workload import Workload
from shardwise.train.loss import Loss, token_cross_entropy
from shardwise.train.optimizers import adafactor, adamw, lamb, lion, muon, sgd
from shardwise.train.updates.optim import NamedOptimizer

RATE = 1e-4
OPTIMIZERS: Mapping[str, Callable[[Placed], NamedOptimizer]] = {
    "adamw": partial(adamw, lr=RATE),
    "adamw-bf16": partial(adamw, lr=RATE, state_dtype="bf16"),
    "adamw-8bit": partial(adamw, lr=RATE, state_dtype="8bit"),
    "lamb": partial(lamb, lr=RATE),
    "lion": partial(lion, lr=RATE),
    "muon": partial(muon, lr=RATE),
    "sgd-momentum": partial(sgd, lr=RATE, momentum=0.9),
    "adafactor": partial(adafactor, lr=RATE),
    "sgd": partial(sgd, lr=RATE),
}
"""By the names that a workload has for them (`shardwise.plan.workload.STATE_BYTES`): what is traced."""

FEW = 4
"""Layers of a model that are all traced."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis, in one step."""

    times: int
    num_bytes: int
    """Of all messages, see `shardwise.diagnose.tracing.ledger.Collective`."""


@dataclass(frozen=True, kw_only=True)
class TracedEstimate:
    """One rank's step, extrapolated from few layers."""

    rank: int
    layers: int
    """Layers on this rank."""
    traced: tuple[int, ...]
    """Layers on this rank in each trace: in two, or as they are in one."""
    num_params: int
    first: Mapping[str, Mapping[str, int]]
    """The first step: part -> kind -> bytes, as `StepPeaks.parts`."""
    later: Mapping[str, Mapping[str, int]]
    """Every later step."""
    traffic: Mapping[tuple[str, str], Traffic]
    """(kind, axis) -> what a later step sends."""
    messages: Mapping[Collective, int] = field(default_factory=dict)
    """The same one by one, where all layers were traced."""

    @property
    def peak(self) -> int:
        """Bytes of live tensors at the largest moment of any step."""
        return max(sum(held.values()) for held in (*self.first.values(), *self.later.values()))

    @property
    def phase(self) -> str:
        """The part of a later step in which it needs most."""
        return max(self.later, key=lambda part: sum(self.later[part].values()))

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by kind at the peak of a later step."""
        return self.later[self.phase]


def estimate_by_trace(
    spec: ModelSpec, plan: Plan, workload: Workload, *, rank: int = 0, is_cpu: bool = True
) -> TracedEstimate:
    """Peak bytes of live tensors and collectives of one rank of a plan, from real steps of the model with few layers.

    The reference model of the spec is traced at its full width with three and with four layers per pipeline stage
    (fewer where a stage has fewer; twice and three times the period of a recompute pattern) by `trace_step`; layers are
    equal, so everything between is linear in them. Up to `FEW` layers, and where the pattern is not the same in all
    stages, or longer than a third of the layers, all are traced.

    Args:
        spec: sizes of a model that `shardwise.models.presets.build` can make.
        plan: any layout; its batch is the workload's.
        workload: sequence length, global batch in sequences, and the optimizer, one of `OPTIMIZERS`.
        rank: of `plan.world`; the ranks of the first and the last pipeline stage hold the embedding and the head.
        is_cpu: whether ranks sum gradients as gloo does, see `trace_step`.

    Raises:
        ModelError: the reference models do not have a part that the spec has, or it has fewer layers than are traced.
        PlanError: the constraints refuse the plan, or the batch is not divided by data ranks and micro-batches.

    Cost: two traces of three small models: seconds, whatever the size of the model. A sharded axis of many hundred
    ranks takes longer (torch cuts each parameter into a list of all shards). CPU kernels: attention and norms keep what
    the CPU ones keep, and host memory is counted with the device's.

    >>> estimate_by_trace(preset("llama-70b"), Plan.parse("fsdp64 tp8 / bf16"), work).peak  # doctest: +SKIP
    """
    check_rows(plan, workload)
    _check_whole(spec)
    stages = plan.axes.pp * plan.schedule.stages if plan.axes.pp > 1 else 1
    firsts = (*Division(profile_of(spec), plan, workload).firsts, spec.num_layers)
    here = _layers_here(firsts, plan, rank)
    depths = _depths(firsts, plan)
    if depths is None:
        step = trace_step(training_of(spec, workload), plan, rank=rank, is_cpu=is_cpu)
        return as_traced(step, rank, spec.num_params)
    on_rank = plan.schedule.stages if plan.axes.pp > 1 else 1
    traces = [_trace(spec, plan, workload, (rank, is_cpu), depth * stages) for depth in depths]
    layers = (depths[0] * on_rank, depths[1] * on_rank)
    grow = partial(_line, layers, here)
    return TracedEstimate(
        rank=rank,
        layers=here,
        traced=layers,
        num_params=spec.num_params,
        first=_peaks(grow, traces[0].first, traces[1].first),
        later=_peaks(grow, traces[0].later, traces[1].later),
        traffic=_traffic(grow, traces[0].later, traces[1].later),
    )


def as_traced(step: StepTrace, rank: int, num_params: int) -> TracedEstimate:
    """The estimate of a step with all its layers."""
    return TracedEstimate(
        rank=rank,
        layers=step.layers,
        traced=(step.layers,),
        num_params=num_params,
        first=step.first.parts,
        later=step.later.parts,
        traffic=dict(sorted(by_axis(step.later).items())),
        messages={Collective(*each): times for each, times in step.later.collectives.items() if each.axis != "rank"},
    )


def check_rows(plan: Plan, workload: Workload) -> None:
    """Refuse what is not traced: rows that are not divided.

    Raises:
        PlanError: see `estimate_by_trace`.
    """
    rows, rest = divmod(workload.global_batch, plan.axes.data)
    if rest or rows % plan.batch.micro_batches:
        raise PlanError(
            f"estimate_by_trace: a global batch of {workload.global_batch} sequences is not divided by "
            f"{plan.axes.data} data ranks x {plan.batch.micro_batches} micro-batches; give a multiple of "
            f"{plan.axes.data * plan.batch.micro_batches}"
        )


def _line(xs: tuple[int, int], x: int, first: int, second: int) -> int:
    return first + round(Fraction((second - first) * (x - xs[0]), xs[1] - xs[0]))


def _peaks(grow: Callable[[int, int], int], a: StepPeaks, b: StepPeaks) -> dict[str, dict[str, int]]:
    found = {part: dict(held) for part, held in b.parts.items()}  # what begins with that many layers stays as it is
    for part in found.keys() & a.parts.keys():
        found[part] = {kind: grow(a.parts[part][kind], b.parts[part][kind]) for kind in b.parts[part]}
    return found


def _traffic(grow: Callable[[int, int], int], a: StepPeaks, b: StepPeaks) -> dict[tuple[str, str], Traffic]:
    sums = [by_axis(a), by_axis(b)]
    keys = sorted({*sums[0], *sums[1]})
    none = Traffic(0, 0)
    pairs = {key: (sums[0].get(key, none), sums[1].get(key, none)) for key in keys}
    return {key: Traffic(grow(x.times, y.times), grow(x.num_bytes, y.num_bytes)) for key, (x, y) in pairs.items()}


def by_axis(peaks: StepPeaks) -> dict[tuple[str, str], Traffic]:
    """What a step sends, summed by kind and axis."""
    sums: dict[tuple[str, str], Traffic] = {}
    for issued, times in peaks.collectives.items():
        before = sums.get((issued.kind, issued.axis), Traffic(0, 0))
        num_bytes = before.num_bytes + times * issued.num_bytes
        sums[issued.kind, issued.axis] = Traffic(before.times + times, num_bytes)
    return sums


def _depths(firsts: tuple[int, ...], plan: Plan) -> tuple[int, int] | None:
    """Layers per stage of two traces that the step is in line with; None: of few, or where recompute is not regular."""
    count, stages = firsts[-1], len(firsts) - 1
    if stages == 1 and count <= FEW:
        return None
    period = _period(plan, count)
    if period == 1 or stages > 1:
        if any((end - start) % period for start, end in pairwise(firsts)):
            return None
        if stages > 1 and count < 3 * period * stages:
            return period, 2 * period
        if period > 1 or count < 4 * stages:
            return 2 * period, 3 * period
        return 3, 4  # three have one in the middle, in whose backward pass weights of both sides may be there
    rest = count % period  # which layers are the last ones' neighbours stays as it is
    return (2 * period + rest, 3 * period + rest) if count >= 3 * period + rest else None


def _period(plan: Plan, num_layers: int) -> int:
    """Layers after which recompute begins anew; all, where it does not."""
    marks = [is_recomputed(layer, plan) for layer in range(num_layers)]
    return next((n for n in range(1, num_layers) if marks[n:] == marks[:-n]), num_layers)


def _check_whole(spec: ModelSpec) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(replace(spec, num_layers=2))().parameters())
    needed = replace(spec, num_layers=2).num_params
    if count != needed:
        raise ModelError(
            f"estimate_by_trace: model {spec.name}: with two layers it has {needed} parameters and the reference model "
            f"of its kind ({spec.kind}) {count}; a part of it is in no reference model: give trace_step your module, "
            "or use the closed form"
        )


def _layers_here(firsts: tuple[int, ...], plan: Plan, rank: int) -> int:
    if plan.axes.pp == 1:
        return firsts[-1]
    pp_rank = rank // (plan.world // plan.axes.pp)
    stages = stages_of(plan.schedule.kind, pp_rank, plan.axes.pp, plan.schedule.stages)
    return sum(firsts[stage + 1] - firsts[stage] for stage in stages)


def _trace(spec: ModelSpec, plan: Plan, workload: Workload, where: tuple[int, bool], num_layers: int) -> StepTrace:
    short = replace(spec, num_layers=num_layers)
    if plan.axes.pp > 1:
        stages = plan.axes.pp * plan.schedule.stages
        starts = tuple(short.block_names[stage * num_layers // stages] for stage in range(1, stages))
        plan = replace(plan, schedule=replace(plan.schedule, boundaries=starts))
    return trace_step(training_of(short, workload), plan, rank=where[0], is_cpu=where[1])


def training_of(spec: ModelSpec, workload: Workload) -> Training:
    """What `trace_step` traces of a spec: its reference model, the workload's batch without values, its loss."""
    loss = _moe_loss if spec.kind == "moe" else token_loss
    optimizer, sample = OPTIMIZERS[workload.optimizer], _rows(workload, 1)
    return Training(model=build(spec), batch=partial(_batch, workload), loss=loss, optimizer=optimizer, sample=sample)


def _batch(workload: Workload, mesh: Mesh) -> Batch:
    return _rows(workload, workload.global_batch // mesh.batch.size)


def _rows(workload: Workload, number: int) -> Batch:
    shape = (number, workload.seq_len)
    return {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}


def _moe_loss(output: MoEOutput, batch: Batch) -> Loss:
    return token_cross_entropy(output.logits, batch["labels"])
