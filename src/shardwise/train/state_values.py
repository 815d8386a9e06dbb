"""What an optimizer keeps of one parameter: lists, tuples and dicts of it by names, and back.

`{"history": [a, (b, 2)]}` is `history.0`, `history.1.0` and `history.1.1`: where each lies in its list is in its name,
and what holds it is what a step of the same optimizer makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Kind = tuple[tuple[int, ...], str]
"""Shape of a whole tensor, and torch's name of its type."""
NUMBERS = {"int64": int, "float64": float}
"""Types of tensors without dims that stand for a number of Python's."""


def leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """What lies in lists, tuples and dicts of texts, and everything else as it is, by name.

    >>> leaves({"n": 3, "history": [1.5, {"a": 2}], "last": None})
    {'n': 3, 'history.0': 1.5, 'history.1.a': 2, 'last': None}
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        for name, leaf in _within(str(key), value):
            # of two at one name neither can be stored: this is no tensor and no number
            found[name] = leaf if name not in found else [found[name], leaf]
    return found


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = _items(value)
    if items is None:
        yield name, value
    else:
        for key, item in items:
            yield from _within(f"{name}.{key}", item)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Of what is opened; None: it is a leaf."""
    if type(value) in (list, tuple):
        return list(enumerate(value))
    if type(value) is dict and all(type(key) is str and "." not in key for key in value):
        return list(value.items())
    return None


def frame(state: Mapping[str, Any]) -> dict[str, Any]:
    """The lists, tuples and dicts alone, with None in place of each leaf.

    >>> frame({"n": 3, "history": [1.5, {"a": 2}]})
    {'n': None, 'history': [None, {'a': None}]}
    """
    return {key: _frame(value) for key, value in state.items()}


def _frame(value: Any) -> Any:
    if (items := _items(value)) is None:
        return None
    return frame(value) if type(value) is dict else type(value)(_frame(item) for _, item in items)


def filled(like: Any, found: Mapping[str, Any]) -> Any:
    """The inverse of `leaves`: a `frame` with what has a name in it, and what came since behind it.

    >>> filled({"n": None, "history": [None], "last": None}, {"n": 3, "history.0": 1.5, "history.1": 2.5})
    {'n': 3, 'history': [1.5, 2.5], 'last': None}
    """
    if like is None:
        return found.get("")
    inner: dict[str, dict[str, Any]] = {}
    known = {str(key) for key in like} if type(like) is dict else set()
    for name, value in found.items():
        head, _, rest = name.partition(".")
        if type(like) is dict and head not in known:  # a key of the optimizer's own may hold dots
            head, rest = next((key for key in known if name == key or name.startswith(f"{key}.")), name), ""
            rest = name.removeprefix(head).removeprefix(".")
        inner.setdefault(head, {})[rest] = value
    if type(like) is dict:
        return {key: filled(like.get(key), inner.get(key, {})) for key in (*like, *inner.keys() - known)}
    count = max(len(like), 1 + max(map(int, inner), default=-1))
    return type(like)(filled(like[i] if i < len(like) else None, inner.get(str(i), {})) for i in range(count))


def empty_beside(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the state of a parameter, of any shape; values unspecified.

    A sum or mean over dims of a sharded parameter is cut where that is; anything else is whole on each rank.
    """
    is_beside = len(shape) <= parameter.dim() and all(
        n in (1, of) for n, of in zip(shape, parameter.shape, strict=False)
    )
    if not isinstance(parameter, DTensor) or not is_beside:
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    plain = all(type(place) in (Shard, Replicate) for place in parameter.placements)
    cut = [
        place
        if plain and isinstance(place, Shard) and shape[place.dim : place.dim + 1] == parameter.shape[place.dim :][:1]
        else Replicate()
        for place in parameter.placements
    ]
    return dtensor.empty(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=cut)
