"""`Verifier`: a script under a plan against itself on one process, in the same numbers, with the same data.

    one process, whole global batch  -- the truth
    one process, rows shuffled, other micro-batches, other threads, gradients moved by a rounding (twice)
                                                                         -- how far rounding alone goes
    N processes under the plan  -- what is judged

Nothing of the script is changed: it gets another plan as its argument, and its steps leave what they did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shardwise.diagnose.verifying import evidence as facts
from shardwise.diagnose.verifying.faults import Evidence, causes
from shardwise.diagnose.verifying.parity import (
    FACTOR,
    KINDS,
    Difference,
    Tolerances,
    differences,
    factor_of,
    number_difference,
    tolerances,
)
from shardwise.diagnose.verifying.report import Report as Report
from shardwise.diagnose.verifying.report import Row as Row
from shardwise.diagnose.verifying.subject import Failed, Run, Subject, record
from shardwise.diagnose.verifying.trace import Trace
from shardwise.findings import Finding, errors_in
from shardwise.launch.environment import HOST
from shardwise.launch.forked import World
from shardwise.plan.constraints import check
from shardwise.plan.plan import Batch, Float8, Plan
from shardwise.train.guards.witness import ULPS, Request

RANDOM_ABOVE = {"fp64": 1e-9, "fp32": 1e-4}
"""A first loss that moves by more when rows are grouped otherwise is no rounding: random draws, or batch statistics."""
RANDOM_LOSS = 1e3
"""The same in roundings of the loss's own type, where that is coarser than what is run in."""
SHUFFLED = (8, 3)
"""Micro-batches of the two shuffled runs, as far as there are rows."""

Rows = Literal["regrouped", "together", "as they come"]
ROWS: dict[Rows, str] = {
    "regrouped": "rows shuffled and in other micro-batches",
    "together": "rows shuffled within micro-batches, that are kept together",
    "as they come": "rows as they come (batches that cannot be cut by rows, so that nobody knows which were read)",
}
"""What one process does with its rows where it is compared with itself."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The dials of a verification."""

    steps: int = 2
    dtype: Literal["fp64", "fp32"] = "fp64"
    """The type that everything runs in, whatever the plan says: rounding is then far below any fault."""
    device: str = "cpu"
    timeout_s: float = 300.0
    """Of one run."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One process, and how far it is from itself."""

    plan: Plan
    truth: Trace
    tolerances: Tolerances
    order_matters: bool
    how: str


