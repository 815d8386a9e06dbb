"""`Reruns`: a forward that runs again in the backward pass meets the buffers of its first run, and changes none.

Running statistics, counts, codebooks, vectors of a power iteration: `torch.utils.checkpoint` alone would have the
second run see what the first has written, give other numbers than it, and write once more. The same holds for plain
numbers and texts that modules keep (`self.calls += 1`, by which something is warmed up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.padding import paddings_of

Place = tuple[nn.Module, str]


class Reruns:
    """Of one block; `name` is for messages.

    Cost: in each first run a copy of the buffers that it writes, which lives until the backward pass; in the very
    first a copy of all that the block has, and a comparison of their values. A look at the attributes of its modules,
    two microseconds for each of these.
    """

    def __init__(self, name: str, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.written: frozenset[Place] | None = None
        """The buffers that forward writes; None: it has not run yet."""

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward for one micro-batch: its first call is the first run, and every other a second one."""
        if not torch.is_grad_enabled():
            return forward
        places, paddings = buffers_in(self.block), paddings_of(self.block)
        before: dict[Place, torch.Tensor] = {}
        numbers: dict[Place, Any] = {}
        flags: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if not flags:
                flags[:] = [padding.now for padding in paddings] or [False]
                before.update(copies_of(places if self.written is None else self.written))
                found, kept = {place: _seen(place) for place in places}, numbers_in(self.block)
                result = forward(*args, **kwargs)
                numbers.update(_changed(kept, numbers_in(self.block)))
                self._learn({place for place in places if _is_other(_seen(place), found[place])}, before)
                return result
            with put_in_place(copied(before)), _with_numbers(numbers):
                now = [padding.now for padding in paddings]
                for padding, flag in zip(paddings, flags, strict=False):
                    padding.now = flag
                try:
                    return forward(*args, **kwargs)
                finally:
                    for padding, flag in zip(paddings, now, strict=True):
                        padding.now = flag

        return run

    def _learn(self, written: set[Place], before: dict[Place, torch.Tensor]) -> None:
        """Keep copies of what was written alone.

        Raises:
            ModelError: a buffer was written for the first time in a later run, of which there is no copy.
        """
        if self.written is None:
            written |= {place for place, copy in before.items() if _differs(place, copy)}
        late = written - before.keys()
        if late:
            names = {module: name for name, module in self.block.named_modules(prefix=self.name)}
            module, key = next(iter(late))
            raise ModelError(
                f"recompute: forward of {self.name} has written its buffer {names[module]}.{key}, which it had not in "
                "its first run, and what it was before is gone, so it cannot be computed again; write it in every "
                "training forward (`buffer.add_(0)` will do), or leave the block out (recompute=everyN or a ratio)",
                row="module.written-late",
            )
        if self.written is None:
            self.written = frozenset(written)
            for place in before.keys() - written:
                del before[place]


def _differs(place: Place, copy: torch.Tensor) -> bool:
    """By value: torch's batch norm writes its statistics and counts up no version. A traced step has no values."""
    if type(copy) is not torch.Tensor:
        return isinstance(place[0], nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    return not torch.equal(copy, cast(torch.Tensor, place[0]._buffers[place[1]]))


def _seen(place: Place) -> tuple[torch.Tensor | None, int]:
    """What tells whether a buffer was written, or another put in its place."""
    buffer = place[0]._buffers.get(place[1])
    return buffer, 0 if buffer is None else buffer._version


def _is_other(one: tuple[torch.Tensor | None, int], other: tuple[torch.Tensor | None, int]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


def buffers_in(root: nn.Module) -> list[Place]:
    """Where buffers are: forward may put another tensor there."""
    return [(module, key) for module in root.modules() for key in module._buffers]


def copies_of(places: Iterable[Place]) -> dict[Place, torch.Tensor]:
    """What is there now."""
    held = {(module, key): module._buffers[key] for module, key in places}
    return copied({place: buffer for place, buffer in held.items() if buffer is not None})


def copied(tensors: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
    """Copies; of what is in two places one."""
    made = {id(tensor): tensor.detach().clone() for tensor in tensors.values()}
    return {place: made[id(tensor)] for place, tensor in tensors.items()}


@contextmanager
def put_in_place(tensors: Mapping[Place, torch.Tensor]) -> Iterator[None]:
    """These tensors as buffers, for a while; nothing is written into those that were there."""
    now = {(module, key): module._buffers[key] for module, key in tensors}
    for (module, key), tensor in tensors.items():
        module._buffers[key] = tensor
    try:
        yield
    finally:
        for (module, key), buffer in now.items():
            module._buffers[key] = buffer


_PLAIN = frozenset((int, float, bool, str, type(None)))
_NOTHING = object()
"""In the place of an attribute that was not there."""


def numbers_in(root: nn.Module) -> dict[Place, Any]:
    """Attributes of modules that are numbers, texts or None."""
    return {(m, key): value for m in root.modules() for key, value in vars(m).items() if type(value) in _PLAIN}


def _changed(before: Mapping[Place, Any], after: Mapping[Place, Any]) -> dict[Place, Any]:
    """What was in each place where there is something else now."""
    return {p: before.get(p, _NOTHING) for p, value in after.items() if before.get(p, _NOTHING) is not value}


@contextmanager
def _with_numbers(values: Mapping[Place, Any]) -> Iterator[None]:
    """These as attributes, for a while."""
    now = {(module, key): vars(module).get(key, _NOTHING) for module, key in values}
    _put_numbers(values)
    try:
        yield
    finally:
        _put_numbers(now)


def _put_numbers(values: Mapping[Place, Any]) -> None:
    for (module, key), value in values.items():
        if value is _NOTHING:
            vars(module).pop(key, None)
        else:
            vars(module)[key] = value
