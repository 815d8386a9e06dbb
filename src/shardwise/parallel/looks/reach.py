"""`Reach`: the Python objects that a call can change, as far as names lead to them, and how they are put back.

A counter, a list of what was seen, a meter in an object in a dict, a generator of random numbers. What nobody can copy
(an iterator, a cache of results, an open file, an object of somebody's C code) is `opaque`.
"""

from __future__ import annotations

import io
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

LIBRARIES = frozenset(("torch", "numpy", "scipy", "transformers", "shardwise", "builtins", *sys.stdlib_module_names))
"""Whose code keeps nothing for the next call that its caller does not hold, but for effects: see `effects.py`."""
_MANY_OBJECTS = 20_000
"""So many are looked at; more take longer than the call that is looked at."""
_MANY_NUMBERS = 2**26
"""Of arrays, to copy."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), range, slice, types.BuiltinFunctionType, Enum, np.generic,
          np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, property, types.CodeType)  # fmt: skip
_COLLECTIONS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_BY_OTHERS = ("queue", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess")
"""Homes of objects that other threads and processes read."""
_NOTHING = object()
"""In the place of a name that was not there."""


class Reach:
    """What some objects lead to; found once, and kept as often as it is asked for.

    Cost: some microseconds per object.
    """

    def __init__(self, *roots: Any) -> None:
        """Follow the names."""
        self.opaque = ""
        """What cannot be put back; empty: nothing is known of that kind."""
        self.codes: set[types.CodeType] = set()
        """Of functions that are reached, with those inside of them."""
        self._places: list[Callable[[], Callable[[], None]]] = []
        """Each makes a copy, and gives what puts it back."""
        self._numbers = 0
        self._namespaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        seen: dict[int, Any] = {}
        found = [*roots]
        while found and len(seen) <= _MANY_OBJECTS:
            value = found.pop()
            if id(value) in seen or isinstance(value, _PLAIN) or value is Ellipsis:
                continue
            seen[id(value)] = value
            if len(seen) > _MANY_OBJECTS:
                self.opaque = f"more than {_MANY_OBJECTS} objects"
            found += self._follow(value)
        self._places += [partial(_names_kept, *each) for each in self._namespaces.values()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is changed while it lasts is undone."""
        put_back = [place() for place in self._places]
        try:
            yield
        finally:
            for put in put_back:
                put()

    def _follow(self, value: Any) -> Iterable[Any]:
        """What it leads to; how it is kept is noted."""
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | frozenset):
            return value
        if isinstance(value, weakref.ref):
            return (value(),)
        if isinstance(value, types.ModuleType):  # of which a function's names are followed
            return ()
        if isinstance(value, _COLLECTIONS):
            return self._of_collection(value)
        return self._of_numbers(value) if isinstance(value, _HELD) else self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Iterable[Any]:
        found: list[Any] = [vars(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            self._places.append(partial(_cell_kept, cell))
            found += [] if (value := _content(cell)) is _NOTHING else [value]
        if _home(function) in LIBRARIES:
            return found
        self.codes |= (codes := set(_codes(function.__code__)))
        names = {name for code in codes for name in code.co_names}
        return found + self._named(function.__globals__, names)

    def _named(self, around: dict[str, Any], names: set[str]) -> list[Any]:
        """The values of names in a module, and of those in the script's modules that these are."""
        found, modules, seen = list[Any](), [around], {id(around)}
        imported = [sys.modules[name] for name in names if name not in around and name in sys.modules]
        modules += [vars(module) for module in imported if module.__name__.partition(".")[0] not in LIBRARIES]
        for module in modules:  # which grows
            self._namespaces.setdefault(id(module), (module, set()))[1].update(names)
            for value in (module[name] for name in names if name in module):
                if not isinstance(value, types.ModuleType):
                    found.append(value)
                elif value.__name__.partition(".")[0] not in LIBRARIES and id(vars(value)) not in seen:
                    seen.add(id(vars(value)))
                    modules.append(vars(value))
        return found

    def _of_class(self, kind: type) -> Iterable[Any]:
        if _home(kind) in LIBRARIES or not _is_by_python(kind):
            return ()
        self._places.append(partial(_class_kept, kind))
        functions = [each for value in vars(kind).values() for each in _accessors(value)]
        return [*functions, *kind.__bases__]

    def _of_tensor(self, tensor: torch.Tensor) -> Iterable[Any]:
        """Its values are kept where they are written, see `writes.py`."""
        if tensor.is_leaf and not tensor.is_inference():
            self._places.append(partial(_leaf_kept, tensor))
        return (vars(tensor),) if getattr(tensor, "__dict__", None) else ()

    def _of_collection(self, held: Any) -> Iterable[Any]:
        self._places.append(partial(_collection_kept, held))
        items = [*dict.keys(held), *dict.values(held)] if isinstance(held, dict) else [*held]
        attributes = () if type(held) in _COLLECTIONS else (*self._attributes(held), type(held))
        return [*(item for item in items if not isinstance(item, _PLAIN)), *attributes]

    def _of_numbers(self, value: Any) -> Iterable[Any]:
        if isinstance(value, np.ndarray):
            self._numbers += value.size
            if value.dtype == object or self._numbers > _MANY_NUMBERS:
                self.opaque = "an array of objects, or of many numbers"
                return ()
        if not isinstance(value, np.ndarray) or value.flags.writeable:
            self._places.append(partial(_numbers_kept, value))
        return ()

    def _of_object(self, value: Any) -> Iterable[Any]:
        kind, home = type(value), _home(type(value))
        if isinstance(value, io.IOBase) and (value.closed or not value.readable()):
            return ()
        if home in _BY_OTHERS or isinstance(value, io.IOBase | threading.Thread | threading.Event):
            self.opaque = f"a {kind.__name__}, which others read"
            return ()
        if home in ("torch", "shardwise", "logging", "_thread") and not isinstance(
            value, nn.Module | threading.local | torch.Generator
        ):
            is_iterator = hasattr(kind, "__next__")
            self.opaque = f"a {kind.__name__}, which goes on" if is_iterator else self.opaque
            return ()
        if isinstance(value, partial):
            return (value.func, value.args, value.keywords, vars(value))
        of_c = next((each for each in kind.__mro__ if not _is_by_python(each) and each not in _KNOWN), None)
        if of_c is not None:
            if not (of_c in _HARMLESS or _home(of_c) in _HARMLESS_HOMES):
                self.opaque = f"a {kind.__name__}"
            return ()
        if not isinstance(value, nn.Module):
            return [*self._attributes(value), kind]
        self._places.append(partial(_collection_kept, vars(value)))
        return [*(each for key, each in vars(value).items() if not _is_of_torch(key, each) or each), kind]

    def _attributes(self, value: Any) -> Iterable[Any]:
        """Of an object; those of slots too."""
        found: list[Any] = []
        if isinstance(names := getattr(value, "__dict__", None), dict):
            found.append(names)
        for kind in type(value).__mro__:
            slots = [slot for slot in vars(kind).values() if isinstance(slot, types.MemberDescriptorType)]
            if slots and _is_by_python(kind):
                self._places.append(partial(_slots_kept, value, slots))
                found += [content for slot in slots if (content := _slot(slot, value)) is not _NOTHING]
        return found


@contextmanager
def unseen(*reaches: Any) -> Iterator[None]:
    """A run without values, of shapes alone: nothing of what it counts, collects or prints stays, as far as told."""
    with Reach(*reaches).kept(), redirect_stdout(io.StringIO()):
        yield


_MADE_LATER = 1 << 9
"""CPython's flag of classes that are made while it runs, `Py_TPFLAGS_HEAPTYPE`: some of C, and all of Python."""
_OF_C = types.MethodDescriptorType | types.WrapperDescriptorType


def _is_by_python(kind: type) -> bool:
    """Whether a `class` statement, or a call of `type`, has made it: C code has methods of its own kinds."""
    own = (value for value in vars(kind).values() if isinstance(value, _OF_C) and value.__objclass__ is kind)
    is_class = type(kind) in (type, kind) or _is_by_python(type(kind))  # some sentinels are their own class
    return is_class and bool(kind.__flags__ & _MADE_LATER) and next(own, None) is None


_HELD = (
    ContextVar,
    np.ndarray,
    bytearray,
    array,
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)
_KNOWN = (object, threading.local, types.SimpleNamespace, nn.Module)
_HARMLESS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
             types.MemberDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType,
             types.GenericAlias, types.UnionType, types.MappingProxyType, np.ufunc)  # fmt: skip
_HARMLESS_HOMES = ("re", "datetime", "decimal", "operator", "typing", "zoneinfo", "uuid")


def _is_of_torch(key: str, value: Any) -> bool:
    """Of what a module is made: most of its dicts are empty."""
    return key.startswith("_") and isinstance(value, dict)


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "builtins").partition(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _accessors(value: Any) -> Iterable[Any]:
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset, value.fdel) if each is not None]
    is_named = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
    return () if is_named else (value,)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to it yet
        return _NOTHING


