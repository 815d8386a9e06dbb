"""What a hook of an optimizer computes from a rank's part of a gradient, or weight, in place of the whole.

`torch.nn.utils.clip_grad_norm_`: each rank would scale by another norm. A mean over a dim that is cut (centralized
gradients), a weight that is normalized, noise: each rank would step by what is of its part, without a word.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.parallel.history import tensors_in
from shardwise.train.followed.drawn import generator_of
from shardwise.train.followed.flow import Flow, Held
from shardwise.train.torch_private import has_step_hooks, is_norm_of_all
from shardwise.train.updates.whole_steps import of_whole


class Stepped(Protocol):
    """As much of an optimizer with names as is looked at."""

    torch: torch.optim.Optimizer
    params: dict[str, nn.Parameter]
    live: dict[str, nn.Parameter]
    is_of_stage: bool
    is_told: bool
    """It was said that a hook takes a number of a shard."""
    num_followed: int
    """Steps of which each operation was looked at."""


@contextmanager
def watched(optimizer: Stepped) -> Iterator[None]:
    """Within it an optimizer steps: what it assigns goes into shards, and a hook's norm of a rank's part is refused.

    Cost: without hooks nothing.
    """
    has_hooks = has_step_hooks(optimizer.torch)
    norms = _Whole(optimizer) if has_hooks else nullcontext()
    with of_whole(optimizer.torch, is_of_stage=optimizer.is_of_stage), norms, _followed(optimizer, has_hooks):
        yield


_STEPS = 3
"""Of a user's own rule on a stage, which does the same in each; of hooks, which are free, all are followed."""


def _followed(optimizer: Stepped, has_hooks: bool) -> AbstractContextManager[Any]:
    """Hooks where a rank has a part, and on a stage the first steps of a rule that is the user's."""
    is_own = not type(optimizer.torch).__module__.startswith(("torch.", "shardwise."))
    if is_own and optimizer.is_of_stage and optimizer.num_followed < _STEPS:
        optimizer.num_followed += 1
    elif not has_hooks:
        return nullcontext()
    held = list(_held(optimizer))
    if not optimizer.is_of_stage and not any(one.cut for one, _ in held):
        return nullcontext()
    names = {id(parameter): name for name, parameter in optimizer.params.items() if parameter.grad is not None}
    groups = [frozenset(names[id(p)] for p in g["params"] if id(p) in names) for g in optimizer.torch.param_groups]
    in_rule = (lambda: False) if is_own else (lambda: not _in_a_hook())
    said = partial(_said, type(optimizer.torch).__name__)
    return Flow(held, groups if optimizer.is_of_stage else [], in_rule, said, partial(_tell, optimizer))


def _tell(optimizer: Stepped, said: str) -> None:
    """Once."""
    if not optimizer.is_told:
        optimizer.is_told = True
        with suppress(Warning):  # `-W error` does not end a run that may be meant so
            warnings.warn(said, stacklevel=5)


def _held(optimizer: Stepped) -> Iterator[tuple[Held, Tensor]]:
    """What a parameter, its gradient and its state are here."""
    for name, parameter in optimizer.params.items():
        live = optimizer.live[name]
        is_shard = isinstance(live, DTensor) and not isinstance(parameter, DTensor)
        cut = frozenset(_dims_cut(live)) if is_shard else frozenset()
        states = optimizer.torch.state.get(parameter, {}).values()
        for tensor in (parameter, parameter.grad, *states):
            if isinstance(tensor, Tensor) and tensor.shape == parameter.shape and tensor.layout == torch.strided:
                start = int(tensor.storage_offset())
                yield Held(name, tuple(tensor.shape), start, start + tensor.numel(), cut), tensor


def _said(kind: str, operation: str, target: str, mixed: str) -> str:
    """What is refused."""
    if mixed:
        return (
            f"a hook of {kind}: found {operation} that takes to {target} what is made of elements of {mixed}, "
            "of which this rank has a shard: each rank would have another; needed: an optimizer of torch.optim over "
            "placed.parameters(), whose hooks see whole tensors, or a sum over ranks first (docs/optimizers.md)"
        )
    return (
        f"the step of {kind}, or a hook of it: found {operation} that takes to {target} what is made of all "
        "parameters of a group, of which a stage of a pipeline has its own: each would have another; needed: clip= of "
        "make_step, a sum over the ranks of pp first (docs/optimizers.md), or a plan without pp"
    )


_ANEW = {"randn", "rand", "normal", "randint"}
_DRAWS = {"rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli", "bernoulli_", "exponential_"}
_ALONG = {
    1: {"mean", "sum", "prod", "var", "std", "amax", "amin", "max", "min", "median", "argmax", "argmin", "logsumexp",
        "softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort"},
    2: {"norm", "vector_norm", "normalize", "renorm", "topk", "kthvalue", "quantile"},
}  # fmt: skip
"""Functions that mix elements along dims, by the place of the argument that says these."""
_PLACES = {name: place for place, names in _ALONG.items() for name in names}
_DEFAULT = {"normalize": 1, "topk": -1, "kthvalue": -1, "sort": -1, "argsort": -1}


