"""From two traces and their differences to `Evidence`: the few facts that the known faults are told apart by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.diagnose.verifying.faults import Evidence
from shardwise.diagnose.verifying.parity import Difference, factor_of, first_module_that_differs, relative
from shardwise.diagnose.verifying.trace import Trace
from shardwise.plan.plan import Plan
from shardwise.train.guards.fingerprints import same_but_padding

LOCATE = {"fp64": 1e-9, "fp32": 1e-4}
"""When an output counts as another one: only to say where a difference begins, never whether there is one."""


def gather(plan: Plan, traces: tuple[Trace, Trace], over: Sequence[Difference], *, order_matters: bool) -> Evidence:
    """The facts at the first step that differs.

    Args:
        plan: what the first trace ran under.
        traces: the run under the plan, and one process.
        over: differences above their tolerance.
        order_matters: one process gets another loss when its rows are grouped otherwise.
    """
    mine, truth = traces
    step = first_step(traces, over)
    here = [d for d in over if d.step == step]
    names = {kind: tuple(d.name for d in here if d.kind == kind) for kind in ("grad", "param", "state", "statistics")}
    ours, theirs = mine.first.steps[step - 1], truth.first.steps[step - 1]
    module = first_module_that_differs(mine, truth, step, LOCATE[plan.precision])
    record = truth.first.record
    copies = _copies(mine, plan.precision)
    return Evidence(
        data=plan.axes.data,
        tp=plan.axes.tp,
        pp=plan.axes.pp,
        cp=plan.axes.cp,
        world=plan.world,
        micro_batches=plan.batch.micro_batches,
        sequence=plan.tensor.sequence,
        initial=initial_differences(traces, copies),
        **_rows(traces, step),
        rows=len(theirs["rows"]),
        weight_ratio=_ratio(ours["weight"], theirs["weight"]) or 1.0,
        lr_ratio=_ratio(ours["lr"], theirs["lr"]) or 1.0,
        loss_ratio=_ratio(ours["loss"], theirs["loss"]) if any(d.kind == "loss" for d in here) else None,
        norm_ratio=_ratio(ours["grad_norm"], theirs["grad_norm"]) if any(d.kind == "norm" for d in here) else None,
        ranks_disagree=_disagreements(mine, step),
        grads=names["grad"],
        num_grads=len(truth.names("grad", step)),
        grad_factor=factor_of(mine, truth, [f"grad/{step}/{name}" for name in names["grad"]]),
        copies=tuple(dict.fromkeys(key.split("/", 2)[2] for key in copies if int(key.split("/")[1]) <= step)),
        params=names["param"],
        state=names["state"],
        buffers=names["statistics"],
        missing=_lacking(mine, truth, step),
        added=_added(mine, truth),
        untied=_untied(traces, step),
        first_forward=module,
        first_class=record["modules"].get(module, "") if module is not None else "",
        block_starts=_block_starts(mine),
        first_block=_block_of(module, record["blocks"]),
        draws=bool(theirs["draws"]),
        order_matters=order_matters,
        batch_norm=bool(record["batch_norm"]),
        later_steps_only=step > 1,
    )


def first_step(traces: tuple[Trace, Trace], over: Sequence[Difference]) -> int:
    """The first step (from 1) at which something differs."""
    mine, truth = traces
    steps = range(1, min(mine.num_steps, truth.num_steps) + 1)
    others = [step for step in steps if _disagreements(mine, step) or rows_differ(mine, truth, step)]
    return min([*(d.step for d in over), *others, mine.num_steps])


def copy_tolerance(precision: str) -> float:
    """By what copies of one tensor may differ: they are the same numbers, so by a few roundings at most."""
    return 64 * torch.finfo(torch.float64 if precision == "fp64" else torch.float32).eps


def _copies(trace: Trace, precision: str) -> list[str]:
    return [key for key, _, _ in trace.copies_that_differ(copy_tolerance(precision))]


def initial_differences(traces: tuple[Trace, Trace], copies: Sequence[str] = ()) -> tuple[str, ...]:
    """Parameters that differ before the first step: they are the same bits, whatever the plan."""
    mine, truth = traces
    found = [key.split("/", 2)[2] for key in copies if key.startswith("param/0/")]
    for name in truth.names("param", 0):
        key = f"param/0/{name}"
        if key in mine.owners and relative(mine.tensor(key), truth.tensor(key), 0.0) > 0:
            found.append(name)
    return tuple(dict.fromkeys(found))


def rows_differ(mine: Trace, truth: Trace, step: int) -> bool:
    """Whether the ranks together read other rows than one process."""
    return any(_rows((mine, truth), step).values())


def rows_of_other_contents(mine: Trace, truth: Trace, step: int) -> int:
    """Rows that stand in place of as many of one process; 0 where some are read by no rank, or by several."""
    found = _rows((mine, truth), step)
    return found["rows_extra"] if found["rows_extra"] == found["rows_missing"] and not found["rows_repeated"] else 0


def _rows(traces: tuple[Trace, Trace], step: int) -> dict[str, int]:
    mine, truth = traces
    theirs = Counter(truth.rows(step)[0])
    by_rank = mine.rows(step)
    if not all(by_rank) or not theirs:  # under cp each rank has a part of every row
        return {"rows_missing": 0, "rows_extra": 0, "rows_repeated": 0}
    ours = _as_known(
        sum((Counter(rows) for rows in by_rank), Counter[str]()), theirs, mine.forms(step), truth.forms(step)
    )
    more = ours - theirs
    return {
        "rows_missing": (theirs - ours).total(),
        "rows_extra": sum(count for name, count in more.items() if name not in theirs),
        "rows_repeated": sum(count for name, count in more.items() if name in theirs),
    }


def _as_known(
    ours: Counter[str], theirs: Counter[str], forms: Mapping[str, list[str]], known: Mapping[str, list[str]]
) -> Counter[str]:
    """Our rows, those that one process has with other padding by its name."""
    missing, renamed = theirs - ours, Counter[str]()
    columns = list(zip(*known.values(), strict=False))
    told = max(range(len(columns)), key=lambda i: len(set(columns[i])), default=0)  # the tensor that tells rows apart
    index: dict[str, set[str]] = {}
    for name, own in known.items():
        for part in own[told].split(".") if columns else ():
            index.setdefault(part, set()).add(name)
    for name, count in ours.items():
        parts = forms[name][told].split(".") if name not in theirs and len(forms[name]) == len(columns) else []
        near = sorted(set().union(*(index.get(part, ()) for part in parts)))
        same = [n for n in near if same_but_padding(forms[name], known[n])]
        best = max(same, key=lambda n: missing[n], default=name)
        renamed[best] += count
        missing[best] -= count
    return renamed


def _ratio(mine: float, truth: float) -> float | None:
    return mine / truth if truth else None


def _disagreements(trace: Trace, step: int) -> tuple[str, ...]:
    numbers = [rank.steps[step - 1] for rank in trace.ranks]
    names = (("loss", "loss"), ("norm", "grad_norm"))
    return tuple(name for name, key in names if len({str(n[key]) for n in numbers}) > 1)


def _tied_to(truth: Trace) -> dict[str, str]:
    """Other name of a tied parameter -> the name that one process knows it by."""
    known = set(truth.names("param", 0))
    return {
        name: owner
        for group in truth.first.record["ties"]
        if (owner := next((n for n in group if n in known), None)) is not None
        for name in group
        if name != owner
    }


def _lacking(mine: Trace, truth: Trace, step: int) -> tuple[str, ...]:
    aliases = {owner: name for name, owner in _tied_to(truth).items()}
    have = set(mine.names("param", 0))
    lost = [name for name in truth.names("param", 0) if name not in have and aliases.get(name) not in have]
    graded = set(mine.names("grad", step))
    return tuple(lost) or tuple(
        n for n in truth.names("grad", step) if n not in graded and aliases.get(n) not in graded
    )


def _added(mine: Trace, truth: Trace) -> tuple[str, ...]:
    known = {*truth.names("param", 0), *_tied_to(truth)}
    return tuple(name for name in mine.names("param", 0) if name not in known)


def names_differ(mine: Trace, truth: Trace, step: int) -> bool:
    """Whether one run has parameters or gradients that the other has not; a tied one's other name is no new one."""
    return bool(_lacking(mine, truth, step) or _added(mine, truth) or _untied((mine, truth), step))


