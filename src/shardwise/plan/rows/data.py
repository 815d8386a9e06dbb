"""Rows of the table of constraints: world, data axes, batch, recompute and precision. See `constraints.py`."""

from __future__ import annotations

from shardwise.plan.plan import Plan
from shardwise.plan.repair import Case, Hit, change, distance, fit_batch, fit_world, table

WORLD, _world_row = table()
DATA, _data_row = table()
BLOCKS, _block_row = table()


@_world_row("world.size", "The product of the axes is not the number of ranks that run.")
def _world(case: Case) -> Hit | None:
    plan = case.plan
    if case.world is None or case.world == plan.world:
        return None
    plans = fit_world(plan, case.world)
    near = min(plans, key=lambda p: distance(plan, p), default=None)
    return Hit(
        what=f"the plan needs {plan.world} ranks and {case.world} run",
        found=f"pp x dp x fsdp x cp x tp = {plan.axes.pp} x {plan.axes.dp_replicate} x {plan.axes.dp_shard} x "
        f"{plan.axes.cp} x {plan.axes.tp} = {plan.world}, world = {case.world}",
        fix=f"start {plan.world} ranks, or " + (f"use the axes of `{near}`" if near else "another plan"),
        plans=plans,
    )


@_data_row(
    "zero.axis", "`zero` and the `fsdp` axis go together: zero 1-3 shards over `fsdp`, zero 0 replicates over `dp`."
)
def _zero_axis(case: Case) -> Hit | None:
    plan, dp, fsdp = case.plan, case.plan.axes.dp_replicate, case.plan.axes.dp_shard
    if plan.zero and fsdp == 1 and dp > 1:
        return Hit(
            what=f"zero={plan.zero} shards over the fsdp axis, and that axis has one rank",
            found=f"zero={plan.zero}, dp={dp}, fsdp=1",
            fix=f"write fsdp{dp} in place of dp{dp}, or drop zero{plan.zero}",
            plans=[change(plan, axes__dp_replicate=1, axes__dp_shard=dp)],
        )
    if not plan.zero and fsdp > 1:
        return Hit(
            what="zero=0 shards nothing over the fsdp axis",
            found=f"zero=0, fsdp={fsdp}",
            fix=f"write dp{dp * fsdp} in place of fsdp{fsdp}, or choose zero1, zero2 or zero3",
            plans=[change(plan, axes__dp_replicate=dp * fsdp, axes__dp_shard=1)],
        )
    return None


@_data_row("zero.single", "Note: with one data rank, and no `cp`, `zero` shards nothing.")
def _zero_single(case: Case) -> Hit | None:
    axes = case.plan.axes
    if not (case.plan.zero and axes.data * axes.cp == 1 and not case.plan.offload.state):
        return None
    return Hit(
        severity="note",
        what="with one data rank there is nothing to shard over",
        found=f"zero={case.plan.zero}, dp=1, fsdp=1, cp=1",
        fix="drop zero, or add fsdp ranks",
    )


@_data_row(
    "zero.reshard",
    "`reshard` is a dial of zero 3: `true` frees parameters after forward, an integer keeps them on smaller groups and "
    "must divide `fsdp`. Zero 1 and 2 keep parameters, zero 0 has nothing to free.",
)
def _reshard(case: Case) -> Hit | None:
    plan, dial, fsdp = case.plan, case.plan.communication.reshard_after_forward, case.plan.axes.dp_shard
    drop = change(plan, communication__reshard_after_forward=None)
    if dial is None or (dial is False and plan.zero):
        return None
    if plan.zero != 3:
        return Hit(
            what=f"reshard={str(dial).lower()} belongs to zero=3",
            found=f"zero={plan.zero}",
            fix="choose zero3, or drop reshard",
            plans=[change(plan, zero=3), drop] if plan.zero else [drop],
        )
    if not isinstance(dial, bool) and fsdp % dial:
        sizes = [n for n in range(2, fsdp + 1) if fsdp % n == 0]
        return Hit(
            what=f"reshard={dial} does not divide the fsdp axis",
            found=f"fsdp={fsdp}",
            fix=f"use reshard in {set(sizes)}" if sizes else "drop reshard",
            plans=[*(change(plan, communication__reshard_after_forward=n) for n in sizes), drop],
        )
    return None


