"""What a hook of an optimizer computes from a rank's part of a gradient, or weight, in place of the whole.

`torch.nn.utils.clip_grad_norm_`: each rank would scale by another norm. A mean over a dim that is cut (centralized
gradients), a weight that is normalized, noise: each rank would step by what is of its part, without a word.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.train.torch_private import has_step_hooks, is_norm_of_all
from shardwise.train.whole_steps import of_whole


class Stepped(Protocol):
    """As much of an optimizer with names as is looked at."""

    torch: torch.optim.Optimizer
    params: dict[str, nn.Parameter]
    live: dict[str, nn.Parameter]
    is_of_stage: bool
    is_told: bool
    """It was said that a hook takes a number of a shard."""


@contextmanager
def watched(optimizer: Stepped) -> Iterator[None]:
    """Within it an optimizer steps: what it assigns goes into shards, and a hook's norm of a rank's part is refused.

    Cost: without hooks nothing.
    """
    norms = _Whole(optimizer) if has_step_hooks(optimizer.torch) else nullcontext()
    with of_whole(optimizer.torch, is_of_stage=optimizer.is_of_stage), norms:
        yield


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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here."""
        name = getattr(func, "__name__", "")
        if is_norm_of_all(func):
            self._check(args[0])
        elif (name in _DRAWS or name in _PLACES) and args and isinstance(args[0], Tensor) and _in_a_hook():
            self._check_mixing(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check_mixing(self, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What is drawn for a part, or taken along a dim that is cut, is refused; a sum may be one over ranks, too."""
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
        if dims is None and cut and function != "sum" and not self.optimizer.is_told:
            self.optimizer.is_told = True
            with suppress(Warning):  # `-W error` does not end a run that may be meant so
                warnings.warn(f"{said}, or a sum over ranks of what it is made of", stacklevel=4)

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
