"""What a function's code can reach by a name: where it keeps things, and what it was given."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.parallel.torch_private import put_versions


def named_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function is bound to or given, its defaults, and what its code names around it.

    That is what it closes over, or globals. Of another object that is called: itself, or what it holds; of one that
    wraps a function (`__wrapped__`): of that.
    """
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        yield from named_by(function.func)
        yield from ((str(place), value) for place, value in enumerate(function.args))
        yield from function.keywords.items()
    elif isinstance(function, nn.Module):
        yield type(function).__name__, function
    elif inspect.ismethod(function):
        yield type(function.__self__).__name__, function.__self__
        yield from _fields(function.__self__)
    elif isinstance(function, FunctionType):
        code, around = function.__code__, function.__globals__
        yield from ((name, around[name]) for name in code.co_names if name in around)
        yield from zip(code.co_varnames[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False)
        yield from (function.__kwdefaults__ or {}).items()
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing was assigned to it yet
                yield name, cell.cell_contents
    else:
        yield from _fields(function)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, nn.Module):  # of which the parameters are known
        yield from getattr(value, "__dict__", {}).items()


@contextmanager
def collections_kept(functions: Iterable[Callable[..., Any]]) -> Iterator[list[Any]]:
    """What the functions put into lists, dicts and the like while it lasts is taken out again; gives those, then."""
    found = {id(held): held for function in functions for held in _collections_of(function)}
    before, changed = [(held, copy.copy(held)) for held in found.values()], list[Any]()
    try:
        yield changed
    finally:
        for held, kept in before:
            if _ids(held) != _ids(kept):
                changed.append(held)
                held.clear()
                (held.extend if isinstance(held, list | deque) else held.update)(kept)


@contextmanager
def values_kept(function: Callable[..., Any]) -> Iterator[None]:
    """What the function assigns while it lasts is undone: to names around it, and to attributes of objects it names."""
    inner: Any = inspect.unwrap(function)
    around, names = getattr(inner, "__globals__", {}), getattr(getattr(inner, "__code__", None), "co_names", ())
    before = {name: around[name] for name in names if name in around}
    cells = [(cell, cell.cell_contents) for cell in getattr(inner, "__closure__", None) or () if not _is_empty(cell)]
    passed_by = type | ModuleType | FunctionType | nn.Module
    held = [
        vars(value)
        for _, value in named_by(function)
        if hasattr(value, "__dict__") and not isinstance(value, passed_by)
    ]
    if not isinstance(inner, passed_by) and hasattr(inner, "__dict__"):  # an object that is called
        held.append(vars(inner))
    fields = [(now, dict(now)) for now in held]
    try:
        yield
    finally:
        around.update(before)
        for cell, value in cells:
            cell.cell_contents = value
        for now, kept in fields:  # not cleared: another thread may look
            now.update({key: value for key, value in kept.items() if now.get(key) is not value})
            for key in now.keys() - kept.keys():
                del now[key]


@contextmanager
def written_kept(functions: Iterable[Callable[..., Any]], most: int) -> Iterator[bool]:
    """What the functions write into tensors and arrays that they name while it lasts is undone.

    Those in what they name, too: attributes and items, three deep; not parameters, nor buffers of modules. With it
    torch's counts of writes, for a graph from before may have saved such a tensor for its backward pass.

    Args:
        functions: whose names are followed.
        most: numbers to copy; where there are more nothing is copied, and False is given.

    Cost: a copy of each, and a comparison of its bits, as a write through `.data` is in no count.
    """
    found = list(_arrays([value for function in functions for _, value in named_by(function)]))
    if sum(int(each.size if isinstance(each, np.ndarray) else each.numel()) for each in found) > most:
        yield False
        return
    before: list[tuple[Any, Any]] = [
        (each, each.copy() if isinstance(each, np.ndarray) else each.detach().clone()) for each in found
    ]
    versions = [(each, each._version) for each in found if isinstance(each, torch.Tensor)]
    try:
        yield True
    finally:
        written = {id(each) for each, version in versions if each._version != version}
        for now, kept in before:
            if isinstance(now, np.ndarray):
                np.copyto(now, kept)
            elif id(now) in written or not _is_same(now, kept):  # else not: one of a file may refuse to be written
                now.detach().copy_(kept)
        put_versions(versions)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same bits; of other layouts than torch's usual one nobody looks."""
    if one.layout is not torch.strided or one.is_quantized:
        return True
    bits = [each.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*bits)


def _arrays(values: list[Any], depth: int = 3) -> Iterator[Any]:
    """Tensors and arrays among values and in them, each once."""
    seen = set[int]()
    for _ in range(depth + 1):
        inner: list[Any] = []
        for value in values:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if type(value) is torch.Tensor and not value.is_meta and not value.is_inference():
                    yield value
            elif isinstance(value, np.ndarray):
                if value.flags.writeable and value.dtype != object:
                    yield value
            elif isinstance(value, dict | list | tuple | deque):
                inner += (value.values() if isinstance(value, dict) else value) if len(value) <= _MANY else ()
            elif isinstance(value, nn.Module):
                inner += [v for m in value.modules() for key, v in vars(m).items() if not key.startswith("_")]
            elif not isinstance(value, type | ModuleType | FunctionType) and _is_of_user(type(value)):
                inner += getattr(value, "__dict__", {}).values()
        values = inner


_MANY = 4096
"""Items of a collection that are looked through for what may be written."""


def _is_of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "shardwise")


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:  # nothing was assigned to it yet
        return True


def _ids(held: Any) -> Any:
    if isinstance(held, dict):
        return {key: id(value) for key, value in held.items()}
    return {*held} if isinstance(held, set) else [*map(id, held)]


def _collections_of(function: Any) -> Iterator[Any]:
    """Those that it names, and those of the objects that it names (`self.features`)."""
    for _, value in named_by(function):
        is_plain = not isinstance(value, type | ModuleType | FunctionType)
        held_by = getattr(value, "__dict__", {}) if is_plain else {}
        skipped = "_" if isinstance(value, nn.Module) else "__"  # torch's own, of a module
        inner = [held for key, held in held_by.items() if not key.startswith(skipped)]
        yield from (held for held in (value, *inner) if isinstance(held, list | dict | set | deque))
