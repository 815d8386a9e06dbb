"""What the step of an optimizer that is the user's does with sharded parameters, and torch does not do.

`parameter.data = value`: of a DTensor torch changes the wrapper, and neither the shard nor what computes with it: SAM's
way back from where it has climbed, and rules written by hand (`p.data = p.data - lr * p.grad`), did nothing, without a
word. `float(update.norm())`: torch reads it off this rank's part, so that each rank would step by another number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.torch_private import SET_DATA
from shardwise.train.torch_private import local_of, step_unseen


@contextmanager
def of_whole(optimizer: torch.optim.Optimizer, *, is_of_stage: bool) -> Iterator[None]:
    """Within it a step of the optimizer over shards is that of the whole tensors.

    What it assigns goes into shards, numbers that it reads are of the whole, sums over ranks are made when they arise,
    and plain tensors count as whole on every rank. Torch's own optimizers need none of it, and are left alone.

    Args:
        optimizer: the user's.
        is_of_stage: it steps a stage of a pipeline, of which alone such a number would be.

    Raises:
        ModelError: within it, of what cannot be done.

    Cost: a collective for each sum and number, which all ranks make in the same order.
    """
    if steps_shards(optimizer):
        try:
            with implicit_replication(), _OfWhole(is_of_stage):
                yield
        except (RuntimeError, ValueError) as error:  # as torch says that it has no rule for parts; the rule's own, too
            error.add_note(
                f"This was the step of {type(optimizer).__name__} over sharded parameters, with which torch cannot do "
                "every operation. Needed then: a rule without it (`foreach=False`, where there is one), an optimizer "
                "of shardwise, or a plan that keeps weights whole (`dp`, `pp`); see docs/optimizers.md."
            )
            raise
    else:
        yield


@torch.no_grad()
def state_after_step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The state that a step of one parameter leaves: its keys, shapes and types are wanted, nothing else.

    No hook sees the step, and optimizer and parameter are as they were.
    """
    grad, before, own = parameter.grad, local_of(parameter).clone(), optimizer.state.pop(parameter, None)
    groups = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each is parameter]
    parameter.grad = torch.zeros_like(parameter)
    try:
        with of_whole(optimizer, is_of_stage=False):
            step_unseen(optimizer)
    finally:
        for group, kept in zip(optimizer.param_groups, groups, strict=True):  # some count steps in their groups
            group.clear()
            group.update(kept)
        parameter.grad = grad
        local_of(parameter).copy_(before)
        made = dict(optimizer.state.pop(parameter, {}))
        if own is not None:
            optimizer.state[parameter] = own
    return made


def steps_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is the user's, and steps DTensors."""
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    return not type(optimizer).__module__.startswith("torch.") and any(isinstance(p, DTensor) for p in stepped)


_READS = {torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__bool__}


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


_EACH = {"copy_": _copy_each}
"""Operations on lists of tensors that torch cannot do with sharded ones, one by one."""


class _OfWhole(TorchFunctionMode):
    def __init__(self, is_of_stage: bool) -> None:
        super().__init__()
        self.is_of_stage = is_of_stage

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in _READS and isinstance(args[0], DTensor):
            return func(self._whole(args[0]))
        if func == SET_DATA and isinstance(args[0], DTensor):
            return _assign(*args)
        if name.startswith("_foreach_") and name.removeprefix("_foreach_") in _EACH and _holds_shards(args[:2]):
            return _EACH[name.removeprefix("_foreach_")](*args, **kwargs)
        if isinstance(kwargs.get("out"), torch.Tensor) and _holds_shards([*args, kwargs["out"]]):
            return _put(kwargs.pop("out"), _reduced(func(*args, **kwargs)))
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if writes and not _holds_shards(args[:1]) and _holds_shards([*args[1:], *kwargs.values()]):
            args, kwargs = tuple(_wholes(args)), dict(zip(kwargs, _wholes(kwargs.values()), strict=True))
        return _reduced(func(*args, **kwargs))

    def _whole(self, tensor: DTensor) -> torch.Tensor:
        if self.is_of_stage:
            raise ModelError(
                f"the optimizer reads a number ({tensor.dtype}) off what it computes from sharded parameters, which "
                "in a pipeline is of one stage, and each would step by another one; needed: a plan without pp, or a "
                "rule that keeps it a tensor"
            )
        return tensor.full_tensor()


def _assign(parameter: DTensor, value: Any) -> None:
    """`parameter.data = value`, into the shard."""
    if not isinstance(value, DTensor):
        raise ModelError(
            f"the optimizer assigns a plain tensor {tuple(value.shape)} to `.data` of a sharded parameter "
            f"{tuple(parameter.shape)}: needed one that is sharded as it is (torch.empty_like(parameter), or what "
            "is computed from it)"
        )
    with torch.no_grad():
        same = value.redistribute(parameter.device_mesh, parameter.placements)
        local_of(parameter).copy_(local_of(same))


def _put(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`out=`, of which either may be sharded."""
    return target.copy_(result if isinstance(target, DTensor) else _wholes([result])[0])


def _holds_shards(values: Iterable[Any]) -> bool:
    return any(isinstance(each, DTensor) or (isinstance(each, list | tuple) and _holds_shards(each)) for each in values)


def _wholes(values: Iterable[Any]) -> list[Any]:
    """For what is written into a plain tensor, which every rank has whole."""
    return [
        each.full_tensor() if isinstance(each, DTensor) else _wholes(each) if isinstance(each, list | tuple) else each
        for each in values
    ]


def _reduced(result: Any) -> Any:
    """What a function gave; sums over ranks that are yet to be made are made: torch writes nothing into them."""
    if isinstance(result, list | tuple):
        return (
            type(result)(tuple(map(_reduced, result))) if any(isinstance(each, DTensor) for each in result) else result
        )
    if not isinstance(result, DTensor) or not any(place.is_partial() for place in result.placements):
        return result
    return result.redistribute(placements=[Replicate() if p.is_partial() else p for p in result.placements])
