"""Why a plan is what it is: each decision against its neighbours, what binds, and why runners-up lost. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import NamedTuple

from shardwise.errors import ShardwiseError
from shardwise.plan.hosting import host_lack
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import SCHEDULES, Context, Plan, Recompute, Schedule
from shardwise.plan.repair import change, divisors, resize
from shardwise.plan.rows.modules import MODULES, used
from shardwise.plan.search import ALIKE, HEADROOM, Candidate, Goal, Search
from shardwise.plan.searching.families import simplicity
from shardwise.plan.searching.space import Space, features_of
from shardwise.plan.shorthand import axis_word
from shardwise.plan.spelled import spelled
from shardwise.plan.timing import estimate_time

SIMPLER = "as good; the best one is simpler"


@dataclass(frozen=True)
class Decision:
    """A field of the plan, its value, and what its neighbours would do."""

    field: str
    value: str
    reason: str


def decisions(candidate: Candidate, space: Space, goal: Goal = "time") -> tuple[Decision, ...]:
    """One sentence per decision: what the nearest other values of that field alone would do, to what is to be least.

    Cost: two estimates per field; of pipeline ranks some 30 per neighbour, half a second for 16,384 devices.
    """
    found = []
    for name, value, others in _neighbours(candidate.plan, space):
        if name != "compile":  # else a neighbour is compiled where it may be, as the search would
            others = [(label, plan.with_(compile=space.compiles(plan))) for label, plan in others]
        best: dict[str, _Outcome] = {}
        for label, plan in others:
            if outcome := _outcome(plan, candidate, space, goal):
                best[label] = min(best.get(label, outcome), outcome, key=lambda each: each.rank)
        texts = [f"{label}{_more_said(name, each, candidate.plan)}: {each.text}" for label, each in best.items()]
        found.append(Decision(name, value, "; ".join(texts) or "no other value alone is possible"))
    return tuple(found)


FORBIDDEN = 3
"""Rank of a neighbour that fits and that the question forbids: what that costs."""
REFUSED = 4
"""Rank of a neighbour that no batch makes possible."""


class _Outcome(NamedTuple):
    """What a neighbour would do, and how good that is: the less, the better."""

    rank: tuple[int, float]
    text: str
    plan: Plan


def _more_said(name: str, outcome: _Outcome, best: Plan) -> str:
    """What else of a neighbour that is not refused is other than in the plan: its schedule, stages, micro-batches."""
    other, (kind, _) = outcome.plan, outcome.rank
    if kind >= REFUSED:
        return ""
    schedule, count, said = other.schedule, other.batch.micro_batches, ""
    if other.axes.pp > 1 and schedule != best.schedule:
        said = f" {schedule.kind}" if name != "schedule.kind" else ""
        said += f" vs{schedule.stages_per_rank}" if schedule.stages_per_rank else ""
    return said + (f" mb{count}" if name.startswith("axes.") and count != best.batch.micro_batches else "")


def _neighbours(plan: Plan, space: Space) -> Iterator[tuple[str, str, list[tuple[str, Plan]]]]:
    """(field, value, [(what else, that plan)])."""
    axes = plan.axes
    for axis in ("pp", "cp", "tp", "ep"):
        degree = getattr(axes, axis)
        near = _around(degree, divisors(space.profile.experts or 1 if axis == "ep" else plan.world))
        if degree > 1 or axis in ("pp", "tp"):
            resized = [(f"{axis}{n}", other) for n in near for other in _resized(plan, axis, n, space)]
            yield f"axes.{axis}", str(degree), resized
    data = axes.data
    splits = [s for s in _around(axes.dp_shard, divisors(data))] if data > 1 else []
    others = [(f"dp{data // s} fsdp{s}", _split(plan, data // s, s)) for s in splits]
    if data > 1:
        yield "data", f"dp{axes.dp_replicate} fsdp{axes.dp_shard}", others
    if plan.zero:
        zeros = [zero for zero in (plan.zero - 1, plan.zero + 1) if 1 <= zero <= 3]
        yield "zero", str(plan.zero), [(f"zero{zero}", plan.with_(zero=zero)) for zero in zeros]
    counts = divisors(max(1, space.workload.global_batch // data))
    near = _around(plan.batch.micro_batches, counts)
    yield (
        "batch.micro_batches",
        str(plan.batch.micro_batches),
        [(f"mb{n}", change(plan, batch__micro_batches=n)) for n in near],
    )
    if axes.pp > 1:
        schedules = [each for each in _schedules(axes.pp, space) if each.kind != plan.schedule.kind]
        yield "schedule.kind", plan.schedule.kind, [(each.kind, plan.with_(schedule=each)) for each in schedules]
    modes = [Recompute(mode=m) for m in ("none", "ops", "blocks") if m != plan.recompute.mode]
    yield "recompute.mode", _recomputed(plan), [(f"recompute={r.mode}", plan.with_(recompute=r)) for r in modes]
    if axes.tp > 1:
        other = not plan.tensor.sequence
        label = "with seq" if other else "without seq"
        yield "tensor.sequence", str(plan.tensor.sequence).lower(), [(label, change(plan, tensor__sequence=other))]
    if plan.compile:
        yield "compile", "true", [("without compile", plan.with_(compile=False))]
    if plan.zero or (data == 1 and space.can_offload):  # one rank needs no axis for it
        state = not plan.offload.state
        label = "with states offloaded" if state else "with states on the device"
        moved = change(plan, offload__state=state).with_(zero=plan.zero or 3)
        yield "offload.state", str(plan.offload.state).lower(), [(label, moved)]


def _around(value: int, known: list[int]) -> list[int]:
    """The next smaller and the next larger one."""
    return [n for n in known if n < value][-1:] + [n for n in known if n > value][:1]


def _schedules(pp: int, space: Space) -> list[Schedule]:
    """Every schedule of so many ranks with every number of stages; of a kind that is forbidden, its usual one."""
    known = space.schedules(pp)
    return [*known, *(Schedule(kind=kind) for kind in SCHEDULES if kind not in {each.kind for each in known})]


def _recomputed(plan: Plan) -> str:
    """What is recomputed, in the words of a shorthand."""
    policy = plan.recompute
    return {"every": f"every{policy.every}", "ratio": f"{policy.ratio:.0%}"}.get(policy.mode, policy.mode)


def _resized(plan: Plan, axis: str, degree: int, space: Space) -> list[Plan]:
    """The axis at another degree, shards or replicas taking or giving the ranks; options go with their axis.

    With as many micro-batches as before, and with as many as keep their size: other data ranks have other shares. Of
    another number of pipeline ranks every schedule.
    """
    others = [resize(plan, axis, degree)]
    ranks, rest = divmod(plan.axes.dp_replicate * getattr(plan.axes, axis), degree)
    if plan.zero and plan.axes.dp_replicate > 1 and axis != "ep" and not rest:
        others.append(change(plan, **{f"axes__{axis}": degree, "axes__dp_replicate": ranks}))
    found = []
    for other in others:
        if other.axes.dp_shard == 1 and other.axes.dp_replicate > 1:
            other = change(other, offload__state=False).with_(zero=0)
        if other.axes.tp == 1:
            other = change(other, tensor__sequence=False, tensor__loss=False)
        if other.axes.cp == 1:
            other = other.with_(context=Context())
        if other.axes.pp > 1 and other.batch.micro_batches < other.axes.pp and plan.axes.pp < other.axes.pp:
            other = change(other, batch__micro_batches=other.axes.pp)
        pp, samples = other.axes.pp, space.workload.global_batch // (plan.axes.data * plan.batch.micro_batches)
        count, rest = divmod(space.workload.global_batch, other.axes.data * max(1, samples))
        counts = [other] if rest or not count else [other, change(other, batch__micro_batches=count)]
        schedules = _schedules(pp, space) if axis == "pp" and pp > 1 else [other.schedule if pp > 1 else Schedule()]
        found += [each.with_(schedule=schedule) for each, schedule in product(counts, schedules)]
    return found


def _split(plan: Plan, replicas: int, shards: int) -> Plan:
    zero = 0 if shards == 1 else plan.zero or 3  # replicas alone share no states, of `cp` ranks neither
    state = plan.offload.state and zero > 0
    return change(
        plan, axes__dp_replicate=replicas, axes__dp_shard=shards, offload__state=state
    ).with_(zero=zero)  # fmt: skip


def _outcome(plan: Plan, best: Candidate, space: Space, goal: Goal) -> _Outcome | None:
    """What a neighbour would do; None where it is the same plan."""
    if plan == best.plan or plan.world != best.plan.world:
        return None
    without = used(plan, space.left_out)
    if without:
        return _Outcome((REFUSED, 0.0), f"left out: {_in_words(next(iter(without.values())))}", plan)
    if why := space.why_refused(plan):
        return _Outcome((REFUSED, 0.0), f"refused: {why}", plan)
    device = space.cluster.device
    try:
        workload = space.workload
        memory = estimate_memory(space.profile, plan, workload, stack=space.stack, device=device)
        time = estimate_time(space.profile, space.cluster, plan, workload, stack=space.stack)
    except ShardwiseError:
        return _Outcome((3, 0.0), "the batch does not divide", plan)
    if not memory.fits:
        lacks = f"{spelled(memory.device, 0)} do not fit{_with_recompute(plan, best, space)}"
        return _Outcome((2, memory.device), lacks, plan)
    if lack := host_lack(memory, plan, space.cluster):
        return _Outcome((2, 0.0), lack, plan)
    share = (memory.device - memory.held) / device.memory
    is_tight = not memory.fits_in(device.memory * (1 - HEADROOM))
    tight = f", memory {share:.0%} full" if is_tight else ""
    other = Candidate(plan=plan, memory=memory, time=time)
    found = f"{_percent(time.total, best.time.total)}{tight}"
    if goal == "memory":
        found = f"{_gib(other, best)}, {found}"
    if words := sorted({*space.forbid} & features_of(plan)):
        return _Outcome(
            (FORBIDDEN, other.score(goal)), f"{found}, forbidden ({', '.join(map(axis_word, words))})", plan
        )
    return _Outcome((is_tight, other.score(goal)), found, plan)


def _in_words(why: str) -> str:
    """What a limit of modules is, and its id; another reason as it is."""
    return f"{MODULES[why].partition(': ')[2].partition(';')[0].rstrip('.')} ({why})" if why in MODULES else why


def _with_recompute(plan: Plan, best: Candidate, space: Space) -> str:
    """What recompute would do beside states that are offloaded, where these alone are not enough."""
    if not plan.offload.state or best.plan.offload.state or plan.recompute.mode == "blocks":
        return ""
    plan = plan.with_(recompute=Recompute(mode="blocks"))
    plan = plan.with_(compile=space.compiles(plan))
    memory = estimate_memory(space.profile, plan, space.workload, stack=space.stack, device=space.cluster.device)
    if space.broken(plan) or not memory.fits:
        return ""
    lack = host_lack(memory, plan, space.cluster)
    return f" (with recompute=blocks {spelled(memory.device, 0)} do{f', but {lack}' if lack else ''})"


def _percent(seconds: float, best: float) -> str:
    ratio = seconds / best - 1
    if abs(ratio) < 0.001:
        return "as fast"
    return f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'}"


def _gib(other: Candidate, best: Candidate) -> str:
    """How much more it needs; without what allocators give back before memory runs out."""
    return spelled(other.needs - best.needs, 2, "+")


def why_lost(other: Candidate, search: Search) -> str:
    """One sentence: by how much, and which terms made it."""
    best = search.best
    assert best is not None
    ratio = other.score(search.goal) / best.score(search.goal) - 1
    if ratio <= ALIKE and simplicity(best.plan) < simplicity(other.plan):
        return SIMPLER
    if search.goal == "memory":
        return _gib(other, best)
    share = other.plan.world / best.plan.world if search.goal == "cost" else 1.0  # device seconds
    names = sorted({*other.time.terms, *best.time.terms})
    gaps = {name: other.time.terms.get(name, 0.0) * share - best.time.terms.get(name, 0.0) for name in names}
    worst = [name for name in sorted(gaps, key=lambda name: -gaps[name]) if gaps[name] > 0.0005 * best.time.total][:2]
    because = ", ".join(f"{name} +{gaps[name] / best.time.total:.1%}" for name in worst)
    return f"{ratio:.1%} {'dearer' if search.goal == 'cost' else 'slower'}" + (f": {because}" if because else "")


def binds(candidate: Candidate, space: Space) -> str:
    """What limits this plan: the term of the step, rows that kernels dislike, and how near memory is to its limit."""
    total = candidate.time.total
    terms = sorted(candidate.time.terms.items(), key=lambda item: -item[1])
    name, seconds = terms[0]
    rest = next(((n, s) for n, s in terms[1:] if s > 0.01 * total), None)
    text = f"{name} takes {seconds / total:.0%} of the step" + (f", {rest[0]} {rest[1] / total:.0%}" if rest else "")
    share = candidate.needs / space.cluster.device.memory
    worst = candidate.memory.peak
    memory = f"{share:.0%} of memory is needed on pipeline rank {worst.rank} at the {worst.phase}"
    return "; ".join(part for part in (text, _unaligned(candidate, space), memory) if part)


def _unaligned(candidate: Candidate, space: Space) -> str:
    """What sizes that are no multiples of 8 cost (`kernels.unaligned_share`); empty below a hundredth of the step."""
    device, vocab = space.cluster.device, space.profile.vocab
    even = space.cluster.with_(device=replace(device, curve=replace(device.curve, unaligned=1.0)))
    least = estimate_time(space.profile, even, candidate.plan, space.workload, stack=space.stack).total
    lost = 1 - least / candidate.time.total
    if lost < 0.01:
        return ""
    named = f" (the vocabulary's {vocab:,}; {ceil(vocab / 64) * 64:,} would be one)" if vocab % 8 else ""
    return f"{lost:.0%} of it is lost to rows whose size is no multiple of 8{named}"
