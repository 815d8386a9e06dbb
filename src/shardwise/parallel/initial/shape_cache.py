"""`ShapeCache`: what torch's functions return on the meta device, remembered for one trace.

The blocks of a model make the same calls on the same shapes, and torch computes many shapes in Python (a layer norm
takes a millisecond): the second block and all later ones take the answers of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """A call whose answer may depend on more than its key can say."""


class ShapeCache:
    """Results of calls on meta tensors, by function, shapes, strides, types and plain arguments.

    A remembered result is a new tensor of the same shape, stride and type: no view of an operand, which only matters
    to who follows storages. Where gradients are on, nothing is remembered.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], may_keep: Callable[[], bool]
    ) -> Any:
        """What a call returns.

        Args:
            func: a function of torch.
            args: its positional arguments; tensors on meta.
            kwargs: its named arguments.
            may_keep: asked after a call that was made: whether it had no effect that must happen each time.

        Cost: of a remembered call a look-up by its shapes.
        """
        is_state = getattr(func, "__name__", "") == "__get__"  # `x.grad`, `x.data`: what the tensor is now
        if is_state or torch.is_grad_enabled():  # a forward that differentiates needs the graph of its calls
            return func(*args, **kwargs)
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key(kwargs))
            found = self._known.get(key)
        except (_Unknown, TypeError):  # no plain argument, or a function that cannot be hashed
            return func(*args, **kwargs)
        if found is not None:
            return _made(found)
        result = func(*args, **kwargs)
        form = _form(result, args, kwargs)
        if form is not None and may_keep():
            self._known[key] = form
        return result


def _key(value: Any) -> Any:
    if type(value) in (torch.Tensor, nn.Parameter):
        if not value.is_meta or value.layout is not torch.strided:
            raise _Unknown
        return (torch.Tensor, value.shape, value.stride(), value.dtype)
    if value is None or value is Ellipsis or type(value) in _PLAIN:
        return (type(value), value)  # 1, 1.0 and True are equal and mean different things
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    if type(value) is slice:
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    if type(value) is dict:
        return tuple((name, _key(item)) for name, item in value.items())
    raise _Unknown


def _form(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Shape, stride and type of a result, or of a tuple of such; None: it is more than that, or one of the operands."""
    if type(result) in (tuple, list):
        forms = [_form(part, args, kwargs) for part in result]
        return (type(result), forms) if forms and None not in forms else None
    if type(result) is not torch.Tensor or not result.is_meta or result.layout is not torch.strided:
        return None
    if result.is_quantized:
        return None
    if any(result is value for value in (*args, *kwargs.values())):  # in place: it may have changed its shape
        return None
    return (torch.Tensor, (tuple(result.shape), result.stride(), result.dtype))


def _made(form: Any) -> Any:
    kind, value = form
    if kind is torch.Tensor:
        shape, stride, dtype = value
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return kind(map(_made, value))
