"""`shardwise estimate`: memory and time of one given plan, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from shardwise.cli.options.adapted import AdaptersOption, BaseOption, refuse_traced
from shardwise.cli.options.made_for import question_of
from shardwise.cli.options.planning import (
    BatchOption,
    BlocksOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    OptimizerOption,
    PriceOption,
    Question,
    SeqOption,
    StackOption,
    TokensOption,
    TraceOnOption,
    estimate_json,
    said_json,
    show_assumed,
    show_memory,
    show_time,
)
from shardwise.cli.options.uneven import ImbalanceOption
from shardwise.cli.output import console, plan_json, print_json, show_likeness
from shardwise.cli.plan import load_plan
from shardwise.cli.traffic import sent_by
from shardwise.errors import ExitCode, PlanError
from shardwise.hardware.cluster import GIB
from shardwise.plan.constraints import check, refuse, refuse_frozen
from shardwise.plan.hosting import host_lack
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.repair import change
from shardwise.plan.stack import Stack
from shardwise.plan.timing import StepTime, estimate_time

if TYPE_CHECKING:
    from shardwise.diagnose.tracing.estimate import TracedEstimate


def estimate(
    plan: Annotated[str, typer.Argument(help="A shorthand ('fsdp8 tp2 / mb4 / bf16'), or a .toml or .json file.")],
    model: ModelOption = "",
    cluster: ClusterOption = "",
    seq: SeqOption = None,
    tokens: TokensOption = None,
    global_batch: BatchOption = None,
    optimizer: OptimizerOption = "",
    stack: StackOption = "",
    price: PriceOption = None,
    expert_imbalance: ImbalanceOption = None,
    adapters: AdaptersOption = "",
    base: BaseOption = "",
    traffic: Annotated[bool, typer.Option("--traffic", help="Show what a rank sends in a step.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Trace the real step of a rank, without its values.")] = False,
    trace_on: TraceOnOption = "meta",
    blocks: BlocksOption = "",
    json: JsonOption = False,
) -> None:
    """Estimate one plan: exit 0, 1 when it is refused or does not fit, 2 on a usage error."""
    parsed = load_plan(plan)
    given = {"model": model, "cluster": cluster, "seq": seq, "global_batch": global_batch, "tokens": tokens}
    more = {"optimizer": optimizer, "stack": stack, "price": price, "trace_on": trace_on, "blocks": blocks}
    more |= {"adapters": adapters, "base": base}
    asked, name = question_of("estimate", plan, parsed, imbalance=expert_imbalance, **given, **more)
    parsed = as_asked(parsed, asked)
    found = asked.stack(name)
    memory, step = estimates(parsed, asked, found)
    refuse_traced(asked, trace=trace, traffic=traffic)
    sent = sent_by(parsed, asked) if traffic else None
    if sent is not None and sent.note:
        asked = replace(asked, assumed=(*asked.assumed, sent.note))
    traced = _traced(parsed, asked) if trace else []
    if json:
        answer = estimate_json(memory, step, parsed, asked.cluster)
        if sent is not None:
            answer["traffic"] = sent.to_json()
        if trace:
            answer["trace"] = [_trace_json(each) for each in traced]
        print_json({"plan": plan_json(parsed), **answer, **said_json(parsed, asked, found)})
    else:
        out = console()
        out.print(f"{parsed}, {asked.profile.name} on {asked.cluster.name}", markup=False)
        show_memory(out, memory, parsed, asked.cluster)
        show_time(out, step, asked.cluster)
        show_likeness(out, parsed, asked.profile)
        if sent is not None:
            out.print(sent.table())
        for each in traced:
            out.print(_trace_table(each))
        show_assumed(out, parsed, asked, found)
    if not memory.fits or host_lack(memory, parsed, asked.cluster):
        raise typer.Exit(ExitCode.REFUSED)


def as_asked(plan: Plan, asked: Question) -> Plan:
    """The plan with the blocks and the batch that its numbers are of: options win over what it says."""
    plan = plan.with_(blocks=asked.blocks or "auto") if asked.factory else plan
    return change(plan, batch__global_size=asked.workload.global_batch) if plan.batch.global_size else plan


def _traced(plan: Plan, asked: Question) -> list[TracedEstimate]:
    """The traced step of the first rank, and with a pipeline of the last.

    Raises:
        ModelError: sizes that no model of Shardwise's own has; a module that needs values.
    """
    from shardwise.diagnose.tracing.estimate import estimate_by_trace  # torch, for those who ask
    from shardwise.diagnose.tracing.module import estimate_module_by_trace

    ranks = [0, plan.world - 1] if plan.axes.pp > 1 else [0]
    is_cpu = asked.cluster.device.name.startswith("cpu")
    if asked.spec is not None:
        return [estimate_by_trace(asked.spec, plan, asked.workload, rank=rank, is_cpu=is_cpu) for rank in ranks]
    assert asked.factory is not None, "a question without sizes has a module"
    return [estimate_module_by_trace(asked.factory, plan, asked.workload, rank=rank, is_cpu=is_cpu) for rank in ranks]


def _trace_json(traced: TracedEstimate) -> dict[str, object]:
    traffic = [
        {"kind": kind, "axis": axis, "times": each.times, "bytes": each.num_bytes}
        for (kind, axis), each in traced.traffic.items()
    ]
    return {
        "rank": traced.rank,
        "peak_bytes": traced.peak,
        "phase": traced.phase,
        "held": dict(traced.held),
        "collectives": traffic,
    }


def _trace_table(traced: TracedEstimate) -> Table:
    unit, name = (GIB, "GiB") if traced.peak > GIB / 10 else (2**20, "MiB")
    held = ", ".join(f"{kind} {size / unit:.2f}" for kind, size in traced.held.items() if size)
    table = Table(
        title=f"traced step of rank {traced.rank}: {traced.peak / unit:.2f} {name} of live tensors ({traced.phase})",
        caption=f"{name}: {held}; kernels of the CPU, eager",
    )
    for heading in ("collective", "axis", "times per step", f"{name} per step"):
        table.add_column(heading)
    for (kind, axis), each in traced.traffic.items():
        table.add_row(kind, axis, f"{each.times:,}", f"{each.num_bytes / unit:.3f}")
    return table


def estimates(plan: Plan, asked: Question, stack: Stack) -> tuple[Memory, StepTime]:
    """Both estimates of a legal plan.

    Raises:
        PlanError: a plan that the constraints refuse, or that needs more devices, or other units, than the cluster has.
        ModelError: nothing of the model is trained.
    """
    workload, world = asked.workload, asked.cluster.world
    if plan.world > world:  # before the constraints, which would ask for a batch for so many
        raise PlanError(
            f"the plan `{plan}` needs {plan.world} devices, and {asked.cluster.name} has {world}; needed at "
            "most as many: use smaller axes, or a larger cluster"
        )
    refuse_frozen(asked.profile)
    refuse(check(plan, spec=asked.read(stack), global_batch=workload.global_batch, seq_len=workload.seq_len))
    device, float8 = asked.cluster.device, plan.float8
    if float8.recipe != "none" and not float8.emulate and not device.rates.fp8:
        raise PlanError(
            f"the plan `{plan}` multiplies in float8, and {device.name} has no unit for it (rates.fp8 of a cluster "
            "file): drop fp8, or use another device"
        )
    memory = estimate_memory(asked.profile, plan, workload, stack=stack, device=device)
    return memory, estimate_time(asked.profile, asked.cluster, plan, workload, stack=stack)