def _is_to_smaller_group(plan: Plan) -> bool:
    """Whether parameters, which are cut over `fsdp` x `cp`, are kept on fewer ranks after forward."""
    dial = plan.communication.reshard_after_forward
    return type(dial) is int and dial < plan.axes.dp_shard * plan.axes.cp


@_data_row(
    "zero.reshard-tensor",
    "An integer `reshard` below `fsdp` x `cp` with `tp` above 1: torch cannot reshard a DTensor to a smaller group.",
)
def _reshard_tensor(case: Case) -> Hit | None:
    plan, dial = case.plan, case.plan.communication.reshard_after_forward
    if not _is_to_smaller_group(plan) or plan.axes.tp == 1:
        return None
    return Hit(
        what="torch cannot reshard tensor-parallel parameters to a smaller group",
        found=f"reshard={dial}, fsdp={plan.axes.dp_shard}, cp={plan.axes.cp}, tp={plan.axes.tp}",
        fix="use reshard=true (every rank of fsdp) or reshard=false",
        plans=[change(plan, communication__reshard_after_forward=None)],
    )


@_data_row(
    "zero.reshard-pipeline",
    "An integer `reshard` below `fsdp` x `cp` with `pp` above 1: torch makes the smaller groups stage by stage, and "
    "the ranks of other stages wait for ever (torch 2.13).",
)
def _reshard_pipeline(case: Case) -> Hit | None:
    plan, dial = case.plan, case.plan.communication.reshard_after_forward
    if not _is_to_smaller_group(plan) or plan.axes.pp == 1:
        return None
    return Hit(
        what="torch cannot make groups for resharding on one pipeline stage alone",
        found=f"reshard={dial}, fsdp={plan.axes.dp_shard}, cp={plan.axes.cp}, pp={plan.axes.pp}",
        fix="use reshard=true (every rank of fsdp) or reshard=false",
        plans=[change(plan, communication__reshard_after_forward=None)],
    )


@_data_row("offload.state", "State is offloaded by the sharding engine, so `offload=state` needs zero 1, 2 or 3.")
def _offload_state(case: Case) -> Hit | None:
    plan, dp = case.plan, case.plan.axes.dp_replicate
    if not plan.offload.state or plan.zero:
        return None
    return Hit(
        what="offload=state needs sharded state (zero 1, 2 or 3)",
        found=f"zero=0, dp={dp}, fsdp={plan.axes.dp_shard}",
        fix=f"write fsdp{dp} in place of dp{dp}" if dp > 1 else "add zero3, or drop offload=state",
        plans=[
            change(plan, zero=3, axes__dp_replicate=1, axes__dp_shard=plan.axes.data),
            change(plan, offload__state=False),
        ],
    )


@_data_row(
    "ddp.flags",
    "`static-graph` and `find-unused` are dials of DDP, which carries plain replication: zero 0, fp32, fp64 or "
    "bf16-pure, pp and tp 1. Elsewhere they would be ignored.",
)
def _ddp_flags(case: Case) -> Hit | None:
    plan, dials = case.plan, case.plan.communication
    if not (dials.static_graph or dials.find_unused) or case.uses_ddp:
        return None
    alone = plan.axes.data == 1 and not plan.zero
    return Hit(
        severity="note" if alone else "error",
        what="static-graph and find-unused are dials of DDP, and this plan does not use it",
        found=f"zero={plan.zero}, dp={plan.axes.dp_replicate}, pp={plan.axes.pp}, tp={plan.axes.tp}, {plan.precision}",
        fix="drop them",
        plans=[change(plan, communication__static_graph=False, communication__find_unused=False)],
    )


@_data_row(
    "ddp.static-unused",
    "`static-graph` promises that the used parameters never change; `find-unused` looks every step.",
)
def _static_unused(case: Case) -> Hit | None:
    dials = case.plan.communication
    if not (dials.static_graph and dials.find_unused):
        return None
    return Hit(
        what="static-graph and find-unused contradict each other",
        found="both are set",
        fix="keep static-graph when every step uses the same parameters, else find-unused",
        plans=[change(case.plan, communication__static_graph=False)],
    )


