"""Rows of the table of constraints: the tensor axis. See `constraints.py`."""

from __future__ import annotations

from shardwise.findings import nearest
from shardwise.model.recipes import RECIPES
from shardwise.plan.plan import Plan
from shardwise.plan.repair import Case, Hit, change, divisors, shrink, table

TENSOR, _row = table()


def _divides(case: Case, size: int, noun: str, extra: str = "") -> Hit | None:
    """The hit of a size that `tp` does not divide."""
    tp = case.plan.axes.tp
    if size % tp == 0:
        return None
    assert case.spec is not None
    fits = ", ".join(str(d) for d in divisors(size) if d <= max(tp, 8))
    return Hit(
        what=f"tp={tp} does not divide the {size} {noun} of {case.spec.name}",
        found=f"{size} mod {tp} = {size % tp}",
        fix=f"use tp in {{{fits}}}{extra}",
        plans=[_plain_without_tp(plan) for plan in shrink(case.plan, "tp", size)],
    )


def _plain_without_tp(plan: Plan) -> Plan:
    """`seq` and `loss-parallel` go with the axis."""
    return plan if plan.axes.tp > 1 else change(plan, tensor__sequence=False, tensor__loss=False)


@_row("tp.heads", "`tp` divides the query heads, which are dealt out whole.")
def _heads(case: Case) -> Hit | None:
    return _divides(case, case.spec.num_heads, "heads") if case.spec else None


@_row("tp.kv-heads", "`tp` divides the key and value heads of grouped-query attention.")
def _kv_heads(case: Case) -> Hit | None:
    return _divides(case, case.spec.num_kv_heads, "key and value heads") if case.spec else None


@_row("tp.ffn", "`tp` divides the width of the feed-forward; experts are not split by it.")
def _ffn(case: Case) -> Hit | None:
    if case.spec is None or case.spec.kind == "moe":
        return None
    return _divides(case, case.spec.ffn_dim, "feed-forward units")


@_row("tp.vocab", "`tp` divides the vocabulary: embedding and head are split along it.")
def _vocab(case: Case) -> Hit | None:
    if case.spec is None:
        return None
    tp = case.plan.axes.tp
    padded = -(-case.spec.vocab_size // tp) * tp
    extra = f", or pad the model's vocabulary to {padded} (unused rows change nothing)"
    return _divides(case, case.spec.vocab_size, "tokens of the vocabulary", extra)


@_row("tp.sequence", "`seq` shards activations over the `tp` axis, so it needs `tp` above 1.")
def _sequence(case: Case) -> Hit | None:
    if case.plan.axes.tp > 1 or not case.plan.tensor.sequence:
        return None
    return Hit(
        what="seq shards activations over the tp axis, and that axis has one rank",
        found="tp=1",
        fix="drop seq, or add tp ranks",
        plans=[change(case.plan, tensor__sequence=False)],
    )


@_row("tp.sequence-length", "With `seq`, `tp` divides the sequence length.")
def _sequence_length(case: Case) -> Hit | None:
    plan, length = case.plan, case.seq_len
    if length is None or not plan.tensor.sequence or length % plan.axes.tp == 0:
        return None
    return Hit(
        what=f"seq with tp={plan.axes.tp} does not divide a sequence of {length} tokens",
        found=f"{length} mod {plan.axes.tp} = {length % plan.axes.tp}",
        fix=f"use a length that is a multiple of {plan.axes.tp}, or drop seq",
        plans=[
            change(plan, tensor__sequence=False),
            *(_plain_without_tp(smaller) for smaller in shrink(plan, "tp", length)),
        ],
    )


@_row("tp.loss", "`loss-parallel` keeps logits split over the `tp` axis, so it needs `tp` above 1.")
def _loss(case: Case) -> Hit | None:
    if case.plan.axes.tp > 1 or not case.plan.tensor.loss:
        return None
    return Hit(
        what="loss-parallel splits the logits over the tp axis, and that axis has one rank",
        found="tp=1",
        fix="drop loss-parallel, or add tp ranks",
        plans=[change(case.plan, tensor__loss=False)],
    )


@_row("tp.recipe", "`recipe` is `auto` or a known set of rules, and fits the kind of the model.")
def _recipe(case: Case) -> Hit | None:
    plan, name = case.plan, case.plan.tensor.recipe
    known = ("auto", *RECIPES)
    auto = [change(plan, tensor__recipe="auto")]
    if name not in known:
        return Hit(what=f"there is no recipe {name!r}", found=f"recipe={name}", fix=nearest(name, known), plans=auto)
    needed = "gpt" if case.spec and case.spec.kind == "gpt" else "llama"
    if case.spec is None or plan.axes.tp == 1 or name in ("auto", needed):
        return None
    return Hit(
        what=f"recipe={name} does not fit {case.spec.name}, which is of kind {case.spec.kind}",
        found=f"recipe={name}",
        fix=f"use recipe={needed}, or leave it out",
        plans=auto,
    )
