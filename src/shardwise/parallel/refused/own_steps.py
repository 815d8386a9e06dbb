"""Steps of an optimizer that a script makes by itself, after a backward pass of its own.

Nobody has summed those gradients over ranks: replicas would drift apart, shards would take sums for means, and an
optimizer over local shards would find no gradient at all; each without a word.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import UsageError
from shardwise.parallel.placed import Placed

_HANDED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that were given the gradients of a step, and have not made it yet."""
_STEPPING: list[torch.optim.Optimizer] = []
"""Those that make it now: what they step inside (Lookahead) is a part of it."""


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Say that an optimizer's parameters have the gradients of a step."""
    _HANDED.add(optimizer)


@contextmanager
def stepping(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it an optimizer makes its step from these.

    Raises:
        UsageError: nobody has handed gradients over; or its rule wants to make forward and backward passes itself.
    """
    if optimizer not in _HANDED:
        raise UsageError(_message(type(optimizer).__name__, "which no step has given its gradients"))
    _HANDED.discard(optimizer)
    _STEPPING.append(optimizer)
    try:
        yield
    except (TypeError, AssertionError, RuntimeError, ValueError) as error:
        if _wants_closure(error):
            raise UsageError(_CLOSURE.format(kind=type(optimizer).__name__)) from error
        raise
    finally:
        _STEPPING.pop()


def _wants_closure(error: Exception) -> bool:
    """By what it says, or by the line that raised it: `closure()`, `assert closure is not None`."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line or "" for frame in frames if not frame.filename.startswith(_OWN)]
    called = isinstance(error, TypeError) and "'NoneType' object is not callable" in str(error)
    asserted = isinstance(error, AssertionError) and bool(lines) and "closure" in lines[-1]
    return asserted or "closure" in str(error) or (called and any("closure(" in line for line in lines))


_OWN = str(Path(__file__).parents[2])
_CLOSURE = (
    "{kind}.step() needs a closure: found a rule that makes forward and backward passes of its own (SAM, L-BFGS); "
    "needed: one that steps by the gradients it is given. Two passes are two steps, each with an optimizer of its "
    "own over the same placed model: the first climbs, the second goes back and steps (docs/optimizers.md)"
)


def refuse_own_steps(placed: Placed) -> None:
    """Let steps of optimizers over these parameters that were given no gradients be refused, on several ranks.

    Raises:
        UsageError: at such a step.

    Cost: a look at each optimizer that steps; at all parameters of those that are no step's.
    """
    if placed.mesh.world == 1:
        return
    ids = frozenset(id(parameter) for parameter in placed.parameters())
    handle = register_optimizer_step_pre_hook(partial(_check, ids, str(placed.plan)))
    weakref.finalize(placed.parts[0].root, handle.remove)


def _check(ids: frozenset[int], plan: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _STEPPING or not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
        return
    found = f"over the parameters that apply has put under `{plan}`, whose gradients nobody has summed over the ranks"
    raise UsageError(_message(type(optimizer).__name__, found))


def _message(kind: str, what: str) -> str:
    return (
        f"{kind}.step() of the script itself: found an optimizer {what}; needed: `step = sw.make_step(state, loss_fn)` "
        "and `step(batch)`, which makes forward, backward, sums, norm and update (docs/step.md)"
    )