@_data_row(
    "ddp.static-accumulation",
    "`static-graph` with several micro-batches: DDP of torch 2.13 fails in the first backward that it is not to "
    "reduce, and without that check would stop reducing from the second step on (pytorch issue 143580).",
)
def _static_accumulation(case: Case) -> Hit | None:
    plan = case.plan
    if not (case.uses_ddp and plan.communication.static_graph and plan.batch.micro_batches > 1):
        return None
    return Hit(
        what="DDP with static-graph does not accumulate gradients in this torch",
        found=f"static-graph, micro-batches={plan.batch.micro_batches}",
        fix="drop static-graph, or use mb1",
        plans=[change(plan, communication__static_graph=False), change(plan, batch__micro_batches=1)],
    )


@_data_row("ddp.bucket", "Warning: `bucket` and `no-bucket-view` have an effect under DDP only.")
def _bucket(case: Case) -> Hit | None:
    dials = case.plan.communication
    if case.uses_ddp or (dials.bucket_mb == 25.0 and dials.bucket_view):
        return None
    return Hit(
        severity="warning",
        what="bucket sizes have no effect without DDP",
        found=f"zero={case.plan.zero}, {case.plan.precision}, data ranks={case.plan.axes.data}",
        fix="drop bucket and no-bucket-view",
    )


@_data_row(
    "ddp.reduce",
    "DDP reduces gradients in the type of the parameters; another `reduce` needs zero 1-3 or bf16 or fp16.",
)
def _reduce(case: Case) -> Hit | None:
    plan, kind = case.plan, case.plan.communication.reduce_dtype
    own = {"bf16-pure": "bf16"}.get(plan.precision, plan.precision)
    if kind is None or not case.uses_ddp or kind == own:
        return None
    data = plan.axes.data
    return Hit(
        what=f"plain replication reduces gradients in the parameters' own type, not in {kind}",
        found=f"reduce={kind}, zero=0, {plan.precision}",
        fix=f"drop reduce, or write fsdp{data} zero2 in place of dp{data}",
        plans=[
            change(plan, communication__reduce_dtype=None),
            change(plan, zero=2, axes__dp_replicate=1, axes__dp_shard=data),
        ],
    )


@_data_row(
    "ddp.prefetch", "Warning: `prefetch` and `wrap` have an effect with zero 1-3 only, where parameters are gathered."
)
def _prefetch(case: Case) -> Hit | None:
    plan = case.plan
    if plan.zero or (plan.communication.prefetch == 1 and not plan.wrap_min_params):
        return None
    return Hit(
        severity="warning",
        what="prefetch and wrap have no effect where parameters are not sharded",
        found="zero=0",
        fix="drop them, or choose zero1, zero2 or zero3",
    )


@_data_row("batch.small", "Every data rank needs a sample of the global batch.")
def _batch_small(case: Case) -> Hit | None:
    size, data = case.plan.batch.global_size, case.plan.axes.data
    if size is None or size >= data:
        return None
    return Hit(
        what="the global batch has fewer samples than there are data ranks",
        found=f"global batch={size}, dp x fsdp={data}",
        fix=f"use a global batch of at least {data}",
        plans=[*fit_batch(case.plan), change(case.plan, batch__global_size=data)],
    )


