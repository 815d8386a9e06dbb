"""Rows of the table of constraints: float8 and precision rules. See `constraints.py`."""

from __future__ import annotations

from shardwise.plan.plan import Plan
from shardwise.plan.repair import Case, Hit, change, table

PRECISION, _row = table()


def _without(plan: Plan) -> Plan:
    """The plan without float8, nor rules that need it."""
    rules = tuple(rule for rule in plan.precision_rules if not rule.endswith(":fp8"))
    none = {"recipe": "none", "all_gather": False, "emulate": False}
    return change(plan, precision_rules=rules, **{f"float8__{key}": value for key, value in none.items()})


@_row(
    "fp8.device",
    "Float8 products are those of CUDA devices (compute capability 8.9, rows 9.0: `apply` asks the device). Elsewhere "
    "`fp8=...+emulate` computes them in fp32, to prove a plan.",
)
def _device(case: Case) -> Hit | None:
    float8 = case.plan.float8
    if float8.recipe == "none" or float8.emulate or case.device in (None, "cuda"):
        return None
    return Hit(
        what="the device has no float8 products",
        found=f"fp8={float8.recipe} on {case.device}",
        fix="drop fp8, or emulate it",
        plans=[_without(case.plan), change(case.plan, float8__emulate=True)],
    )


@_row("fp8.precision", "Float8 layers stand in a model of `bf16` or `fp32`; others are not proven.")
def _precision(case: Case) -> Hit | None:
    plan = case.plan
    if plan.float8.recipe == "none" or plan.precision in ("bf16", "fp32"):
        return None
    return Hit(
        what="float8 layers need bf16 or fp32 around them",
        found=f"fp8={plan.float8.recipe}, {plan.precision}",
        fix="use bf16, or drop fp8",
        plans=[_without(plan)],
    )


@_row(
    "fp8.gather",
    "Weights are cast to float8 before they are gathered with one scale for the tensor, which all its shards agree on: "
    "`tensorwise`, zero 1-3, and no `tp`, `ep`, `offload` or replicas, which torchao's gathering is not proven with.",
)
def _gather(case: Case) -> Hit | None:
    plan, axes = case.plan, case.plan.axes
    if not plan.float8.all_gather:
        return None
    alone = max(axes.tp, axes.ep, axes.dp_replicate) == 1 and not plan.offload.state
    if plan.float8.recipe == "tensorwise" and alone and plan.mixed and (plan.zero or axes.data == 1):
        return None
    return Hit(
        what="float8 all-gather needs tensorwise scales, bf16, zero 1-3, without tp, ep, replicas or offloaded state",
        found=f"fp8={plan.float8.recipe}, {plan.precision}, zero={plan.zero}, tp={axes.tp}, ep={axes.ep}, "
        f"dp={axes.dp_replicate}, offload.state={plan.offload.state}",
        fix="drop gather: weights are then gathered in the plan's type and cast after it, which is exact everywhere",
        plans=[change(plan, float8__all_gather=False)],
    )


@_row(
    "fp8.context",
    "Under `cp` a rank holds a part of each sequence: a scale over tokens would be that of the part, and scales of "
    "rows are not proven with it.",
)
def _context(case: Case) -> Hit | None:
    plan = case.plan
    if plan.axes.cp == 1 or plan.float8.recipe == "none":
        return None
    return Hit(
        what="float8 scales over tokens are not those of one process where cp divides the sequence",
        found=f"fp8={plan.float8.recipe}, cp={plan.axes.cp}",
        fix="drop fp8, or cp",
        plans=[_without(plan)],
    )


@_row(
    "fp8.micro-batch",
    "Note: float8 scales are those of one micro-batch on one data rank. Plans with as many data ranks x micro-batches "
    "compute the same; others differ by rounding. `rowwise-hp` scales each token by itself and never differs by that.",
)
def _micro_batch(case: Case) -> Hit | None:
    plan = case.plan
    parts = plan.axes.data * plan.batch.micro_batches
    if plan.float8.recipe in ("none", "rowwise-hp") or parts == 1:
        return None
    return Hit(
        severity="note",
        what="how the batch is divided decides how float8 rounds",
        found=f"data ranks x micro-batches = {parts}",
        fix="keep that product when the mesh changes, or use fp8=rowwise-hp",
    )


@_row("precision.rules", "Precision rules give modules another type than `bf16`, `fp16` or `fp32`; `:fp8` needs fp8.")
def _rules(case: Case) -> Hit | None:
    plan, types = case.plan, set(case.plan.module_types.values())
    typed = types - {"fp8"} and plan.precision not in ("bf16", "fp16", "fp32")
    if not typed and not ("fp8" in types and plan.float8.recipe == "none"):
        return None
    return Hit(
        what="precision rules need a plan of bf16, fp16 or fp32, and those with fp8 need fp8 in the plan",
        found=f"{', '.join(plan.precision_rules)} with {plan.precision}, fp8={plan.float8.recipe}",
        fix="drop the rules, or change the plan's precision",
        plans=[change(plan, precision_rules=())],
    )


@_row(
    "precision.rules-groups",
    "A module with a type of its own is gathered by itself, inside of its block: not with `compile`, `wrap` or "
    "`recompute=ops`, which take the block as one.",
)
def _groups(case: Case) -> Hit | None:
    plan = case.plan
    nested = set(plan.module_types.values()) - {"fp8"}
    if not nested or not (plan.compile or plan.wrap_min_params or plan.recompute.mode == "ops"):
        return None
    return Hit(
        what="modules with a type of their own are gathered inside their block",
        found=f"{', '.join(plan.precision_rules)} with compile={str(plan.compile).lower()}, "
        f"wrap={plan.wrap_min_params}, recompute={plan.recompute.mode}",
        fix="drop the rules, or compile, wrap and recompute=ops",
        plans=[change(plan, precision_rules=())],
    )
