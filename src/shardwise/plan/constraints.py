"""Every rule between features, in one table: "X does not work with Y" is said here and nowhere else.

The rows stand in files by section: `rows_data.py`, `rows_pipeline.py`, `rows_tensor.py`, `rows_context.py`,
`rows_expert.py`, `rows_precision.py`. To add one, write below the others of its section:

    @_row("pp.some-id", "One sentence for docs/constraints.md: what is refused, and why.")
    def _some_id(case: Case) -> Hit | None:
        if case.plan.axes.pp == 1 or not case.plan.compile:
            return None
        return Hit(what="...", found="...", fix="...", plans=[change(case.plan, compile=False)])

`plans` are candidates that do not break this row; `check` searches on from them to the nearest plan that breaks none.
Then run `python -m shardwise.plan.constraints > docs/constraints.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache

from shardwise.errors import ModelError, PlanError
from shardwise.findings import Finding, errors_in
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.repair import Case, Hit, Read, Row, change, markdown, nearest_legal
from shardwise.plan.rows.context import CONTEXT
from shardwise.plan.rows.data import BLOCKS, DATA, WORLD
from shardwise.plan.rows.expert import EXPERTS
from shardwise.plan.rows.modules import MODULES, READ
from shardwise.plan.rows.pipeline import PIPELINE
from shardwise.plan.rows.precision import PRECISION
from shardwise.plan.rows.tensor import TENSOR
from shardwise.plan.workload import Workload

SECTIONS: Mapping[str, Mapping[str, Row]] = {
    "World and axes": WORLD,
    "Data axes and batch": DATA,
    "Pipeline": PIPELINE,
    "Tensor": TENSOR,
    "Context": CONTEXT,
    "Experts": EXPERTS,
    "Recompute and precision": BLOCKS,
    "Float8 and precision rules": PRECISION,
    "Modules that were read": READ,
}
"""The table by section; findings are given in this order."""

ROWS: Mapping[str, Row] = {row_id: row for rows in SECTIONS.values() for row_id, row in rows.items()}
"""The whole table: id -> row."""


def check(
    plan: Plan,
    *,
    spec: ModelSpec | Read | None = None,
    world: int | None = None,
    device: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
) -> list[Finding]:
    """What the table says of a plan: errors refuse it, warnings and notes do not.

    What is not given is not checked. An error's `fix` ends with the nearest plan that breaks no row under the same
    model, world, device and length, or says that there is none. Needs no torch.

    Args:
        plan: the layout.
        spec: sizes of the model, or the model as it was read.
        world: number of processes.
        device: its type, as torch names it: `cpu`, `cuda`, `mps`.
        global_batch: samples per step over all ranks, where the plan has none of its own.
        seq_len: tokens of a sample.

    Cost: about 30 microseconds for a legal plan, some milliseconds per error.

    >>> [f.id for f in check(Plan.parse("fsdp4"), world=8)]
    ['world.size']
    """
    given = plan
    if plan.batch.global_size is None and global_batch is not None:
        plan = change(plan, batch__global_size=global_batch)
    read = spec if isinstance(spec, Read) else None
    sizes = spec.limits if isinstance(spec, Read) else spec
    case = Case(plan=plan, spec=sizes, world=world, device=device, seq_len=seq_len, read=read)
    first_error = cache(_first_error)  # searches of several errors meet the same plans
    findings = []
    for row in ROWS.values():
        hit = row.test(case)
        if hit is None:
            continue
        fix = hit.fix
        if hit.severity == "error":
            works = nearest_legal(case, hit.plans, first_error)
            if works is None:
                fix = f"{fix}; no plan for {world or plan.world} processes works, one process does"
            else:
                if works.batch.global_size == plan.batch.global_size:
                    works = change(works, batch__global_size=given.batch.global_size)
                fix = f"{fix}; nearest plan that works: `{works}`"
        findings.append(Finding(id=row.id, severity=hit.severity, what=hit.what, evidence=hit.found, fix=fix))
    return findings


def passed(plan: Plan, read: Read, cluster: Cluster, workload: Workload) -> list[Finding]:
    """Warnings and notes of a plan that nothing refuses: what has no effect, and devices that it leaves idle."""
    kind, batch = "cpu" if cluster.device.name.startswith("cpu") else "cuda", workload.global_batch
    found = check(plan, spec=read, device=kind, global_batch=batch, seq_len=workload.seq_len)
    return [*_idle(plan, cluster), *(finding for finding in found if finding.severity != "error")]


def _idle(plan: Plan, cluster: Cluster) -> list[Finding]:
    if plan.world >= cluster.world:
        return []
    return [
        Finding(
            id="world.idle",
            severity="note",
            what=f"{cluster.world - plan.world:,} of the {cluster.world:,} devices of {cluster.name} are idle",
            evidence=f"ranks of the plan = {plan.world:,}; numbers per device are those of its ranks",
            fix="leave them to others, or use larger axes",
        )
    ]


def refuse(findings: Iterable[Finding]) -> None:
    """Raise when any finding is an error; warnings and notes pass.

    Raises:
        PlanError: with every error, its numbers and the nearest plan that works.
    """
    errors = errors_in(findings)
    if errors:
        count = "1 constraint does" if len(errors) == 1 else f"{len(errors)} constraints do"
        raise PlanError("\n".join([f"the plan is refused, {count} not hold:", *(f"  {error}" for error in errors)]))


def refuse_frozen(profile: Profile) -> None:
    """Refuse a model of which nothing is trained, whatever the plan.

    Raises:
        ModelError: no parameter of it gets a gradient.
    """
    if profile.trained <= 0:
        raise ModelError(
            f"{profile.name} has no trainable parameter: found requires_grad=False on all {profile.num_params:,}; "
            "needed some that a step updates; set requires_grad=True on those"
        )


def _first_error(case: Case) -> Hit | None:
    for row in ROWS.values():
        hit = row.test(case)
        if hit is not None and hit.severity == "error":
            return hit
    return None


def docs_text() -> str:
    """The text of docs/constraints.md."""
    head = (
        "# Constraints\n\n"
        "Every rule between features. `shardwise check`, `shardwise train`, `shardwise run` and `apply` ask this one "
        "table before any process starts.\nA refusal names its numbers and the nearest plan that works. An unparsable "
        "shorthand has the "
        "id `plan.syntax`. What only the module itself shows stands under Modules.\n\n"
        "Written by `python -m shardwise.plan.constraints > docs/constraints.md`; a test holds it current.\n\n"
    )
    tables = {section: {row.id: row.why for row in rows.values()} for section, rows in SECTIONS.items()}
    return head + markdown({**tables, "Modules": MODULES})


if __name__ == "__main__":
    sys.stdout.write(docs_text())