class _Whole(TorchFunctionMode):
    def __init__(self, optimizer: Stepped) -> None:
        super().__init__()
        self.optimizer = optimizer

        self._drawn: Any = WeakIdKeyDictionary()
        """Tensors of numbers that were drawn -> of which generator, and whether it had been seeded just before."""
        self._served: dict[int, set[str]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        name, given = getattr(func, "__name__", ""), (args, dict(kwargs or {}))
        if is_norm_of_all(func):
            self._check(args[0])
        elif (name in _DRAWS or name in _PLACES) and args and isinstance(args[0], Tensor) and _in_a_hook():
            self._check_mixing(name, args, kwargs or {})
        drawn = [self._drawn[tensor] for tensor in tensors_in(given) if tensor in self._drawn] if self._drawn else []
        if drawn:
            self._check_drawn(drawn[0], given)
        if name in _DRAWS | _ANEW and _in_a_hook():
            drawn = [generator_of(args, given[1])]
        result = func(*args, **(kwargs or {}))
        if drawn and isinstance(result, Tensor) and not self._names_of([result]):
            self._drawn[result] = drawn[0]
        return result

    def _names_of(self, tensors: Iterable[Tensor]) -> list[str]:
        each = list(tensors)
        return [name for name, p in self.optimizer.params.items() if any(_is_of(p, tensor) for tensor in each)]

    def _check_drawn(self, drawn: tuple[int, bool], given: Any) -> None:
        """What is drawn of a shard's sizes, or from one generator for one weight of a stage after another."""
        sizes = {tensor.shape for tensor in tensors_in(given) if tensor in self._drawn}
        for name in self._names_of(tensors_in(given)):
            live, own = self.optimizer.live[name], self.optimizer.params[name]
            (served := self._served.setdefault(drawn[0], set())).add(name)
            is_part = isinstance(live, DTensor) and own.shape != live.shape and own.shape in sizes
            if is_part or (self.optimizer.is_of_stage and len(served) > 1 and not drawn[1]):
                raise ModelError(
                    f"a hook of {type(self.optimizer.torch).__name__}: found numbers that are drawn for {name}, of "
                    f"which this rank has {'a shard' if is_part else 'one stage, after those for other weights'}: "
                    "other numbers than one process draws; needed: an optimizer of torch.optim over "
                    "placed.parameters(), whose hooks see whole tensors, without a pipeline; or a torch.Generator for "
                    "each weight, seeded by its name and the step, and its part of what is drawn for the whole"
                )

    def _check_mixing(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What is drawn for a part, or taken along a dim that is cut, is refused; of all elements see `flow.py`."""
        name = next((name for name, p in self.optimizer.params.items() if _is_of(p, args[0])), None)
        if name is None:
            return
        live, is_draw = self.optimizer.live[name], function in _DRAWS
        is_shard = isinstance(live, DTensor) and not isinstance(self.optimizer.params[name], DTensor)
        cut = _dims_cut(live) if is_shard else set()
        dims = () if is_draw else _dims_of(function, args, kwargs)
        said = f"a hook of {type(self.optimizer.torch).__name__}: found {function} of {name}, of which this rank has "
        said += (
            f"a shard, cut along dim {min(cut)}, and which is another thing of the whole; needed: an optimizer of "
            "torch.optim over placed.parameters(), whose hooks see whole tensors (docs/optimizers.md)"
            if cut
            else "one stage, so that other stages draw the same for other weights; needed: a plan without pp"
        )
        if (is_draw and (cut or self.optimizer.is_of_stage)) or any(dim % args[0].dim() in cut for dim in dims or ()):
            raise ModelError(said)

    def _check(self, tensors: list[Tensor]) -> None:
        """A DTensor has the norm of all its shards."""
        given, live = {id(tensor) for tensor in tensors}, self.optimizer.live
        for name, parameter in self.optimizer.params.items():
            is_part = isinstance(live[name], DTensor) and not isinstance(parameter, DTensor)
            if id(parameter.grad) in given and (is_part or self.optimizer.is_of_stage):
                raise ModelError(
                    f"a hook of {type(self.optimizer.torch).__name__}: found a norm over gradients "
                    f"(clip_grad_norm_), of which {name} is {'a shard' if is_part else 'of one stage'}: each rank "
                    "would scale by another one; needed: clip= of make_step or steps, which is of all; for a norm of "
                    "each group sum the squares over ranks first (docs/optimizers.md)"
                )


def _in_a_hook() -> bool:
    """Not in the step itself, whose norms are summed over ranks."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        where, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if where == "torch.optim.optimizer" and name == "wrapper":
            return True
        if name == "step" and where.startswith(("torch.optim.", "shardwise.")):
            return False
        frame = frame.f_back
    return False


def _is_of(parameter: nn.Parameter, tensor: Tensor) -> bool:
    """Whether it is the parameter or its gradient, by `.data` or detached, too."""
    here = [each for each in (parameter, parameter.grad) if each is not None and each.shape == tensor.shape]
    return any(each is tensor or (each.numel() and each.data_ptr() == tensor.data_ptr()) for each in here)


def _dims_cut(live: Any) -> set[int]:
    """Of a Shard, or of torch's private strided one."""
    sizes = zip(live.placements, live.device_mesh.shape, strict=True)
    return {place.dim for place, size in sizes if size > 1 and hasattr(place, "dim")}


def _dims_of(function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """None: along all of them."""
    at = _PLACES[function]
    dims = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else _DEFAULT.get(function)))
    return (dims,) if isinstance(dims, int) else tuple(dims) if isinstance(dims, list | tuple) and dims else None
