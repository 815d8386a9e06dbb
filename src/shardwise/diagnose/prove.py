"""`verify`: the same as the command, for Python: a script, a function that trains, or a model with a batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.diagnose.verify import Options, Report, Verifier
from shardwise.diagnose.verifying.subject import Subject
from shardwise.errors import UsageError
from shardwise.launch.forked import World
from shardwise.parallel.compose import apply
from shardwise.parallel.inputs import num_rows
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.train.guards.witness import take_rows
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState
from shardwise.train.step import LossFn, make_step

Target = str | Path | Callable[..., Any]


def verify(
    target: Target,
    plan: str | Plan,
    *,
    words: Sequence[str] = (),
    batch: Any = None,
    loss_fn: LossFn | None = None,
    options: Options | None = None,
) -> Report:
    """Is training under a plan the same as on one process?

    Args:
        target: a script's path; a function `train(plan)` that trains with Shardwise's steps; or, with `batch` and
            `loss_fn`, a model's factory. Functions stand at the top level of a module: processes find them by name.
        plan: the layout, as a plan or its shorthand.
        words: for a script, after the plan; `{out}` in one is a fresh directory of each run.
        batch: all rows of a step, as the collate function gives them; with a factory.
        loss_fn: see `make_step`; with a factory.
        options: steps, type, device and time limit.

    Returns:
        A `Report`: `proven`, the table, the first modules that differ, the likely cause. Nothing is raised for a
        difference or a refusal.

    Raises:
        UsageError: arguments that do not fit each other, or functions that processes cannot find.
        PlanError: a shorthand that does not parse.

    Cost: forks as many processes as the plan has ranks; three runs of one process, one of the plan's. Call it before
    this process runs any autograd, or use the fixture `verify` of `shardwise.testing.plugin`, which forks in time.

    >>> verify("train.py", "fsdp2 tp2").proven  # doctest: +SKIP
    True
    """
    parsed = plan if isinstance(plan, Plan) else Plan.load(plan)
    subject = make_subject(target, tuple(words), batch, loss_fn)
    world = World(parsed.world)
    try:
        with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
            return Verifier(subject, world, Path(folder), options).verify(parsed)
    finally:
        world.close()


def make_subject(target: Target, words: tuple[str, ...], batch: Any, loss_fn: LossFn | None) -> Subject:
    """What `verify` is given, as a subject.

    Raises:
        UsageError: arguments that do not fit each other.
    """
    if not callable(target):
        if batch is not None or loss_fn is not None:
            raise UsageError(
                f"verify({str(target)!r}): a script has its own batches and loss; leave batch, loss_fn out"
            )
        if not Path(target).is_file():
            raise UsageError(f"verify({str(target)!r}): no such script; give the path of a Python file")
        return Subject(target=str(target), words=words)
    name = getattr(target, "__name__", type(target).__name__)
    alone = batch is None and loss_fn is None
    if words or (not alone and (batch is None or loss_fn is None)):
        raise UsageError(
            f"verify({name}): found words={words!r}, batch={'given' if batch is not None else None}, "
            f"loss_fn={loss_fn}; "
            "needed: a function train(plan) alone, or a model's factory with both batch= and loss_fn="
        )
    if loss_fn is None:
        return Subject(target=name, function=target)
    return Subject(target=name, function=partial(_train, target, loss_fn, batch))


def _train(factory: Callable[[], nn.Module], loss_fn: LossFn, batch: Any, plan: Plan) -> None:
    """Steps over one batch until the witness ends it."""
    with open_mesh(plan) as mesh:
        rows = list(range(num_rows(batch)))
        own = rows[
            mesh.batch.rank * len(rows) // mesh.batch.size : (mesh.batch.rank + 1) * len(rows) // mesh.batch.size
        ]
        placed = apply(factory, plan, mesh, seed=7, sample=take_rows(batch, own[: max(1, len(own) // 2)], len(rows)))
        step = make_step(TrainState(placed, adamw(placed, lr=1e-2)), loss_fn, clip=0.5)
        while True:
            step(take_rows(batch, own, len(rows)))
