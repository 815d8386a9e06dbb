"""What a `TrainState` is given: each of its arguments is told from what people hand over in its place."""

from __future__ import annotations

from functools import partial

from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import UsageError
from shardwise.parallel.placed import Placed, check_placed
from shardwise.train.batches import Batches
from shardwise.train.ema import Ema

_POSITION = ("state_dict", "load_state_dict")


def check_given(placed: Placed, optimizer: object, batches: object, schedule: object, ema: object) -> None:
    """Refuse a module that is not placed, what is no optimizer, batches of another plan, or another thing as the rest.

    Raises:
        UsageError: naming what was found, and what is needed.
    """
    check_placed(placed, "TrainState")
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        found = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise UsageError(
            f"TrainState: optimizer: found {found}; needed one that is made: shardwise.adamw(placed, lr=...), or one "
            "of torch over placed.parameters()"
        )
    _check_batches(placed, batches)
    _check_schedule(schedule)
    if ema is not None and not isinstance(ema, Ema):
        raise UsageError(f"TrainState: ema: found {ema!r}; needed an average: shardwise.Ema(placed, decay=0.999)")


def _check_schedule(schedule: object) -> None:
    """A scheduler of torch sets rates itself, when it is stepped."""
    if schedule is not None and not callable(schedule):
        raise UsageError(
            f"TrainState: schedule: found {type(schedule).__name__}; needed a function from the step to a factor of "
            "the rate, as warmup_cosine(100, 1000); a scheduler of torch is stepped in the loop, and kept by "
            "state.keep(scheduler=scheduler)"
        )


def _check_batches(placed: Placed, batches: object) -> None:
    """A loader that was given a number in place of the plan's batch knows nothing of its micro-batches."""
    is_scheduler = isinstance(batches, LRScheduler)
    if batches is not None and (is_scheduler or not all(map(partial(hasattr, batches), _POSITION))):
        raise UsageError(
            f"TrainState: found batches of type {type(batches).__name__}, which cannot say where it is; "
            "needed: shardwise.loader(dataset, ...), or None, with make_step fed by hand"
            + ("; keep a scheduler of torch by state.keep(scheduler=scheduler)" if is_scheduler else "")
        )
    if not isinstance(batches, Batches):
        return
    planned, cut = placed.plan.batch.micro_batches, batches.spec.micro_batches
    if planned != cut:
        raise UsageError(
            f"TrainState: the loader cuts a step into {cut} micro-batches per rank, and the plan `{placed.plan}` needs "
            f"{planned}; give the loader the plan's own: loader(dataset, plan.batch, mesh, global_size=...)"
        )
