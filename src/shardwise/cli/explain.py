"""`shardwise explain`: each decision of a plan against its neighbours, and what binds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from shardwise.cli.estimate import estimates
from shardwise.cli.output import console, plan_json, print_json
from shardwise.cli.plan import load_plan
from shardwise.cli.planning import (
    BatchOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    OptimizerOption,
    SeqOption,
    StackOption,
    TokensOption,
    TraceOnOption,
    question,
    show_assumed,
    show_memory,
    show_time,
)
from shardwise.plan.reasons import binds, decisions
from shardwise.plan.report import mesh_picture
from shardwise.plan.search import Candidate
from shardwise.plan.space import OPT_IN, Space


def explain(
    plan: Annotated[str, typer.Argument(help="A plan.toml, or a shorthand.")],
    model: ModelOption,
    cluster: ClusterOption,
    seq: SeqOption = None,
    tokens: TokensOption = None,
    global_batch: BatchOption = None,
    optimizer: OptimizerOption = "adamw",
    stack: StackOption = "",
    trace_on: TraceOnOption = "meta",
    json: JsonOption = False,
) -> None:
    """Explain a plan: what each decision's nearest alternatives would do."""
    parsed = load_plan(plan)
    batch = global_batch or (parsed.batch.global_size if tokens is None else None)
    asked = question(model, cluster, seq=seq, batch=batch, tokens=tokens, optimizer=optimizer, trace_on=trace_on)
    found = asked.stack(stack)
    memory, step = estimates(parsed, asked, found)
    words = tuple(word for word in OPT_IN if word != "fp8" or asked.cluster.device.rates.fp8)
    space = Space(asked.profile, asked.limits, asked.cluster, asked.workload, found, words)
    chosen = Candidate(plan=parsed, memory=memory, time=step)
    why = decisions(chosen, space)
    if json:
        print_json({"plan": plan_json(parsed), "decisions": [vars(d) for d in why], "binds": binds(chosen, space)})
        return
    out = console()
    table = Table(title=str(parsed), title_justify="left")
    for column in ("decision", "value", "what else would do"):
        table.add_column(column, overflow="fold")
    for decision in why:
        table.add_row(decision.field, decision.value, decision.reason)
    out.print(table)
    out.print(mesh_picture(parsed), markup=False)
    show_memory(out, memory, asked.cluster)
    show_time(out, step, asked.cluster)
    out.print(f"what binds: {binds(chosen, space)}")
    show_assumed(out, asked, found)
