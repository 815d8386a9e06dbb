"""Values that a forward makes from nothing but numbers and shapes, known while it runs without data.

Positions, causal masks and the questions that code asks of them (`if (steps == 1).all():`) depend on no input and no
parameter: their values are computed beside the trace, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.model.nested import leaves, put
from shardwise.model.torch_private import with_values

FACTORIES = frozenset(("arange", "zeros", "ones", "full", "tensor", "as_tensor", "linspace", "eye"))
READS = frozenset(("item", "tolist", "__bool__", "__int__", "__float__", "__index__"))
MAX_NUMBERS = 1 << 20
"""Larger tensors are not computed: reading one of their values fails, as reading an input does."""


class Known:
    """The values of the tensors of one trace that are known."""

    def __init__(self) -> None:
        self._values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        # by identity; it keeps no tensor alive

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Say what one of the module's own holds: a count, by which its forward divides."""
        self._values[tensor] = value

    def read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What a call that looks at a value returns, in a tuple; empty where it is not known."""
        asked = bool(args) and isinstance(args[0], torch.Tensor) and getattr(func, "__name__", "") in READS
        value = self._values.get(args[0]) if asked else None
        return (func(value, *args[1:], **kwargs),) if value is not None else ()

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of a call's results, where those of all its operands are known."""
        operands = {path: leaf for path, leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        results = [leaf for _, leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        made = not operands and getattr(func, "__name__", "") in FACTORIES
        if not results or not (made or (operands and all(t in self._values for t in operands.values()))):
            return
        if sum(t.numel() for t in results) > MAX_NUMBERS:
            return
        args, kwargs = put((args, kwargs), {path: self._values[t] for path, t in operands.items()})
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        args = tuple(torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args)
        with with_values(), torch.device("cpu"):
            values = [leaf for _, leaf in leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor, value in zip(results, values, strict=True):
            self._values[tensor] = value
