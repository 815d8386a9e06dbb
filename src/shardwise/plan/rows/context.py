"""Rows of the table of constraints: the context axis. See `constraints.py`."""

from __future__ import annotations

from shardwise.plan.plan import Context, Plan
from shardwise.plan.ranks.sequence import divide, num_pieces
from shardwise.plan.repair import Case, Hit, change, resize, table

CONTEXT, _row = table()


def _smaller(plan: Plan) -> list[Plan]:
    """Fewer ranks on the axis; without it, its options go too."""
    plans = [resize(plan, "cp", d) for d in range(plan.axes.cp - 1, 0, -1) if plan.axes.cp % d == 0]
    return [p if p.axes.cp > 1 else change(p, context=Context()) for p in plans]


@_row("cp.options", "`context` and `balance` say how the `cp` axis is used, so they need `cp` above 1.")
def _options(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.cp > 1 or plan.context == Context():
        return None
    return Hit(
        what="context and balance divide sequences over the cp axis, and that axis has one rank",
        found=f"cp=1, context={plan.context.kind}, balance={plan.context.balance}",
        fix="drop them, or add cp ranks",
        plans=[change(plan, context=Context())],
    )


@_row(
    "cp.compile",
    "`compile` with `cp`: attention is carried over the ranks by a mode that compiled code does not see.",
)
def _compile(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.cp == 1 or not plan.compile:
        return None
    return Hit(
        what="compiled blocks do not exchange keys and values over the cp axis in this version",
        found=f"compile, cp={plan.axes.cp}",
        fix="drop compile, or use cp1",
        plans=[change(plan, compile=False), *_smaller(plan)],
    )


@_row("cp.heads", "`context=ulysses` exchanges the sequence for heads: `tp x cp` divides the query heads.")
def _heads(case: Case) -> Hit | None:
    plan, spec = case.plan, case.spec
    cp, tp = plan.axes.cp, plan.axes.tp
    if cp == 1 or spec is None or plan.context.kind != "ulysses" or spec.num_heads % (tp * cp) == 0:
        return None
    return Hit(
        what=f"context=ulysses deals out the {spec.num_heads} heads of {spec.name} over tp x cp ranks",
        found=f"{spec.num_heads} mod ({tp} x {cp}) = {spec.num_heads % (tp * cp)}",
        fix="use context=ring or context=gather, which keep heads whole, or a smaller cp",
        plans=[change(plan, context__kind="ring"), *_smaller(plan)],
    )


@_row("cp.length", "Every rank of `cp` needs a token of each piece: `2 x cp` pieces, `cp` with `balance=contiguous`.")
def _length(case: Case) -> Hit | None:
    plan, length = case.plan, case.seq_len
    least = num_pieces(plan.axes.cp, plan.context.balance)
    if plan.axes.cp == 1 or length is None or length >= least:
        return None
    return Hit(
        what=f"a sequence of {length} tokens is cut into {least} pieces",
        found=f"cp={plan.axes.cp}, balance={plan.context.balance}",
        fix=f"use sequences of at least {least} tokens, or a smaller cp",
        plans=_smaller(plan),
    )


@_row(
    "cp.sequence-length",
    "With `seq`, `tp` divides the tokens of each rank of `cp`; a multiple of `2 x cp x tp` always does.",
)
def _sequence_length(case: Case) -> Hit | None:
    plan, length = case.plan, case.seq_len
    cp, tp = plan.axes.cp, plan.axes.tp
    if cp == 1 or length is None or not plan.tensor.sequence:
        return None
    sizes = divide(length, cp, plan.context.balance).sizes
    if all(size % tp == 0 for size in sizes):
        return None
    unit = tp * num_pieces(cp, plan.context.balance)
    return Hit(
        what=f"seq splits each cp rank's tokens over tp={tp} ranks, and they do not divide",
        found=f"{length} tokens over cp={cp}: {', '.join(map(str, sorted(set(sizes))))}",
        fix=f"use a length that is a multiple of {unit}, or drop seq",
        plans=[change(plan, tensor__sequence=False), *_smaller(plan)],
    )
