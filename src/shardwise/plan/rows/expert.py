"""Rows of the table of constraints: experts and the `ep` axis. See `constraints.py`."""

from __future__ import annotations

from shardwise.plan.plan import Plan
from shardwise.plan.repair import Case, Hit, change, divisors, resize, table

EXPERTS, _row = table()


def _smaller(plan: Plan, *sizes: int) -> list[Plan]:
    """The plan with each smaller `ep` that divides all sizes, largest first."""
    fits = (d for d in range(plan.axes.ep - 1, 0, -1) if all(size % d == 0 for size in sizes))
    return [resize(plan, "ep", degree) for degree in fits]


def _pool(plan: Plan) -> int:
    """The ranks that `ep` divides."""
    return plan.axes.dp_shard * plan.axes.cp * plan.axes.tp


@_row("ep.model", "`ep` deals out experts, so the model has some.")
def _model(case: Case) -> Hit | None:
    if case.plan.axes.ep == 1 or case.spec is None or case.spec.kind == "moe":
        return None
    return Hit(
        what=f"{case.spec.name} has no experts to deal out",
        found=f"ep={case.plan.axes.ep}, kind={case.spec.kind}",
        fix="use ep=1, or a model with experts",
        plans=[resize(case.plan, "ep", 1)],
    )


@_row("ep.experts", "`ep` divides the experts of a layer, which are dealt out whole.")
def _experts(case: Case) -> Hit | None:
    ep = case.plan.axes.ep
    if case.spec is None or case.spec.kind != "moe" or case.spec.num_experts % ep == 0:
        return None
    count = case.spec.num_experts
    more = "more expert ranks than experts" if ep > count else f"ep={ep} does not divide the experts"
    return Hit(
        what=f"{more} of {case.spec.name}",
        found=f"ep={ep}, experts={count}",
        fix=f"use ep in {{{', '.join(map(str, divisors(count)))}}}",
        plans=_smaller(case.plan, count),
    )


@_row("ep.ranks", "`ep` re-uses the ranks of `fsdp x cp x tp` and adds none, so it divides their number.")
def _ranks(case: Case) -> Hit | None:
    plan, pool = case.plan, _pool(case.plan)
    if pool % plan.axes.ep == 0:
        return None
    fits = ", ".join(map(str, divisors(pool)))
    dp = plan.axes.dp_replicate
    sharded = change(plan, axes__dp_replicate=1, axes__dp_shard=plan.axes.data, zero=plan.zero or 3)
    return Hit(
        what=f"ep={plan.axes.ep} does not divide the ranks that it is to re-use",
        found=f"fsdp x cp x tp = {plan.axes.dp_shard} x {plan.axes.cp} x {plan.axes.tp} = {pool}",
        fix=f"use ep in {{{fits}}}" + (f", or write fsdp{dp} in place of dp{dp}" if dp > 1 else ""),
        plans=[*([sharded] if dp > 1 else []), *_smaller(plan, pool)],
    )


@_row(
    "ep.zero",
    "Under `zero` 0 nobody sums the gradients of an expert over the ranks that hold copies of it, unless `ep` takes "
    "all ranks of `fsdp x cp x tp` and there are none.",
)
def _zero(case: Case) -> Hit | None:
    plan, pool = case.plan, _pool(case.plan)
    if plan.zero or plan.axes.ep in (1, pool) or pool % plan.axes.ep:
        return None
    return Hit(
        what=f"{pool // plan.axes.ep} ranks hold copies of each expert, and zero=0 does not sum their gradients",
        found=f"ep={plan.axes.ep}, fsdp x cp x tp={pool}, zero=0",
        fix=f"use ep={pool}, or zero1, zero2 or zero3",
        plans=[change(plan, axes__ep=pool), change(plan, zero=1), resize(plan, "ep", 1)],
    )


@_row("ep.wrap", "`wrap` groups parameters by size, and would mix those of experts, which have a mesh of their own.")
def _wrap(case: Case) -> Hit | None:
    if case.plan.axes.ep == 1 or not case.plan.wrap_min_params:
        return None
    return Hit(
        what="wrap would group experts with other parameters, which lie on another mesh",
        found=f"ep={case.plan.axes.ep}, wrap={case.plan.wrap_min_params}",
        fix="drop wrap: blocks are gathered one by one, and their experts apart",
        plans=[change(case.plan, wrap_min_params=0)],
    )


@_row("ep.reshard", "An integer `reshard` with `ep` above 1: torch cannot reshard a DTensor to a smaller group.")
def _reshard(case: Case) -> Hit | None:
    dial = case.plan.communication.reshard_after_forward
    if case.plan.axes.ep == 1 or dial is None or isinstance(dial, bool):
        return None
    return Hit(
        what="torch cannot reshard experts, which are DTensors, to a smaller group",
        found=f"reshard={dial}, ep={case.plan.axes.ep}",
        fix="use reshard=true (every rank) or reshard=false",
        plans=[change(case.plan, communication__reshard_after_forward=None)],
    )


@_row(
    "ep.compile",
    "How many tokens an expert gets is known only when it runs; compiled blocks of experts are not proven equal.",
)
def _compile(case: Case) -> Hit | None:
    has_experts = case.plan.axes.ep > 1 or (case.spec is not None and case.spec.kind == "moe")
    if not case.plan.compile or not has_experts:
        return None
    return Hit(
        what="blocks with experts are not compiled in this version",
        found=f"compile, ep={case.plan.axes.ep}" + (f", {case.spec.name}" if case.spec else ""),
        fix="drop compile",
        plans=[change(case.plan, compile=False)],
    )
