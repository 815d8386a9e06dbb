"""`steps`: the loop as a generator, and `evaluate`: one exact pass. The user's code is the loop's body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from shardwise.checkpoint.layout import held_by
from shardwise.errors import ExitCode, UsageError
from shardwise.parallel.inputs import num_rows
from shardwise.parallel.placed import Placed, check_placed
from shardwise.train.guards.told import told
from shardwise.train.loss import Loss, refuse_mean
from shardwise.train.losses import Losses, losses_in
from shardwise.train.rehearsal import rejoin
from shardwise.train.signals import EXIT_CODES, listening
from shardwise.train.state import TrainState, placed_of
from shardwise.train.step import LossFn, StepMetrics, StepOptions, TrainStep, options_with
from shardwise.train.whole_pass import Pass, Place, go_through


class Saver(Protocol):
    """Where the loop saves when it is told to stop: a `Store`."""

    def save(self, state: TrainState) -> Any:
        """Write a checkpoint of the state; every rank takes part."""
        ...


def steps(
    state: TrainState,
    loss_fn: LossFn,
    *,
    until: int,
    clip: float | None = None,
    options: StepOptions | None = None,
    store: Saver | None = None,
) -> Iterator[StepMetrics]:
    """Train until a step, yielding what each step did; the body of the loop is the user's.

    SIGTERM, SIGINT and SIGUSR1 finish the step on all ranks, save to `store` when one is given, and exit with code
    143, 130 or 138. A second signal ends the process at once.

    Args:
        state: its batches are read; its step says where to begin.
        loss_fn: see `make_step`.
        until: number of steps after which the loop ends, counted from the beginning of the run.
        clip: largest gradient norm.
        options: clipping and what happens to values that are not finite.
        store: where to save when a signal asks to stop.

    Raises:
        UsageError: the state has no batches, or they are no iterator; or `until` is no number.
        CheckpointError: `store` is given, and could not store a tensor's name or type.
        NonFiniteError: under `on_nonfinite="raise"`.
        SystemExit: after a signal, when the step is finished and the state saved; and code 5 under
            `on_nonfinite="stop"`.

    >>> for m in steps(state, loss_fn, until=1000, clip=1.0):  # doctest: +SKIP
    ...     print(m.step, m.loss)
    """
    _check(state, until)
    state.mesh.check_open("steps()")
    if store is not None:
        held_by(state.tensors())  # what no save will take is refused before anything is trained
    step = TrainStep(state, loss_fn, options_with(clip, options))
    mirror = rejoin(step)
    if not all(part.root.training for part in state.placed.parts):
        state.placed.train(True)
    with listening(step):
        while state.step < until:
            try:
                window = next(state.batches)  # type: ignore[call-overload]  # a loader is an iterator
            except StopIteration:
                return
            metrics = step(window)
            yield metrics
            if metrics.stopping is not None:
                if store is not None:
                    store.save(state)
                spiked = metrics.stopping.startswith("spike")
                code = EXIT_CODES.get(metrics.stopping, ExitCode.SPIKE if spiked else ExitCode.NON_FINITE)
                raise SystemExit(int(code))
            if mirror is not None:  # after the body: what it did for this step is done by every rank, or is done again
                mirror.keep(state)


def _check(state: TrainState, until: object) -> None:
    placed_of(state)
    if state.batches is None:
        raise UsageError("steps(): the state has no batches; give TrainState a loader, or call make_step yourself")
    if not hasattr(state.batches, "__next__"):
        raise UsageError(
            f"steps(): found batches of type {type(state.batches).__name__}, which is no iterator (no __next__); "
            "needed: shardwise.loader(dataset, ...), or an object with __next__, state_dict and load_state_dict; or "
            "call make_step yourself in a loop over it"
        )
    if not isinstance(until, int) or isinstance(until, bool):
        raise UsageError(
            f"steps(): until: found {until!r}; needed a number of steps (a loader's `num_steps` is one where it is "
            "given `epochs=`, and its data set has a length)"
        )


@torch.inference_mode(False)  # of a script around it: what is gathered there, no step could write to again
def evaluate(placed: Placed, loss_fn: LossFn, windows: Iterable[Any]) -> Loss:
    """Sum of the loss and its weight over one exact pass; nothing dropped, nothing counted twice.

    Args:
        placed: the training mesh's module, as it is.
        loss_fn: as in training.
        windows: from `eval_batches`; or batches of a script's own, each what a step takes: this rank's rows of it.
            Every rank must get the same number of them.

    Returns:
        `Loss(sum, weight)` over all ranks, as fp64 tensors of shape (); the mean is `sum / weight`. Of several losses
        the mean is the total, and the weight that of the first.

    Cost: a barrier, forward passes, one all-reduce at the end; of batches of a script's own a look at the first, and
        where forward communicates an all-reduce of one number for each. Each module returns to the mode that it was in.

    Raises:
        UsageError: one batch in place of several, or none; a loss function of other arguments; ranks that do not call
            it, or have fewer batches than others where forward communicates.
        ReplicaError: batches of a script's own that differ on ranks which work on the same rows.

    >>> total = evaluate(placed, loss_fn, eval_batches(dataset, plan.batch, mesh))  # doctest: +SKIP
    """
    check_placed(placed, "evaluate")
    counts_here = placed.mesh.index("tp") == 0
    several = loss_fn if isinstance(loss_fn, Losses) else None
    loss_fn = several or told(loss_fn)
    *totals, seen = torch.zeros(1 + (len(several.weights) if several else 1), 2, dtype=torch.float64)

    def add(result: Any, micro: Any, is_zero: bool, _place: Place) -> None:
        if placed.context is not None:
            refuse_mean(result)
        seen.add_(1)
        if counts_here and not is_zero:
            for total, loss in zip(totals, losses_in(result, num_rows(micro)), strict=True):
                total[0] += float(loss.sum)
                total[1] += float(loss.weight)

    def number(result: Any, micro: Any) -> torch.Tensor:
        return losses_in(result, num_rows(micro))[0].sum

    go_through(placed, windows, Pass(doing="evaluate()", function=loss_fn, take=add, number=number))
    summed = placed.mesh.all_reduce_sum(torch.stack([*totals, seen]).to(placed.mesh.device))
    *sums, batches = [Loss(*row) for row in summed]
    if not batches.weight:
        raise UsageError(
            f"evaluate(): found no batch on any rank in {type(windows).__name__}; needed: at least one (an iterator is "
            "at its end after one pass; a DataLoader with drop_last leaves out what does not fill a batch)"
        )
    return several.total(dict(zip(several.weights, sums, strict=True))) if several else sums[0]