def _slot(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _NOTHING


def _cell_kept(cell: types.CellType) -> Callable[[], None]:
    before = _content(cell)

    def put_back() -> None:
        if _content(cell) is not before and before is not _NOTHING:
            cell.cell_contents = before

    return put_back


def _names_kept(around: dict[str, Any], names: set[str]) -> Callable[[], None]:
    before = {name: around.get(name, _NOTHING) for name in names}

    def put_back() -> None:
        for name, value in before.items():
            if value is _NOTHING:
                around.pop(name, None)
            elif around.get(name, _NOTHING) is not value:
                around[name] = value

    return put_back


def _class_kept(kind: type) -> Callable[[], None]:
    before = dict(vars(kind))

    def put_back() -> None:
        now = dict(vars(kind))
        for name in (name for name in now if name not in before):
            type.__delattr__(kind, name)
        for name in (name for name, value in before.items() if now.get(name, _NOTHING) is not value):
            type.__setattr__(kind, name, before[name])

    return put_back


def _leaf_kept(tensor: torch.Tensor) -> Callable[[], None]:
    gradient, requires = tensor.grad, tensor.requires_grad

    def put_back() -> None:
        if tensor.grad is not gradient:
            tensor.grad = gradient
        if tensor.requires_grad != requires and tensor.is_leaf:
            tensor.requires_grad_(requires)

    return put_back


def _collection_kept(held: Any) -> Callable[[], None]:
    kind: Any = dict if type(held) is dict else next(kind for kind in _COLLECTIONS if isinstance(held, kind))
    is_dict = issubclass(kind, dict)
    before = [*(dict.items(held) if is_dict else kind.__iter__(held))]

    def put_back() -> None:
        now = [*(dict.items(held) if is_dict else kind.__iter__(held))]
        is_same = len(now) == len(before) and all(
            a is b or (is_dict and a[0] is b[0] and a[1] is b[1]) for a, b in zip(now, before, strict=True)
        )
        if is_same:
            return
        kind.clear(held)
        if is_dict:
            for key, value in before:
                kind.__setitem__(held, key, value)
        else:
            (kind.update if kind is set else kind.extend)(held, before)

    return put_back


def _slots_kept(value: Any, slots: list[types.MemberDescriptorType]) -> Callable[[], None]:
    before = [_slot(slot, value) for slot in slots]

    def put_back() -> None:
        for slot, kept in zip(slots, before, strict=True):
            if _slot(slot, value) is not kept:
                slot.__delete__(value) if kept is _NOTHING else slot.__set__(value, kept)

    return put_back


def _numbers_kept(value: Any) -> Callable[[], None]:
    if isinstance(value, np.ndarray):
        copy = value.copy()
        return lambda: None if np.array_equal(value, copy) else np.copyto(value, copy)
    if isinstance(value, ContextVar):
        content = value.get(_NOTHING)
        return lambda: None if content in (_NOTHING, value.get(_NOTHING)) else _drop(value.set(content))
    if isinstance(value, bytearray | array):
        items: Any = value[:]
        return lambda: None if value == items else value.__setitem__(slice(None), items)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    state = value.get_state()
    return lambda: _drop(value.set_state(state))


def _drop(_: object) -> None:
    return None
