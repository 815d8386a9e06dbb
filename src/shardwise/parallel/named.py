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

from torch import nn


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
