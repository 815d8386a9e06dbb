"""`shardwise plan`: the best layout for a model on a cluster, why, and what lost. Needs no torch but for modules."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli.options.adapted import AdaptersOption, BaseOption, adapted
from shardwise.cli.options.made_for import made_for, save_plan
from shardwise.cli.options.planning import (
    BatchOption,
    BlocksOption,
    JsonOption,
    OptimizerOption,
    PriceOption,
    Question,
    SeqOption,
    StackOption,
    TokensOption,
    TraceOnOption,
    check_path,
    estimate_json,
    question,
    refuse_ending,
    said_json,
    show_assumed,
    show_memory,
    show_time,
)
from shardwise.cli.options.uneven import ImbalanceOption, unevenly
from shardwise.cli.output import console, plan_json, print_json, show_likeness, waiting
from shardwise.errors import ConfigError, ExitCode, PlanError
from shardwise.hardware.cluster import GIB
from shardwise.plan.advice import Advice, advise, better_batch
from shardwise.plan.constraints import check, refuse
from shardwise.plan.hosting import assumed_of, host_share
from shardwise.plan.plan import Plan
from shardwise.plan.reasons import binds, decisions, why_lost
from shardwise.plan.repair import change
from shardwise.plan.report import mesh_picture, plan_rows, plan_table
from shardwise.plan.search import HEADROOM, Candidate, Search, find_plan
from shardwise.plan.shorthand import axis_field
from shardwise.plan.spelled import seconds, spelled
from shardwise.plan.stack import Stack
from shardwise.records import write_text

_T = TypeVar("_T")


def plan(
    model: Annotated[str, typer.Argument(help="A preset, a .toml file of sizes, hf:NAME, or pkg.mod:factory.")],
    cluster: Annotated[str, typer.Argument(help="device:per-nodexnodes (h100:8x16), a .toml file, detect or probe.")],
    seq: SeqOption = None,
    tokens: TokensOption = None,
    global_batch: BatchOption = None,
    goal: Annotated[str, typer.Option(help="time, cost or memory.")] = "time",
    optimizer: OptimizerOption = "adamw",
    allow: Annotated[list[str] | None, typer.Option(help="Also try: fp8,bf16-pure,offload-activations, ...")] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="Do not use: tp,pp,fsdp,offload,zero3,interleaved, ...")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=100, help="Layouts to rank.")] = 10,
    stack: StackOption = "",
    price: PriceOption = None,
    expert_imbalance: ImbalanceOption = None,
    adapters: AdaptersOption = "",
    base: BaseOption = "",
    front: Annotated[bool, typer.Option("--front", help="Also all plans that none beats in memory and time.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page with pictures.")] = None,
    out: Annotated[Path, typer.Option(help="Where the plan is written.")] = Path("plan.toml"),
    trace_on: TraceOnOption = "meta",
    blocks: BlocksOption = "",
    json: JsonOption = False,
) -> None:
    """Find the best plan: exit 0, 1 when nothing fits or nothing is legal, 2 on a usage error."""
    _check_places(out, html, model=model.removeprefix("hf:"), cluster=cluster)
    words = (words_of(allow), words_of(forbid))
    more = {"optimizer": optimizer, "price": price, "trace_on": trace_on, "blocks": blocks, "allow": words[0]}
    asked = unevenly(question(model, cluster, seq=seq, batch=global_batch, tokens=tokens, **more), expert_imbalance)
    asked = adapted(asked, adapters, base)
    with waiting("searching for the best plan"):
        found = find_plan(
            asked.profile, asked.limits, asked.cluster, asked.workload,
            goal=goal, allow=words[0], forbid=words[1], left_out=asked.left_out, top=top, stack=asked.stack(stack),
        )  # fmt: skip
    chosen = found.best or found.nearest
    assert chosen is not None
    whole = complete(chosen.plan, asked)
    if found.best:
        _check(whole, asked, found.space.stack)
        made = made_for(model, cluster, asked, goal, words, stack)
        save_plan(whole, out, replace(made, price=price, adapters=adapters, base=base))
    advice = () if found.best else _found("what would fit", lambda: advise(found.space))
    points = _found("the front of memory against time", lambda: found.front) if front or html else None
    if html:
        from shardwise.plan.page import page

        write_text(html, page(found, (*asked.assumed, *assumed_of(whole, asked.cluster)), advice))
    better = _found("a better batch", lambda: better_batch(found))
    if json:
        files = {"written": str(out) if found.best else None, "html": str(html) if html else None}
        print_json({**search_json(found, whole, asked), **_more_json(found, points, advice, better), **files})
    else:
        _show_nothing_fits(console(), found, advice)
        _show(found, whole, asked, out, points if front else None, better)
    if not found.best:
        raise typer.Exit(ExitCode.REFUSED)


def _found(what: str, search: Callable[[], _T]) -> _T:
    """The answer of a search of its own, of which a terminal is told."""
    with waiting(f"searching for {what}"):
        return search()


def _check_places(out: Path, html: Path | None, **inputs: str) -> None:
    """Refuse what cannot be written, and to write the plan over what it is made from.

    Raises:
        ConfigError: see `check_path`; `--out` is the file of the model or of the cluster.
    """
    check_path(out, (".toml", ".json"))
    check_path(html, (".html",))
    for what, word in inputs.items():
        if os.path.exists(out) and os.path.exists(word) and os.path.samefile(out, word):
            raise ConfigError(f"{out}: is the file of the {what}, which the plan would replace; give another --out")


def complete(plan: Plan, asked: Question) -> Plan:
    """The plan with the batch that it was made for."""
    return change(plan, batch__global_size=asked.workload.global_batch, blocks=asked.blocks or "auto")


def _check(plan: Plan, asked: Question, stack: Stack) -> None:
    """The table of constraints has the last word."""
    refuse(check(plan, spec=asked.read(stack), world=plan.world, seq_len=asked.workload.seq_len))


def search_json(found: Search, whole: Plan, asked: Question) -> dict[str, Any]:
    """What was found, for programs."""
    chosen = found.best or found.nearest
    assert chosen is not None
    return {
        "model": asked.profile.name,
        "parameters": asked.profile.num_params,
        "cluster": asked.cluster.name,
        "devices": asked.cluster.world,
        "seq_len": asked.workload.seq_len,
        "global_batch": asked.workload.global_batch,
        "goal": found.goal,
        "fits": found.best is not None,
        "plan": plan_json(whole),
        **estimate_json(chosen.memory, chosen.time, chosen.plan, asked.cluster),
        "binds": binds(chosen, found.space),
        "decisions": [vars(decision) for decision in decisions(chosen, found.space, found.goal)],
        "runners_up": [
            {**_brief_json(other), "why": why_lost(other, found)} for other in found.ranked[1:]
        ],
        "estimated": found.estimated,
        "pruned": dict(found.pruned),
        **said_json(whole, asked, found.space.stack),
    }  # fmt: skip


def _show(
    found: Search,
    whole: Plan,
    asked: Question,
    path: Path,
    points: Sequence[Candidate] | None,
    better: Advice | None,
) -> None:
    out = console()
    chosen = found.best or found.nearest
    assert chosen is not None
    reasons = {decision.field: decision.reason for decision in decisions(chosen, found.space, found.goal)}
    reasons |= dict.fromkeys(("axes.dp_replicate", "axes.dp_shard"), reasons.pop("data", ""))
    out.print(plan_table(whole, asked.spec, reasons, title=f"{'plan' if found.best else 'nearest plan'}: {whole}"))
    shown = {name for name, _, _ in plan_rows(whole, asked.spec)}
    for name, reason in reasons.items():
        if name not in shown and reason and not (name == "axes.dp_replicate" and "axes.dp_shard" in shown):
            out.print(f"left at its default: {name} ({reason})", style="dim", markup=False)
    out.print(mesh_picture(whole), markup=False)
    out.print()
    show_memory(out, chosen.memory, chosen.plan, asked.cluster)
    show_time(out, chosen.time, asked.cluster)
    show_likeness(out, whole, asked.profile)
    out.print(f"what binds: {binds(chosen, found.space)}", markup=False)
    if better:
        out.print(_by_batch(found, better), markup=False)
    if len(found.ranked) > 1:
        out.print(_runners_up(found))
    if points:
        out.print(_front(points))
    dropped = ", ".join(f"{number:,} by {name}" for name, number in list(found.pruned.items())[:6] if number)
    out.print(
        f"{found.estimated:,} plan{'s' * (found.estimated != 1)} estimated in full; "
        f"families and plans dropped: {dropped}",
        style="dim",
    )
    show_assumed(out, whole, asked, found.space.stack)
    if found.best:
        out.print(f"written: {path}", markup=False)


def _by_batch(found: Search, better: Advice) -> str:
    """That the batch decided, and what another one would do."""
    batch, world = found.space.workload.global_batch, found.space.cluster.world
    best, other = found.best, better.found
    assert best is not None
    alone = f"{batch // world:,} for each of the {world:,} devices, which few numbers of micro-batches divide"
    why = f"no multiple of the {world:,} devices" if batch % world else alone
    gain = best.score(found.goal) / best.time.tokens / other.score(found.goal) * other.time.tokens - 1
    per = "device and second" if found.goal == "cost" else "second"
    return (
        f"the batch decides: {batch:,} samples are {why}; with {better.change} {other.plan} does {gain:.1%} more "
        f"tokens per {per}"
    )


def _show_nothing_fits(out: Console, found: Search, advice: Sequence[Advice]) -> None:
    """Where nothing fits: what is missing, and each change that was found to help, with a plan that fits then."""
    if found.best:
        return
    cluster, least = found.space.cluster, found.nearest
    device, hosts = cluster.device, ""
    assert least is not None
    can_offload = found.space.device != "cpu" and found.space.has("offload", "offload-state")
    if can_offload:  # such plans may need less of the device, and too much of the host
        origin = "as the cluster says" if cluster.host_memory else "assumed"
        hosts = f", or offloads more than the {host_share(cluster) / GIB:.0f} GiB of host memory per device ({origin})"
    out.print(
        f"nothing fits: every legal plan needs more than the {spelled(device.memory)} of {device.name}, of which "
        f"{HEADROOM:.0%} stay free{hosts}; the one that needs the least needs {spelled(least.memory.device)}",
        style="red",
        markup=False,
    )
    if not advice:
        out.print(
            "no nodes, host memory, --allow, --forbid or shorter samples were found that help; use larger devices"
        )
        return
    batch = found.space.workload.global_batch
    table = Table(title=f"what would fit, each change alone, with a global batch of {batch:,}", title_justify="left")
    for column in ("change", "a plan that fits then", "memory", "step"):
        table.add_column(column, overflow="fold")
    for each in advice:
        size, step = each.found.memory.device, each.found.time.total
        table.add_row(each.change, Text(str(each.found.plan)), spelled(size), seconds(step))
    out.print(table)
    out.print("these are plans that were found fast; plan again with the change for the best one\n", style="dim")


def _brief_json(found: Candidate) -> dict[str, Any]:
    return {"plan": str(found.plan), "seconds": found.time.total, "device_bytes": found.memory.device}


def _more_json(
    found: Search, points: Sequence[Candidate] | None, advice: Sequence[Advice], better: Advice | None
) -> dict[str, Any]:
    """What is there only where it was asked for, or where nothing fits."""
    front = {} if points is None else {"front": [_brief_json(each) | {"device_bytes": each.needs} for each in points]}
    if found.best:
        return {**front, "better_batch": _advice_json(better) if better else None}
    return {**front, "would_fit": [_advice_json(each) for each in advice]}


def _advice_json(advice: Advice) -> dict[str, Any]:
    found = advice.found
    return {"change": advice.change, "plan": plan_json(found.plan), "device_bytes": found.memory.device,
            "seconds": found.time.total}  # fmt: skip


def _runners_up(found: Search) -> Table:
    table = Table(title="runners-up", title_justify="left")
    for column in ("plan", "step", "MFU", "memory", "why it lost"):
        table.add_column(column, overflow="fold")
    for other in found.ranked[1:]:
        table.add_row(
            Text(str(other.plan)),
            seconds(other.time.total),
            f"{other.time.mfu:.1%}",
            spelled(other.memory.device),
            why_lost(other, found),
        )
    return table


def _front(points: Sequence[Candidate]) -> Table:
    table = Table(title="plans that no other beats in both memory and time", title_justify="left")
    for column in ("plan", "step", "memory"):
        table.add_column(column, overflow="fold")
    for each in points:
        table.add_row(Text(str(each.plan)), seconds(each.time.total), spelled(each.needs))
    return table


def words_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Words of `--allow` and `--forbid`: one each time, or several with commas; axes also as a shorthand names them.

    >>> words_of(["tp,pp", "fsdp"])
    ('tp', 'pp', 'dp_shard')
    """
    words = [word.strip() for text in given or () for word in text.split(",")]
    return tuple(axis_field(word) for word in words if word)


def load_plan(text: str) -> Plan:
    """A plan for `estimate` and `explain`.

    Raises:
        PlanError: a shorthand that does not parse.
        ConfigError: a file that cannot be read, or of another kind.
    """
    refuse_ending("plan", text)
    try:
        return Plan.load(text)
    except PlanError as error:
        raise PlanError(f"{error}\ndocs/plans.md lists the tokens") from None
