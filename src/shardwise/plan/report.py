"""A plan for people: a table with a reason per choice, and a picture of the ranks on the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from rich.table import Table

from shardwise.findings import Finding
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import AXES, Plan

_AXIS_MEANING = {
    "pp": "pipeline stages, a part of the blocks each",
    "dp_replicate": "replicas, other samples each",
    "dp_shard": "sharded data parallelism, other samples each",
    "cp": "parts of the sequence",
    "tp": "slices of every layer",
    "ep": "groups of experts (on the ranks of fsdp x cp x tp)",
}
_ZERO_MEANING = {
    0: "everything replicated",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "optimizer state, gradients and parameters sharded",
}
_MEANING = {"compile": "each block by torch.compile, once for all alike: the first step takes a minute"}
_PICTURE_ROWS = 16


def plan_rows(plan: Plan, spec: ModelSpec | None = None) -> list[tuple[str, str, str]]:
    """The lines of `plan_table`: (dotted field, value, meaning); what is off or 1 is left out."""
    rows = [(f"axes.{axis}", str(getattr(plan.axes, axis)), _AXIS_MEANING[axis]) for axis in (*AXES, "ep")]
    rows = [row for row in rows if row[1] != "1"]
    rows.append(("world", str(plan.world), "ranks: the product of the axes"))
    if plan.axes.data > 1 or plan.zero:
        alone = "one data rank, nothing to share: held as fully_shard holds it"
        parts = plan.axes.dp_shard * plan.axes.cp  # ranks of `cp` share states too
        rows.append(("zero", str(plan.zero), _ZERO_MEANING[plan.zero] if parts > 1 or not plan.zero else alone))
    size = plan.batch.global_size
    rows.append(("batch.global_size", str(size) if size else "as the script says", "samples per step, over all ranks"))
    rows.append(("batch.micro_batches", str(plan.batch.micro_batches), "per rank and step"))
    if plan.axes.pp > 1:
        stages = plan.axes.pp * plan.schedule.stages
        blocks = f", {spec.num_layers / stages:g} blocks each on average" if spec else ""
        rows.append(("schedule.kind", plan.schedule.kind, f"{stages} stages{blocks}"))
        if plan.schedule.boundaries:
            rows.append(("schedule.boundaries", ", ".join(plan.schedule.boundaries), "first block of stage 1, 2, ..."))
    rows.append(("precision", plan.precision + (" tf32" if plan.tf32 else ""), _precision_meaning(plan)))
    if plan.float8.recipe != "none":
        how = " (emulated in fp32: slow)" if plan.float8.emulate else ""
        layers = f"linear layers of the blocks, dims multiples of 16, without routers, multiply in float8{how}"
        rows.append(("float8.recipe", plan.float8.recipe, layers))
    return rows + [(name, value, _MEANING.get(name, "")) for name, value in _other_rows(plan)]


def _precision_meaning(plan: Plan) -> str:
    if plan.precision in ("bf16", "fp16"):
        return f"computes in {plan.precision}, keeps fp32 parameters"
    return "parameters in bf16, fp32 master copy in the optimizer" if plan.precision == "bf16-pure" else ""


def _other_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every other field that is not at its default."""
    shown = ("axes.", "batch.", "schedule.", "tf32", "zero", "float8.recipe", "float8.emulate")
    for name, (_, value) in Plan().diff(plan).items():
        if not name.startswith(shown) and name != "precision":
            yield name, str(value).lower() if isinstance(value, bool) else str(value)


def plan_table(
    plan: Plan, spec: ModelSpec | None = None, reasons: Mapping[str, str] | None = None, *, title: str = ""
) -> Table:
    """A rich table of the plan: field, value, what it means and why it was chosen.

    Args:
        plan: The plan.
        spec: The model, for its name, size and the blocks per stage.
        reasons: Dotted field (`axes.tp`) -> reason; fields not named there stand without one.
        title: Above the table; the plan's shorthand by default.
    """
    table = Table(title=title or str(plan), title_justify="left")
    columns = ("field", "value", "meaning", *(("reason",) if reasons else ()))
    for column in columns:
        table.add_column(column, overflow="fold")
    if spec:
        model = (
            "model",
            spec.name,
            f"{spec.num_params:,} parameters, {spec.num_layers} block{'s' * (spec.num_layers != 1)}",
        )
        table.add_row(*model, *(((reasons or {}).get("model", ""),) if reasons else ()))
    for name, value, meaning in plan_rows(plan, spec):
        table.add_row(name, value, meaning, *((reasons.get(name, ""),) if reasons else ()))
    return table


def findings_table(findings: Iterable[Finding]) -> Table:
    """A rich table of findings: severity, id, what, evidence, what to do."""
    table = Table()
    for column in ("severity", "id", "what", "found", "do"):
        table.add_column(column, overflow="fold")
    colours = {"error": "red", "warning": "yellow", "note": "cyan"}
    for finding in findings:
        colour = colours[finding.severity]
        severity = f"[{colour}]{finding.severity}[/{colour}]"
        table.add_row(severity, *(_plain(t) for t in (finding.id, finding.what, finding.evidence, finding.fix)))
    return table


def _plain(text: str) -> str:
    """Text that rich shows as it is: brackets are no markup."""
    return text.replace("[", "\\[")


def mesh_picture(plan: Plan) -> str:
    """The ranks on the mesh as text: a line per coordinate of the outer axes, the innermost axis across.

    At most 16 lines and 16 ranks across; more are cut with `...`.

    >>> print(mesh_picture(Plan.parse("pp2 tp2")))
    4 ranks: pp2 x tp2
    pp0 | tp: 0 1
    pp1 | tp: 2 3
    """
    spelled = {"dp_replicate": "dp", "dp_shard": "fsdp"}
    axes = [(spelled.get(a, a), getattr(plan.axes, a)) for a in AXES if getattr(plan.axes, a) > 1]
    if not axes:
        return "1 rank: no axis above 1\n0"
    head = f"{plan.world} ranks: " + " x ".join(f"{name}{degree}" for name, degree in axes)
    (inner, width), outer = axes[-1], axes[:-1]
    digits = len(str(plan.world - 1))
    lines = [head]
    for line, place in enumerate(product(*(range(degree) for _, degree in outer))):
        if line == _PICTURE_ROWS:
            lines.append(f"... {plan.world // width - _PICTURE_ROWS} more lines of {width} ranks")
            break
        label = " ".join(f"{name}{index}" for (name, _), index in zip(outer, place, strict=True))
        ranks = [f"{line * width + i:>{digits}}" for i in range(min(width, _PICTURE_ROWS))]
        rest = f" ... {line * width + width - 1}" if width > _PICTURE_ROWS else ""
        lines.append(f"{label} | {inner}: {' '.join(ranks)}{rest}" if label else f"{inner}: {' '.join(ranks)}{rest}")
    return "\n".join(lines)