@_data_row(
    "batch.divide",
    "Under a pipeline every micro-batch has the same shape, so data ranks x micro-batches divide the global batch.",
)
def _batch_divide(case: Case) -> Hit | None:
    size, unit = case.plan.batch.global_size, case.plan.axes.data * case.plan.batch.micro_batches
    if size is None or case.plan.axes.pp == 1 or size % unit == 0:
        return None
    near = sorted({max(1, size // unit) * unit, -(-size // unit) * unit})
    return Hit(
        what="micro-batches of a pipeline have one shape, and the global batch does not divide into them",
        found=f"global batch={size}, data ranks x micro-batches = {case.plan.axes.data} x "
        f"{case.plan.batch.micro_batches} = {unit}",
        fix=f"use a global batch of {' or '.join(map(str, near))}, or other micro-batches",
        plans=fit_batch(case.plan),
    )


@_data_row("batch.uneven", "Note: without a pipeline an uneven window is legal and exact, and some ranks wait.")
def _batch_uneven(case: Case) -> Hit | None:
    size, unit = case.plan.batch.global_size, case.plan.axes.data * case.plan.batch.micro_batches
    if size is None or case.plan.axes.pp > 1 or size < case.plan.axes.data or size % unit == 0:
        return None
    empty = size < unit
    return Hit(
        severity="warning" if empty else "note",
        what="some micro-batches are empty" if empty else "micro-batches differ in size; the update is exact",
        found=f"global batch={size}, data ranks x micro-batches = {unit}",
        fix=f"a multiple of {unit} keeps all ranks equally busy",
    )


@_block_row("recompute.every", "`recompute=everyN` takes every N-th block, N at least 1.")
def _every(case: Case) -> Hit | None:
    if case.plan.recompute.mode != "every" or case.plan.recompute.every >= 1:
        return None
    return Hit(
        what="recompute every n-th block needs n of at least 1",
        found=f"every={case.plan.recompute.every}",
        fix="use every1 for each block, every2 for every second one",
        plans=[change(case.plan, recompute__every=1)],
    )


@_block_row("recompute.ratio", "`recompute=N%` takes a share of the blocks above 0 and at most 100 %.")
def _ratio(case: Case) -> Hit | None:
    plan, ratio = case.plan, case.plan.recompute.ratio
    if plan.recompute.mode != "ratio":
        return None
    if not 0 < ratio <= 1:
        legal = change(plan, recompute__mode="none", recompute__ratio=1.0) if ratio <= 0 else None
        return Hit(
            what="the share of recomputed blocks is above 0 and at most 100 %",
            found=f"ratio={ratio}",
            fix="use a share such as 50%, or recompute=none or recompute=blocks",
            plans=[legal or change(plan, recompute__ratio=1.0)],
        )
    if case.num_blocks and int(case.num_blocks * ratio + 1e-9) == 0:
        return Hit(
            severity="warning",
            what="the share of recomputed blocks rounds to none",
            found=f"{ratio:.3g} of {case.num_blocks} blocks",
            fix=f"use at least {1 / case.num_blocks:.3g}",
        )
    return None


@_block_row(
    "recompute.ops-nested",
    "`recompute=ops` with parameters that are gathered inside a block (experts under `ep`, groups by `wrap`): torch "
    "would recompute the gathering itself, and fails.",
)
def _ops_nested(case: Case) -> Hit | None:
    plan = case.plan
    nested = plan.axes.ep > 1 or (plan.wrap_min_params and plan.zero)
    if plan.recompute.mode != "ops" or not nested:
        return None
    return Hit(
        what="per-operation recompute does not work where parameters are gathered inside the block",
        found=f"recompute=ops, ep={plan.axes.ep}, wrap={plan.wrap_min_params}",
        fix="use recompute=blocks",
        plans=[change(plan, recompute__mode="blocks"), change(plan, recompute__mode="none")],
    )


@_block_row("precision.fp64-mps", "Apple's `mps` device has no fp64.")
def _fp64(case: Case) -> Hit | None:
    if case.device != "mps" or case.plan.precision != "fp64":
        return None
    return Hit(
        what="the mps device has no fp64",
        found="fp64 on mps",
        fix="use fp32",
        plans=[_with_precision(case.plan, "fp32")],
    )


@_block_row("precision.tf32", "Note: `tf32` has an effect on fp32 matrix products of CUDA devices only.")
def _tf32(case: Case) -> Hit | None:
    elsewhere = case.device not in (None, "cuda")
    if not case.plan.tf32 or (case.plan.precision == "fp32" and not elsewhere):
        return None
    return Hit(
        severity="note",
        what="tf32 has no effect here: it is a mode of fp32 matrix products on CUDA devices",
        found=f"{case.plan.precision} on {case.device or 'an unknown device'}",
        fix="drop tf32",
    )


@_block_row("precision.reduce", "Warning: a `reduce` type narrower than the gradients loses digits on the wire.")
def _narrow(case: Case) -> Hit | None:
    kind, precision = case.plan.communication.reduce_dtype, case.plan.precision
    wide = {"fp64": 64, "fp32": 32}.get(precision, 16)
    if kind is None or {"fp32": 32}.get(kind, 16) >= wide or case.uses_ddp:
        return None
    return Hit(
        severity="warning",
        what=f"gradients of {precision} are rounded to {kind} before they are summed",
        found=f"reduce={kind}, {precision}",
        fix="drop reduce to sum in the gradients' own type",
    )


def _with_precision(plan: Plan, precision: str) -> Plan:
    return plan.with_(precision=precision)
