"""`fail_at`: a fault planted in a training step, for tests of what survives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch

from shardwise.errors import UsageError
from shardwise.model.nested import leaves
from shardwise.train.state import TrainState

Where = Literal["forward", "backward", "optimizer", "save"]


@contextmanager
def fail_at(
    rank: int, step: int, where: Where, error: BaseException | None = None, *, state: TrainState, times: int = 1
) -> Iterator[None]:
    """While it is open, one rank fails at one place of one step; the others are left alone.

    Args:
        rank: of the world.
        step: counted from 1, as `StepMetrics.step`.
        where: before the forward of the model, when the gradient of its output arrives, before the optimizer's step,
            or when a store asks for the state's tensors after that step.
        error: what is raised there; None: the process is killed (SIGKILL).
        state: whose step it is.
        times: how often; a step that is done again, or of which several micro-batches pass, fails again until then.

    Raises:
        UsageError: a place that is none of the four, a rank outside of the world, or a step before the first.

    Example:
        >>> with fail_at(1, 3, "backward", MemoryError("planted"), state=state):  # doctest: +SKIP
        ...     for m in steps(state, loss_fn, until=5):
        ...         print(m.events)
    """
    if where not in get_args(Where) or not 0 <= rank < state.mesh.world or step < 1:
        raise UsageError(
            f"fail_at: found rank {rank} of {state.mesh.world}, step {step}, where={where!r}; needed: a rank of the "
            f"world, a step from 1 on, and one of {', '.join(get_args(Where))}; correct the call"
        )
    left = [times]

    def fail(*_: Any) -> None:
        counted = where in ("optimizer", "save")  # a step is counted before the optimizer runs
        done = state.step if counted else state.step + 1
        if state.mesh.rank != rank or done != step or not left[0]:
            return
        left[0] -= 1
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise error

    with ExitStack() as planted:
        _PLANT[where](state, fail, planted)
        yield


def _forward(state: TrainState, fail: Callable[..., None], planted: ExitStack) -> None:
    planted.callback(state.placed.parts[0].root.register_forward_pre_hook(fail).remove)


def _backward(state: TrainState, fail: Callable[..., None], planted: ExitStack) -> None:
    def watch(_module: Any, _args: Any, output: Any) -> None:
        for _, tensor in leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(fail)  # type: ignore[no-untyped-call]  # torch has no types here

    planted.callback(state.placed.parts[-1].root.register_forward_hook(watch).remove)


def _optimizer(state: TrainState, fail: Callable[..., None], planted: ExitStack) -> None:
    planted.callback(state.optimizer.torch.register_step_pre_hook(fail).remove)


def _save(state: TrainState, fail: Callable[..., None], planted: ExitStack) -> None:
    tensors = state.tensors

    def failing() -> dict[str, torch.Tensor]:
        fail()
        return tensors()

    state.tensors = failing  # type: ignore[method-assign]  # of this one object, until the block ends
    planted.callback(lambda: state.__dict__.pop("tensors"))


_PLANT: dict[str, Callable[[TrainState, Callable[..., None], ExitStack], None]] = {
    "forward": _forward,
    "backward": _backward,
    "optimizer": _optimizer,
    "save": _save,
}