def _untied(traces: tuple[Trace, Trace], step: int) -> tuple[str, ...]:
    """Names of one parameter that hold other values than each other under the plan."""
    mine, truth = traces
    found = []
    for alias, owner in _tied_to(truth).items():
        keys = [f"param/{step}/{name}" for name in (alias, owner)]
        if all(key in mine.owners for key in keys) and not torch.equal(mine.tensor(keys[0]), mine.tensor(keys[1])):
            found.append(f"{owner} = {alias}")
    return tuple(found)


def _block_of(module: str | None, blocks: Sequence[str]) -> str | None:
    return next((b for b in blocks if module is not None and (module == b or module.startswith(f"{b}."))), None)


def _block_starts(mine: Trace) -> tuple[str, ...]:
    """Blocks whose neighbour before lives on another stage."""
    blocks: list[str] = mine.first.record["blocks"]
    owner: dict[str, Any] = {b: r.index("pp") for r in mine.ranks for b in blocks if b in r.record["modules"]}
    pairs = zip(blocks, blocks[1:], strict=False)
    return tuple(after for before, after in pairs if owner.get(before) != owner.get(after))


def first_in_backward(truth: Trace, step: int, names: Sequence[str]) -> str | None:
    """Of some parameters the one whose gradient backward computes first: the last one in forward order."""
    order = {name: i for i, name in enumerate(truth.first.steps[step - 1]["modules"])}
    defined = {name: i for i, name in enumerate(truth.names("param", 0))}
    return max(names, key=lambda n: (order.get(n.rpartition(".")[0], -1), defined.get(n, -1)), default=None)
