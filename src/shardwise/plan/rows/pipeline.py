"""Rows of the table of constraints: the pipeline axis and its schedules. See `constraints.py`.

What each schedule needs was read from, and is tested against, the constructors of torch 2.13's schedules.
"""

from __future__ import annotations

from itertools import count, islice

from shardwise.errors import PlanError
from shardwise.plan.plan import LOOPED, V_SHAPED, ZERO_BUBBLE, Plan, Schedule
from shardwise.plan.ranks.division import Division
from shardwise.plan.repair import Case, Hit, Read, change, divisors, resize, table
from shardwise.plan.workload import Workload

PIPELINE, _row = table()


def micro_batches_fit(kind: str, pp: int, micro_batches: int) -> bool:
    """Whether torch's schedule of this kind runs with so many micro-batches on so many pipeline ranks.

    >>> [m for m in range(1, 11) if micro_batches_fit("interleaved", 4, m)]
    [1, 2, 3, 4, 5, 6, 7, 8, 10]
    """
    if kind == "1f1b":
        return micro_batches >= pp
    if kind in ("interleaved", "zero-bubble"):
        return micro_batches % max(1, micro_batches // pp) == 0
    return kind != "dualpipe-v" or micro_batches >= 2 * pp


@_row("pp.schedule", "Note: without a pipeline (`pp` 1) the schedule, its stages and its split are ignored.")
def _schedule(case: Case) -> Hit | None:
    if case.plan.axes.pp > 1 or case.plan.schedule == Schedule():
        return None
    return Hit(
        severity="note",
        what="the schedule is ignored without a pipeline",
        found=f"pp=1, schedule={case.plan.schedule.kind}",
        fix="drop it, or add pp ranks",
    )


@_row(
    "pp.stages-per-rank",
    "gpipe and 1f1b put one stage on a rank, zero-bubble-v and dualpipe-v exactly two; the other schedules any number.",
)
def _stages(case: Case) -> Hit | None:
    plan, kind, stages = case.plan, case.plan.schedule.kind, case.plan.schedule.stages
    needed = 2 if kind in V_SHAPED else stages if kind in LOOPED else 1
    if plan.axes.pp == 1 or stages == needed:
        return None
    plans = [change(plan, schedule__stages_per_rank=None)]
    if kind not in LOOPED:
        plans.append(change(plan, schedule__kind="interleaved"))
    return Hit(
        what=f"{kind} puts {needed} stage{'s' if needed > 1 else ''} on a rank",
        found=f"stages per rank={stages}",
        fix=f"use vs{needed}" + ("" if kind in LOOPED else ", or the schedule interleaved"),
        plans=plans,
    )


@_row("pp.micro-batches", "Each schedule needs a number of micro-batches: " + (
    "1f1b at least `pp`; dualpipe-v at least 2 x `pp`; interleaved and zero-bubble a multiple of their rounds, "
    "`micro-batches // pp` (any number up to `pp`, and every multiple of `pp`, fits); gpipe, looped-bfs and "
    "zero-bubble-v any."
))  # fmt: skip
def _micro_batches(case: Case) -> Hit | None:
    plan, kind, pp, micro = case.plan, case.plan.schedule.kind, case.plan.axes.pp, case.plan.batch.micro_batches
    if pp == 1 or micro_batches_fit(kind, pp, micro):
        return None
    apart = (m for d in count(1) for m in (micro + d, micro - d) if m > 0 and micro_batches_fit(kind, pp, m))
    near = list(islice(apart, 6))
    return Hit(
        what=f"{kind} over {pp} pipeline ranks does not run with {micro} micro-batches",
        found=f"pp={pp}, micro-batches={micro}",
        fix=f"use mb{near[0]}, or the schedule gpipe, which takes any number",
        plans=[
            *(change(plan, batch__micro_batches=m) for m in near),
            change(plan, schedule__kind="gpipe", schedule__stages_per_rank=None, schedule__boundaries=()),
        ],
    )


@_row("pp.layers", "Every stage holds at least one block.")
def _layers(case: Case) -> Hit | None:
    plan, blocks = case.plan, case.num_blocks
    if plan.axes.pp == 1 or blocks is None or case.num_stages <= blocks:
        return None
    plans = [_unsplit(resize(plan, "pp", d)) for d in divisors(plan.axes.pp)[:-1]]
    plans.append(_unsplit(change(plan, schedule__kind="1f1b", schedule__stages_per_rank=None)))
    return Hit(
        what=f"{case.name} has fewer blocks than the pipeline has stages",
        found=f"blocks={blocks}, stages = pp x stages per rank = {plan.axes.pp} x {plan.schedule.stages}",
        fix=f"use at most {blocks} stages" if blocks > 1 else "use a plan without pp",
        plans=plans,
    )


@_row("pp.frozen", "Every pipeline rank holds a parameter that is trained: its optimizer has something to update.")
def _frozen(case: Case) -> Hit | None:
    plan, read = case.plan, case.read
    if plan.axes.pp == 1 or read is None or not 0 < read.profile.trained < 1:
        return None
    idle = _idle(case, read)
    if not idle:
        return None
    plans = [_unsplit(resize(plan, "pp", d)) for d in divisors(plan.axes.pp)[:-1]]
    plans += [change(_unsplit(plan), schedule__kind="interleaved", schedule__stages_per_rank=n) for n in (None, 3, 4)]
    ranks, hold = ("ranks", "they hold") if len(idle) > 1 else ("rank", "it holds")
    return Hit(
        what=f"pipeline {ranks} {', '.join(map(str, idle))} would hold frozen parameters alone",
        found=f"pp={plan.axes.pp}, requires_grad=False on all that {hold}",
        fix="use a plan without pp, or more stages on a rank, so that each has a trained one",
        plans=plans,
    )


def _idle(case: Case, read: Read) -> list[int]:
    """Pipeline ranks without a parameter that gets a gradient."""
    profile = read.profile
    try:
        ranks = Division(profile, case.plan, Workload(seq_len=case.seq_len or 1, global_batch=1), read.cut).ranks
    except PlanError:  # boundaries that are not this model's
        return []
    ends = (profile.embedding > profile.frozen, profile.head.params > profile.head.frozen)
    return [
        rank
        for rank, stages in enumerate(ranks)
        if not any(
            (stage.first and ends[0]) or (stage.last and ends[1]) or any(b.params > b.frozen for b in stage.blocks)
            for stage in stages
        )
    ]


@_row(
    "pp.boundaries",
    "`split` names the first block of stage 1, 2, ...: one name fewer than stages, known, in order, none twice.",
)
def _boundaries(case: Case) -> Hit | None:
    plan, given = case.plan, case.plan.schedule.boundaries
    if plan.axes.pp == 1 or not given:
        return None
    wrong = _wrong_boundaries(case, given)
    if wrong is None:
        return None
    what, found = wrong
    return Hit(
        what=what,
        found=found,
        fix=f"name {case.num_stages - 1} blocks in order, or drop split: stages are balanced by their operations",
        plans=[_unsplit(plan)],
    )


def _wrong_boundaries(case: Case, given: tuple[str, ...]) -> tuple[str, str] | None:
    if len(given) != case.num_stages - 1:
        return (
            f"split names {len(given)} blocks for {case.num_stages} stages",
            f"split={','.join(given)}, stages={case.num_stages}, needed {case.num_stages - 1} names",
        )
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        return "split names a block twice", ", ".join(twice)
    if case.spec is None or (case.plan.blocks != "auto" and case.plan.blocks.count("*") != 1):
        return None
    pattern = case.spec.blocks if case.plan.blocks == "auto" else case.plan.blocks
    names = [pattern.replace("*", str(i)) for i in range(case.spec.num_layers)]
    unknown = [name for name in given if name not in names]
    if unknown:
        return f"split names blocks that {case.spec.name} does not have", f"{', '.join(unknown)}; blocks are {pattern}"
    places = [names.index(name) for name in given]
    if places[0] == 0:
        return "split starts with the first block, so that stage 0 would hold none", f"split={','.join(given)}"
    if places != sorted(places):
        return "split is not in the order of the blocks", f"split={','.join(given)}"
    return None


@_row(
    "pp.zero-bubble-reshard",
    "zero-bubble, zero-bubble-v and dualpipe-v with parameters resharded after forward (zero 3) train silently wrong "
    "in torch 2.13: gradients come out wrong by up to 69 % or missing. Zero 2 equals one process.",
)
def _zero_bubble_reshard(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.pp == 1 or plan.schedule.kind not in ZERO_BUBBLE or not plan.reshards:
        return None
    return Hit(
        what=f"{plan.schedule.kind} with parameters resharded after forward trains silently wrong in torch",
        found=f"zero={plan.zero}, reshard={str(plan.communication.reshard_after_forward).lower()}",
        fix="use zero2, or the schedule interleaved or 1f1b",
        plans=[change(plan, zero=2, communication__reshard_after_forward=None)],
    )


@_row(
    "pp.zero-bubble-recompute-ops",
    "Per-op recompute with schedules that split the backward raises inside torch; full recompute of blocks is exact.",
)
def _recompute_ops(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.pp == 1 or plan.schedule.kind not in ZERO_BUBBLE or plan.recompute.mode != "ops":
        return None
    return Hit(
        what=f"{plan.schedule.kind} splits the backward, which per-op recompute does not survive",
        found="recompute=ops",
        fix="use recompute=blocks",
        plans=[change(plan, recompute__mode="blocks"), change(plan, recompute__mode="none")],
    )


@_row(
    "pp.zero-bubble-compile",
    "Schedules that split the backward into input and weight parts do not work with compiled stages in torch 2.13.",
)
def _compile(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.pp == 1 or plan.schedule.kind not in ZERO_BUBBLE or not plan.compile:
        return None
    return Hit(
        what=f"{plan.schedule.kind} splits the backward, which torch does not support for compiled blocks",
        found="compile",
        fix="drop compile, or use the schedule interleaved",
        plans=[
            change(plan, compile=False),
            change(plan, schedule__kind="interleaved"),
        ],
    )


def _unsplit(plan: Plan) -> Plan:
    """Boundaries go with the number of stages, schedules with a pipeline."""
    if plan.axes.pp == 1:
        return plan.with_(schedule=Schedule())
    return change(plan, schedule__boundaries=())