class Verifier:
    """Verifies one subject under any number of plans; one process is run once for all of them.

    >>> verifier = Verifier(Subject(target="train.py"), World(4), Path("scratch"))  # doctest: +SKIP
    >>> verifier.verify(Plan.parse("fsdp2 tp2")).proven  # doctest: +SKIP
    True
    """

    def __init__(
        self,
        subject: Subject,
        world: World,
        directory: Path,
        options: Options | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`directory` takes what runs leave, a few times the model's size each; `say` is told what runs."""
        self.subject, self.world, self.directory, self._say = subject, world, directory, say
        self.options = options or Options()
        self.baselines: dict[tuple[Any, ...], Baseline | Failed] = {}
        self._runs = 0

    def verify(self, plan: Plan) -> Report:
        """Judge one plan.

        Cost: one run of the plan's processes; three runs of one process, the first time.
        """
        tested, notes = self._tested(plan)
        draft = Report(verdict="refused", subject=self.subject.title, plan=str(tested), notes=notes)
        refusals = self._refusals(tested, None)
        if not refusals and self.subject.findings is not None:
            refusals = tuple(errors_in(self.subject.findings(tested)))
        if refusals:
            return replace(draft, findings=refusals)
        base = self._baseline(tested)
        if isinstance(base, Failed):
            return replace(draft, findings=(_finding(base, "one process"),))
        draft = replace(draft, reference=str(base.plan), how=base.how)
        refusals = self._refusals(tested, len(base.truth.first.steps[0]["rows"]))
        if refusals:
            return replace(draft, findings=refusals)
        trace = self._record(tested, Request(steps=self.options.steps))
        if isinstance(trace, Failed):
            return replace(draft, findings=(_finding(trace, f"`{tested}`"),))
        if trace.first.record["backend"] == HOST and self.options.device != "cpu":
            said = (
                f"{tested.world} ranks share this machine's {self.options.device} devices: messages go through the host"
            )
            draft = replace(draft, notes=(*notes, f"{said}, nccl carries none of them"))
        return _judge(tested, trace, base, draft, self.options.steps)

    def _refusals(self, plan: Plan, global_batch: int | None) -> tuple[Finding, ...]:
        spec = self.subject.spec
        return tuple(errors_in(check(plan, spec=spec, device=self.options.device, global_batch=global_batch)))

    def _tested(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        dtype, notes = self.options.dtype, [*self.subject.notes]
        if plan.precision != dtype:
            notes.append(f"run in {dtype} in place of {plan.precision}: rounding is then far below any fault")
        if plan.communication.reduce_dtype is not None:
            notes.append(f"gradients are reduced in {dtype} in place of {plan.communication.reduce_dtype}")
        if plan.float8.recipe != "none" or plan.precision_rules:
            notes.append(f"run without float8 and precision rules: they round, and {dtype} is to show any other fault")
        wire = plan.communication.__class__(**{**vars(plan.communication), "reduce_dtype": None})
        uniform = {"precision": dtype, "tf32": False, "float8": Float8(), "precision_rules": ()}
        return plan.with_(**uniform, communication=wire), tuple(notes)

    def _baseline(self, plan: Plan) -> Baseline | Failed:
        """One process for a plan: batch norm alone depends on how the plan groups its rows."""
        key: tuple[Any, ...] = (plan.batch.global_size, plan.blocks)
        if key not in self.baselines:
            self.baselines[key] = self._measure(plan, Request(steps=self.options.steps))
        base = self.baselines[key]
        mb = plan.batch.micro_batches
        if isinstance(base, Failed) or mb == 1 or not base.truth.first.record["batch_norm"]:
            return base
        key = (*key, mb, plan.axes.data)
        if key not in self.baselines:
            grouped = Request(steps=self.options.steps, micro_batches=mb, ranks=plan.axes.data)
            self.baselines[key] = self._measure(plan, grouped)
        return self.baselines[key]

    def _measure(self, plan: Plan, request: Request) -> Baseline | Failed:
        batch = Batch(global_size=plan.batch.global_size)
        alone = Plan(precision=self.options.dtype, batch=batch, blocks=plan.blocks)
        truth = self._record(alone, request)
        if isinstance(truth, Failed):
            return truth
        batch_norm = truth.first.record["batch_norm"]
        base = self._from_itself(alone, truth, request, "together" if batch_norm else "regrouped")
        if isinstance(base, Failed):  # words of all rows in one tensor, say
            kept = self._from_itself(alone, truth, request, "as they come")
            return base if isinstance(kept, Failed) else replace(kept, truth=replace(truth, rows_tell=False))
        if batch_norm or not base.order_matters:
            return base
        kept = self._from_itself(alone, truth, request, "together")
        if isinstance(kept, Failed) or kept.order_matters:  # it draws, say: nothing of it can be measured
            return base
        return replace(kept, order_matters=True)

    def _from_itself(self, alone: Plan, truth: Trace, request: Request, rows: Rows) -> Baseline | Failed:
        """How far one process is from itself, on other threads and with its gradients moved by a rounding."""
        others = []
        for threads, parts in enumerate(SHUFFLED, 1):
            other = replace(request, rounding=_eps(self.options))
            if rows == "regrouped":
                parts = min(parts, len(truth.first.steps[0]["rows"]))
                other = replace(other, shuffle=True, micro_batches=parts)
            elif rows == "together":
                other = replace(other, shuffle=True, micro_batches=request.micro_batches or 1, within=True)
            trace = self._record(alone, other, threads=threads)
            if isinstance(trace, Failed):
                return trace
            others.append(trace)
        return _baseline(alone, truth, others, self.options, rows)

    def _record(self, plan: Plan, request: Request, *, threads: int = 1) -> Trace | Failed:
        self._runs += 1
        options = self.options
        self._say(f"`{plan}`" if plan.world > 1 else f"one process{', rows shuffled' if request.shuffle else ''}")
        run = Run(plan=plan, request=request, threads=threads, timeout_s=options.timeout_s, device=options.device)
        trace = record(self.subject, run, self.directory / f"run{self._runs}", self.world)
        return trace if isinstance(trace, Failed) else _obeyed(trace, run, self.subject.title)


def _obeyed(trace: Trace, run: Run, title: str) -> Trace | Failed:
    """A script that takes another plan than its argument proves nothing."""
    plan, began, device = run.plan, trace.first.record["first_step"], trace.first.record["device"]
    if device != run.device:
        return Failed(
            kind="device",
            message=f"{title} ran on {device}, and {run.device} is asked for (--device); the script names a device of "
            "its own, or this machine has no such one",
        )
    if began:
        return Failed(
            kind="resumed",
            message=f"{title} began at step {began} under `{plan}`: it goes on from a checkpoint, which another run "
            "may have written; give it a fresh directory: the word {out} after `--`",
        )
    used = Plan.parse(trace.first.record["plan"])
    wanted = (plan.axes, plan.precision, plan.batch.micro_batches, plan.zero)
    if (used.axes, used.precision, used.batch.micro_batches, used.zero) == wanted:
        return trace
    return Failed(
        kind="plan-ignored",
        message=f"{title} was given the plan `{plan}` as its first argument and trained under `{used}`; take the plan "
        "from the argument: Plan.load(sys.argv[1])",
    )


def _eps(options: Options) -> float:
    """The unit of rounding of the type that everything runs in."""
    return torch.finfo(torch.float64 if options.dtype == "fp64" else torch.float32).eps


def _baseline(plan: Plan, truth: Trace, others: list[Trace], options: Options, rows: Rows) -> Baseline | Failed:
    steps = min(trace.num_steps for trace in (truth, *others))
    floor = Tolerances(eps=_eps(options), loss_eps=truth.first.steps[0]["loss_eps"])
    for other in others:
        initial = facts.initial_differences((other, truth))
        if initial or facts.rows_differ(other, truth, 1):
            what = f"the initial {initial[0]}" if initial else "the rows of the first step"
            return Failed(
                kind="not-reproducible",
                message=f"two runs of one process differ in {what}; verify compares runs, so they must start from the "
                "same weights and data: seed what the script draws",
            )
    loss = truth.first.steps[0]["loss"]
    if not math.isfinite(loss):
        return Failed(
            kind="not-finite",
            message=f"the first loss on one process is {loss}: there is nothing to compare; look at the data",
        )
    firsts = [(other.first.steps[0], truth.first.steps[0]) for other in others]
    least = RANDOM_ABOVE[options.dtype]
    for name, what, above in (
        ("loss", "loss", max(least, RANDOM_LOSS * floor.loss_eps)),
        ("grad_norm", "gradient", least),
    ):
        moved = max(number_difference(other[name], first[name]) for other, first in firsts)
        if moved <= above:
            continue
        how = (
            f"{FACTOR} x {ULPS} roundings: not measured, since one process with its rows grouped otherwise gets "
            f"another {what} ({moved:.1e}), which is no rounding"
        )
        return Baseline(plan=plan, truth=truth, tolerances=floor, order_matters=True, how=how)
    how = (
        f"{FACTOR} x what one process differs from itself by, per tensor (at least the 90th percentile of its kind and "
        f"{ULPS} roundings), in {len(others)} runs with {ROWS[rows]}, other threads, and gradients moved by a "
        "rounding"
    )
    measured = tolerances(truth, others, steps, floor)
    return Baseline(plan=plan, truth=truth, tolerances=measured, order_matters=False, how=how)


def _judge(plan: Plan, mine: Trace, base: Baseline, draft: Report, asked: int) -> Report:
    """Compare, and look for the cause of a difference."""
    steps = min(mine.num_steps, base.truth.num_steps)
    found = differences(mine, base.truth, steps)
    rows = tuple(_row(kind, [d for d in found if d.kind == kind], base.tolerances) for kind in KINDS)
    over = [d for d in found if not d.value <= base.tolerances.of(d)]
    copies = list(mine.copies_that_differ(facts.copy_tolerance(plan.precision)))
    step = facts.first_step((mine, base.truth), over)
    others = [facts.rows_of_other_contents(mine, base.truth, s) for s in range(1, steps + 1)]
    disagree = any(
        not _agree(mine, s) or (facts.rows_differ(mine, base.truth, s) and not other)
        for s, other in enumerate(others, 1)
    )
    if steps < asked:
        draft = replace(draft, notes=(*draft.notes, f"the script ended after {steps} of {asked} steps"))
    draft = replace(draft, verdict="proven", steps=steps, rows=tuple(row for row in rows if row.count))
    if not (over or copies or disagree or facts.names_differ(mine, base.truth, step)):
        if not any(others):
            return draft
        said = f"up to {max(others)} rows of a step are not those of one process bit by bit (computed, or padded)"
        return replace(draft, notes=(*draft.notes, f"{said}; nothing that is compared depends on it"))
    evidence = facts.gather(plan, (mine, base.truth), over, order_matters=base.order_matters)
    backward = facts.first_in_backward(base.truth, step, evidence.grads)
    return replace(
        draft,
        verdict="different",
        findings=tuple(causes(evidence)) or (_UNKNOWN,),
        first_forward=_module(evidence),
        first_backward=backward,
        factor=_factor(evidence, backward, (mine, base.truth), step),
        details=asdict(evidence),
    )


_UNKNOWN = Finding(
    id="verify.unknown",
    severity="error",
    what="none of the known faults looks like this",
    fix="look at the first modules that differ; verify with fewer axes (only dp, only tp, mb1) until it is proven",
)


def _agree(mine: Trace, step: int) -> bool:
    numbers = {(rank.steps[step - 1]["loss"], rank.steps[step - 1]["grad_norm"]) for rank in mine.ranks}
    return len({str(pair) for pair in numbers}) == 1


def _module(evidence: Evidence) -> str | None:
    if evidence.first_forward is None:
        return "the loss" if evidence.loss_ratio is not None else None
    return evidence.first_forward or "the whole model"


def _row(kind: str, found: list[Difference], limits: Tolerances) -> Row:
    worst = max(found, key=lambda d: d.value / limits.of(d), default=None)
    if worst is None:
        return Row(kind=kind, count=0, largest=0.0, tolerance=0.0, measured=0.0, where="", over=0)
    return Row(
        kind=kind,
        count=len(found),
        largest=worst.value,
        tolerance=limits.of(worst),
        measured=limits.measured(worst),
        where=" ".join(part for part in (worst.name, f"step {worst.step}") if part),
        over=sum(not d.value <= limits.of(d) for d in found),
    )


def _factor(e: Evidence, backward: str | None, traces: tuple[Trace, Trace], step: int) -> str | None:
    """The factor of gradients (or loss), and which number of the plan it is."""
    value, of = e.grad_factor, "gradients"
    if value is None and e.loss_ratio is not None and e.first_forward is None:
        value, of = e.loss_ratio, "loss"
    if value is None and backward is not None:
        value, of = factor_of(*traces, [f"grad/{step}/{backward}"]), backward
    if value is None or not math.isfinite(value):  # of a loss that is no number there is no factor
        return None
    names = {
        "world size": e.world,
        "data ranks": e.data,
        "tp": e.tp,
        "pp": e.pp,
        "micro-batches": e.micro_batches,
        "ratio of weights (token counts)": e.weight_ratio,
    }
    same = [name for name, n in names.items() if n != 1 and abs(value - n) < 1e-6 * n]
    same += [f"1 / {name}" for name, n in names.items() if n != 1 and abs(value * n - 1) < 1e-6]
    number = f"exactly {round(value)}" if abs(value - round(value)) < 1e-6 and round(value) else f"{value:.9g}"
    return f"{of}: {number}" + (f" = {', '.join(same)}" if same else "")


def _finding(failed: Failed, where: str) -> Finding:
    """A run that ended in an error, as the reason of a refusal; a constraint's own id where it names one."""
    named = re.search(r"\[([a-z]+\.[a-z0-9-]+)\]", failed.message)
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", failed.kind).lower()
    at = f" on rank {failed.rank}" if failed.rank is not None else ""
    fix = (
        "the script must run on one process too, with the plan as its first argument" if where == "one process" else ""
    )
    if {"float", "double"} <= {*re.findall(r"[a-z]+", failed.message.lower())}:  # torch's types, side by side
        fix = (
            "all runs are in fp64, and something in the script makes fp32 (x.float(), torch.float32): write "
            "x.to(self.weight.dtype), or verify with --dtype fp32"
        )
    return Finding(
        id=named[1] if named else f"verify.{kind}",
        severity="error",
        what=f"the run of {where} failed{at}: {failed.message}",
        evidence=failed.traceback,
        fix=fix,
    )
