"""What an optimizer keeps of one parameter: lists, tuples and dicts of it by names, and back.

`{"history": [a, (b, 2)]}` is `history.0`, `history.1.0` and `history.1.1`: where each lies in its list is in its name,
and what holds it is what a step of the same optimizer makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Replicate, Shard

Kind = tuple[tuple[int, ...], str]
"""Shape of a whole tensor, and torch's name of its type."""
NUMBERS = {"int64": int, "float64": float}
"""Types of tensors without dims that stand for a number of Python's."""
NUMBER = "number"
_EMPTY: Mapping[str, Any] = {"list": [], "tuple": (), "dict": {}}


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


def forms(state: Mapping[str, Any]) -> dict[str, str]:
    """What is no tensor, by name: a number, or a list, tuple or dict.

    >>> forms({"n": 3, "history": [torch.ones(2), (2,)]})
    {'n': 'number', 'history': 'list', 'history.1': 'tuple', 'history.1.0': 'number'}
    """
    found: dict[str, str] = {}
    for key, value in state.items():
        _add_forms(found, str(key), value)
    return found


def _add_forms(found: dict[str, str], name: str, value: Any) -> None:
    if (items := _items(value)) is not None:
        found[name] = type(value).__name__
        for key, item in items:
            _add_forms(found, f"{name}.{key}", item)
    elif isinstance(value, int | float):
        found[name] = NUMBER


def same_forms(each: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The `forms` of several states, where none contradicts another."""
    found: dict[str, str] = {}
    for one in each:
        found |= {name: form if found.get(name, form) == form else "" for name, form in one.items()}
    return {name: form for name, form in sorted(found.items()) if form}


def filled(
    frame: Mapping[str, Any], found: Mapping[str, Any], known: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The inverse of `leaves`: a `frame` with what has a name in it, and what came since behind it.

    Args:
        frame: of the state as a first step leaves it.
        found: values by name.
        known: the `forms` of what came since.

    Raises:
        KeyError: a value lies in something of which nobody knows what it is.

    >>> filled({"n": None, "history": [None], "last": None}, {"n": 3, "history.0": 1.5, "history.1": 2.5})
    {'n': 3, 'history': [1.5, 2.5], 'last': None}
    """
    known, inner = known or {}, dict[str, dict[str, Any]]()
    opened = {key for key, like in frame.items() if like is not None} | {key for key in known if known[key] in _EMPTY}
    for name, value in found.items():
        # the outermost that holds it; a key of the state's own may have dots
        top = min((key for key in opened if name.startswith(f"{key}.")), key=len, default=name)
        inner.setdefault(top, {})[name.removeprefix(top).removeprefix(".")] = value
    return {key: _filled(key, frame.get(key), inner.get(key, {}), known) for key in dict.fromkeys((*frame, *inner))}


def _filled(path: str, like: Any, found: Mapping[str, Any], known: Mapping[str, str]) -> Any:
    if like is None and found.keys() <= {""}:
        return found.get("")
    like = _EMPTY[known[path]] if like is None else like
    inner: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        head, _, rest = name.partition(".")
        inner.setdefault(head, {})[rest] = value
    if type(like) is dict:
        keys = dict.fromkeys((*like, *inner))
        return {key: _filled(f"{path}.{key}", like.get(key), inner.get(key, {}), known) for key in keys}
    count = max(len(like), 1 + max(map(int, inner), default=-1))
    items = [(like[i] if i < len(like) else None, inner.get(str(i), {})) for i in range(count)]
    return type(like)(_filled(f"{path}.{i}", *item, known) for i, item in enumerate(items))


def empty_beside(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the state of a parameter, of any shape; values unspecified.

    A sum or mean over dims of a sharded parameter is cut where that is; anything else is whole on each rank.
    """
    sizes = list(zip(shape, parameter.shape, strict=False))
    if not isinstance(parameter, DTensor) or len(shape) > parameter.dim() or any(n not in (1, of) for n, of in sizes):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    plain = all(type(place) in (Shard, Replicate) for place in parameter.placements)
    cut = [
        place
        if plain and isinstance(place, Shard) and shape[place.dim : place.dim + 1] == parameter.shape[place.dim :][:1]
        else Replicate()
        for place in parameter.placements
    ]
    return dtensor.empty(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=cut)
