"""`shardwise explain`: each decision of a plan against its neighbours, and what binds."""

from __future__ import annotations

from typing import Annotated, cast

import typer
from rich.table import Table

from shardwise.cli.estimate import as_asked, estimates
from shardwise.cli.options.adapted import AdaptersOption, BaseOption
from shardwise.cli.options.made_for import load_made_for, question_of
from shardwise.cli.options.planning import (
    BatchOption,
    BlocksOption,
    ClusterOption,
    JsonOption,
    ModelOption,
    OptimizerOption,
    PriceOption,
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
from shardwise.errors import ConfigError, UsageError
from shardwise.plan.reasons import binds, decisions
from shardwise.plan.report import mesh_picture
from shardwise.plan.search import Candidate, Goal
from shardwise.plan.searching.space import OPT_IN, Space


def explain(
    plan: Annotated[str, typer.Argument(help="A plan.toml, or a shorthand.")],
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
    trace_on: TraceOnOption = "meta",
    blocks: BlocksOption = "",
    json: JsonOption = False,
) -> None:
    """Explain a plan: what each decision's nearest alternatives would do.

    A file that `shardwise plan` wrote says what it was made for: of that, only what differs is given.
    """
    parsed = load_plan(plan)
    given = {"model": model, "cluster": cluster, "seq": seq, "global_batch": global_batch, "tokens": tokens}
    more = {"optimizer": optimizer, "stack": stack, "price": price, "trace_on": trace_on, "blocks": blocks}
    more |= {"adapters": adapters, "base": base}
    asked, name = question_of("explain", plan, parsed, imbalance=expert_imbalance, **given, **more)
    parsed = as_asked(parsed, asked)
    found = asked.stack(name)
    memory, step = estimates(parsed, asked, found)
    made = load_made_for(plan)
    forbid = made.forbid  # neighbours are what the search would have made of them
    words = tuple(word for word in OPT_IN if word not in forbid and (word != "fp8" or asked.cluster.device.rates.fp8))
    try:
        space = Space(asked.profile, asked.limits, asked.cluster, asked.workload, found, words, forbid, asked.left_out)
    except UsageError as error:  # of a word that the file forbids
        raise ConfigError(f"{plan}: made_for.{error}") from None
    chosen = Candidate(plan=parsed, memory=memory, time=step)
    why = decisions(chosen, space, cast(Goal, made.goal or "time"))
    if json:
        shown = {"decisions": [vars(d) for d in why], "binds": binds(chosen, space)}
        numbers = estimate_json(memory, step, parsed, asked.cluster)
        print_json({"plan": plan_json(parsed), **numbers, **shown, **said_json(parsed, asked, found)})
        return
    out = console()
    table = Table(title=str(parsed), title_justify="left")
    for column in ("decision", "value", "what else would do"):
        table.add_column(column, overflow="fold")
    for decision in why:
        table.add_row(decision.field, decision.value, decision.reason)
    out.print(table)
    out.print(mesh_picture(parsed), markup=False)
    show_memory(out, memory, parsed, asked.cluster)
    show_time(out, step, asked.cluster)
    show_likeness(out, parsed, asked.profile)
    out.print(f"what binds: {binds(chosen, space)}", markup=False)
    show_assumed(out, parsed, asked, found)
