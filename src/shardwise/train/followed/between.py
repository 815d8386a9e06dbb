"""What a script does to weights between the steps of a pipeline, where each stage has its own: followed when new.

A threshold over `placed.parameters()` (pruning), a norm of all, noise from one generator for layer after layer: of a
stage each is another than of the whole, and nothing says so.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.parallel.history import tensors_in
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import storage_key
from shardwise.train.followed.drawn import generator_of
from shardwise.train.followed.flow import Flow, Held
from shardwise.train.torch_private import has_modes, is_innermost, is_operation, local_of

Result = TypeVar("Result")
_LOOKS = 2
_OPEN: list[Body] = []
"""The one that is followed now."""


class Between:
    """Of one step function: the bodies of its loop, the first ones whole, of later ones what is new in them."""

    def __init__(self, placed: Placed) -> None:
        self._placed, self._left, self._known = placed, _LOOKS, set[Any]()
        self._told: list[str] = []
        self._is_staged = placed.pipeline is not None
        if self._is_staged:
            placed.mesh.at_exit.append(leave)

    def begin(self, result: Result) -> Result:
        """A step is done, and what comes is the script's. Not where the script has modes of its own around it."""
        if self._is_staged and not _OPEN and not has_modes():
            body = Body(self._placed, partial(_tell, self._told), self._known, waits=not self._left)
            self._left = max(0, self._left - 1)
            _OPEN.append(body)
            body.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return result


def leave() -> None:
    """What comes is no longer the script's. One that a mode of the script lies above waits until that is gone."""
    if _OPEN:
        _OPEN[0].is_over = True
        if is_innermost(_OPEN[0]):
            _OPEN.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # nor here


@contextmanager
def set_aside() -> Iterator[None]:
    """What runs within it is not the script's; what comes after it is again."""
    body = _OPEN[0] if _OPEN and is_innermost(_OPEN[0]) else None
    leave()
    try:
        yield
    finally:
        if body is not None and not _OPEN and not has_modes():
            body.is_over = False
            _OPEN.append(body)
            body.__enter__()  # type: ignore[no-untyped-call]  # nor here


class Body(TorchFunctionMode):
    """Within it a script has its turn, and each function that it calls is followed.

    One by one: what sees operations may not stay open over the guards of a script (`torch.inference_mode`).

    Cost: some 20 microseconds per operation; two per function while it waits.
    """

    def __init__(self, placed: Placed, warn: Callable[[str], None], known: set[Any], *, waits: bool) -> None:
        """`known`: lines of the script that were seen to give weights to torch; one that `waits` begins at another."""
        super().__init__()
        self._make, self.flow, self.is_over = partial(_Operations, placed, warn), None, False
        self._known, self._process = known, os.getpid()
        self._weights = {storage_key(local_of(p)) for p in placed.named_parameters().values() if p.numel()}
        if not waits:
            self.flow = self._make()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here; so do those of workers that were forked within it."""
        if self.is_over or torch.compiler.is_compiling() or os.getpid() != self._process:
            return func(*args, **(kwargs or {}))
        line = _line_of_script()
        if line not in self._known and any(self._is_weight(t) for t in tensors_in((args, kwargs or {}))):
            self._known.add(line)
            self.flow = self.flow or self._make()
        with self.flow or nullcontext():
            return func(*args, **(kwargs or {}))

    def _is_weight(self, tensor: Tensor) -> bool:
        """Or a view of one."""
        local = local_of(tensor)
        return type(local) in (Tensor, nn.Parameter) and not local.is_meta and storage_key(local) in self._weights


def _line_of_script() -> tuple[Any, int]:
    """Which line has called what torch is about to do."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


_TORCH = os.path.dirname(torch.__file__)


class _Operations(Flow):  # type: ignore[no-untyped-call]  # a mode of torch's, which has no types
    supports_higher_order_operators = True

    def __init__(self, placed: Placed, warn: Callable[[str], None]) -> None:
        named = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in placed.named_parameters().items()}
        held = [
            (Held(n, tuple(p.shape), int(p.storage_offset()), int(p.storage_offset()) + p.numel(), frozenset()), p)
            for n, p in ((n, p.detach()) for n, p in named.items())
            if p.numel()
        ]
        self._warn = warn
        super().__init__(held, [frozenset(n for n, p in named.items() if p.requires_grad)], lambda: False, _said, warn)
        self._made: Any = WeakIdKeyDictionary()
        """Tensors of numbers that were drawn -> of which generator, and whether it had been seeded just before."""
        self._drew: dict[int, set[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation comes here."""
        if not is_operation(func):
            return func(*args, **(kwargs or {}))
        given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
        drawn = {self._made[t] for t in given if t in self._made}
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn.add(generator_of(args, kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else ():
            for generator in drawn:
                self._made[tensor] = generator
                if func._schema.is_mutable:
                    self._note(tensor, *generator)
        return result

    def _note(self, target: Tensor, generator: int, is_fresh: bool) -> None:
        """Numbers of a generator were written into a weight: the second one of those that one generator serves."""
        for held in self._held.get(storage_key(target), ()):
            if held.start <= target.storage_offset() < held.end:
                self._drew.setdefault(generator, set()).add(held.name)
                if len(self._drew[generator]) > 1 and not is_fresh:
                    self._warn(
                        f"between steps: found numbers of one generator that are drawn for {held.name} after other "
                        "weights: each stage of a pipeline draws for the layers that it has, and other numbers than "
                        "one process; needed: a torch.Generator for each weight, seeded by its name and the step, or "
                        "a plan without pp"
                    )

    def _read(self, source: Any, tensor: Tensor) -> None:
        """Of each weight a number may be printed; one of all is of a stage."""
        if tensor.is_floating_point() and self._is_wrong(source):
            self._warn(_said("a number that is read and, if it is more than printed,", "them", source.mixed))


def _said(operation: str, target: str, mixed: str) -> str:
    return (
        f"between steps: found {operation} that takes to {target} what is made of all parameters that this rank has, "
        "of which a stage of a pipeline has its own: each would have another; needed: what is of each parameter alone, "
        "a sum over the ranks of pp first (mesh.group('pp')), or a plan without pp (docs/pipeline.md)"
    )


def _tell(told: list[str], said: str) -> None:
    """Once."""
    if not told:
        told.append(said)
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            warnings.warn(said, stacklevel=6)
