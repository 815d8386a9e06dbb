"""A reader of pickles that runs nothing: opcodes become plain values and records, and no name is ever imported.

A pickle is a program for a stack machine (PEP 307, PEP 3154). This one has lists, dicts, texts and numbers; where a
pickle asks for a class or a function it gets a `Name`, and where it asks for a call the table of `allowed.py` makes a
record of it, or refuses it by name. Only the standard library: it runs in the reader's process, see `child.py`.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

MAX_STACK = 50_000_000


class RefusedError(Exception):
    """What is wrong with a file, what is needed, and what to do: texts of one line."""

    def __init__(self, found: str, needed: str, fix: str) -> None:
        super().__init__(found)
        self.found, self.needed, self.fix = found, needed, fix


class Name(NamedTuple):
    """A global that a pickle mentions: a text, never the thing."""

    module: str
    name: str

    def __str__(self) -> str:
        """`torch._utils._rebuild_tensor_v2`."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An instance of a class that is known to be data: what it was made from, its state, its items."""

    name: Name
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Storage:
    """A flat buffer outside the pickle, by its key; bytes are found by whoever knows the file."""

    key: str
    dtype: str
    """torch's name; `untyped`: bytes."""
    numel: int
    device: str = ""
    """That it was on, as `cuda:1`."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A strided view of a storage, in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


Calls = Mapping[Name, Callable[[Name, tuple[Any, ...]], Any]]


def run(stream: BinaryIO, calls: Calls, load: Callable[[Any], Any]) -> Any:
    """The value of one pickle; the stream is left behind its end.

    Args:
        stream: at the first byte.
        calls: what a call of each allowed global gives.
        load: gives the value of a persistent id.

    Raises:
        RefusedError: a global that is not allowed, an opcode that is not known or not possible here, or a torn pickle.
    """
    machine = Machine(calls, load)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of escapes in what is no text
            for opcode, argument, _ in pickletools.genops(stream):
                if machine.does(opcode.name, argument):
                    return machine.stack[0]
    except RefusedError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _torn(f"{type(error).__name__}: {str(error)[:160]}") from None
    raise _torn("it has no end")


class Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, calls: Calls, load: Callable[[Any], Any]) -> None:
        """An empty stack."""
        self.calls, self.load = calls, load
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def does(self, opcode: str, argument: Any) -> bool:
        """Do one opcode; whether it was the last one."""
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _METHODS:
            _METHODS[opcode](self, argument)
        elif opcode == "STOP":
            if len(self.stack) != 1:
                raise _torn(f"{len(self.stack)} values at its end, needed one")
            return True
        elif opcode not in ("PROTO", "FRAME"):
            raise RefusedError(
                f"a pickle with the opcode {opcode}", "one that holds data only", "save the file again with torch.save"
            )
        if len(self.stack) > MAX_STACK:
            raise _torn(f"more than {MAX_STACK} values on its stack")
        return False

    def mark(self, _: Any) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Take what was pushed since the last mark."""
        at = self._marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def drop_to_mark(self, _: Any) -> None:
        """POP_MARK."""
        self.since_mark()

    def put(self, argument: Any) -> None:
        """Remember the top under a number; MEMOIZE counts by itself."""
        self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]

    def get(self, argument: Any) -> None:
        """Push what was remembered."""
        self.stack.append(self._memo[argument])

    def pop(self, _: Any) -> None:
        """Drop the top, or a mark on it."""
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()

    def take(self, count: int) -> tuple[Any, ...]:
        """The topmost values, removed."""
        if len(self.stack) < count:
            raise IndexError("too few values on its stack")
        at = len(self.stack) - count
        values = tuple(self.stack[at:])
        del self.stack[at:]
        return values

    def name(self, argument: Any) -> None:
        """GLOBAL: "module name"."""
        module, _, name = str(argument).partition(" ")
        self.stack.append(self._known(module, name))

    def stacked_name(self, _: Any) -> None:
        """STACK_GLOBAL."""
        module, name = self.take(2)
        self.stack.append(self._known(module, name))

    def _known(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _torn("a global whose name is no text")
        found = Name(_ALIASES.get(module, module), name)
        is_tensors = found.module.startswith("torch") and (name.endswith("Storage") or name in _TENSORS)
        if found not in self.calls and is_tensors:
            raise RefusedError(
                f"a tensor of a kind that is not read ({str(found)[:160]})",
                "dense numbers of a type that Shardwise stores",
                "save it in another type, or without it",
            )
        if found not in self.calls and found.module.startswith("torch") and name in _WRAPPERS:
            raise RefusedError(
                f"a tensor that is made of others ({str(found)[:160]}): one rank's part of it (DTensor), or quantized",
                "whole tensors of dense numbers",
                "save whole ones (`t.full_tensor()`), or the parts of all ranks with torch.distributed.checkpoint",
            )
        if found not in self.calls:
            raise RefusedError(
                f"a pickle that asks for {str(found)[:160]}",
                "tensors, numbers, texts and containers: nothing else is allowed",
                "save only the state_dict; or, if you trust who wrote the file, --unsafe-pickle, which runs its code",
            )
        return found

    def call(self, _: Any) -> None:
        """REDUCE and NEWOBJ: what the table makes of it."""
        callee, args = self.take(2)
        self._call(callee, args)

    def call_with_keywords(self, _: Any) -> None:
        """NEWOBJ_EX."""
        callee, args, keywords = self.take(3)
        self._call(callee, (*args, keywords) if keywords else args)

    def _call(self, callee: Any, args: Any) -> None:
        if not isinstance(callee, Name) or not isinstance(args, tuple):
            raise _torn(f"a call of a {type(callee).__name__} with a {type(args).__name__}")
        self.stack.append(self.calls[callee](callee, args))

    def build(self, _: Any) -> None:
        """BUILD: the state of a record; what hangs on a dict or tensor is not needed."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def append(self, values: list[Any]) -> None:
        """APPEND, APPENDS, ADDITEMS."""
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(map(key_of, values))
        else:
            (target.items if isinstance(target, Record) else _of(target, list)).extend(values)

    def set(self, values: list[Any]) -> None:
        """SETITEM, SETITEMS."""
        target = self.stack[-1]
        pairs = _pairs(values)
        if isinstance(target, Record):
            target.items.extend(pairs)
        else:
            _of(target, dict).update((key_of(key), value) for key, value in pairs)

    def persistent(self, _: Any) -> None:
        """BINPERSID."""
        self.stack.append(self.load(self.stack.pop()))


def _torn(what: str) -> RefusedError:
    return RefusedError(f"a torn or malformed pickle ({what})", "a whole one", "copy the file again")


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"items for a {type(value).__name__}")
    return value


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return list(zip(values[::2], values[1::2], strict=True))


def key_of(key: Any) -> Any:
    """A key of a dict or set: a scalar, a flat tuple of scalars, or a record; nothing whose hash goes deep.

    >>> key_of(("optimizer", 0))
    ('optimizer', 0)
    """
    if isinstance(key, tuple) and not isinstance(key, Name):
        if not all(isinstance(item, _SCALARS) for item in key):
            raise TypeError("a key that is a nested tuple")
        return key
    if not isinstance(key, (*_SCALARS, Name, Record)):
        raise TypeError(f"a key that is a {type(key).__name__}")
    return key


_SCALARS = (str, bytes, int, float, bool, type(None))
_TENSORS = ("_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_nested_tensor", "per_tensor_affine", "sparse_coo")
"""What torch makes of tensors that are not dense numbers."""
_WRAPPERS = ("_rebuild_wrapper_subclass", "DTensor", "ShardedTensor")
"""What torch makes of tensors that hold others."""
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_METHODS: dict[str, Callable[[Machine, Any], None]] = {
    "MARK": Machine.mark,
    "POP": Machine.pop,
    "POP_MARK": Machine.drop_to_mark,
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.get),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_SET": lambda m, _: m.stack.append(set()),
    "LIST": lambda m, _: m.stack.append(m.since_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.stack.append(m.take(1)),
    "TUPLE2": lambda m, _: m.stack.append(m.take(2)),
    "TUPLE3": lambda m, _: m.stack.append(m.take(3)),
    "FROZENSET": lambda m, _: m.stack.append({key_of(value) for value in m.since_mark()}),
    "DICT": lambda m, _: m.stack.append({key_of(key): value for key, value in _pairs(m.since_mark())}),
    "APPEND": lambda m, _: m.append([m.stack.pop()]),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "ADDITEMS": lambda m, _: m.append(m.since_mark()),
    "SETITEM": lambda m, _: m.set(list(m.take(2))),
    "SETITEMS": lambda m, _: m.set(m.since_mark()),
    "GLOBAL": Machine.name,
    "STACK_GLOBAL": Machine.stacked_name,
    "REDUCE": Machine.call,
    "NEWOBJ": Machine.call,
    "NEWOBJ_EX": Machine.call_with_keywords,
    "BUILD": Machine.build,
    "BINPERSID": Machine.persistent,
}
