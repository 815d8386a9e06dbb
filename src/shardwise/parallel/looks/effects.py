"""What a call does that nobody can undo: told while it runs, by the functions that it calls, before they are entered.

A line that is printed, a file, a record that is logged, another process or rank, an optimizer's step, a gradient that
is added. And code that no name leads to, of which nobody knows what it changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from shardwise.parallel.looks.reach import LIBRARIES

SECONDS = 20.0
"""A look goes on for so long; others wait for the rank that looks."""


class LeftError(BaseException):
    """A call that was made for a look has been left, before it did what cannot be undone. No `except` is to meet it."""


_FOREIGN = (
    "torch.distributed", "torch._dynamo", "torch.optim", "torch.serialization", "torch.utils.data", "logging", "queue",
    "threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket", "tempfile", "shutil", "signal",
    "torch.utils.tensorboard", "pickle",
)  # fmt: skip
"""Modules whose functions meet others, or leave something."""
_FOREIGN_NAMES = {"backward": ("torch.autograd",), "zero_grad": ("torch.nn.modules.module",)}
_FOREIGN_BUILTINS = frozenset(("print", "open", "input", "exec", "breakpoint", "__import__"))
_FOREIGN_HOMES = frozenset(("_io", "posix", "nt", "_socket", "_posixsubprocess", "_pickle", "_csv", "mmap", "select",
                            "_multiprocessing", "_queue", "_sqlite3", "sqlite3", "_asyncio"))  # fmt: skip
_HARMLESS = frozenset(("stat", "lstat", "fspath", "getpid", "getcwd", "urandom"))
_FOREIGN_METHODS = frozenset(("tofile", "dump", "start_new_thread"))
_OF_LIBRARIES = LIBRARIES | {"_C", "pybind11_builtins", "_cython_3_0_0"}


class Effects:
    """Looks at each function that is called; `found` says the first that cannot be undone."""

    def __init__(self, codes: Container[CodeType] | None = None, *, until: float | None = None) -> None:
        """Make one.

        Args:
            codes: that names lead to; None: any code is known.
            until: when it has taken too long, by `time.monotonic`.
        """
        self.codes, self.until, self.found = codes, until, ""
        self.gives: Callable[[Any], None] | None = None
        """Called with a tensor whose memory is given to what torch does not see."""

    def of(self, frame: Any, event: str, arg: Any) -> str:
        """What is about to be done that cannot be undone; empty: nothing."""
        if event == "call":
            return self._of_code(frame)
        return self._of_builtin(frame, arg) if event == "c_call" else ""

    def _of_code(self, frame: Any) -> str:
        home, code = str(frame.f_globals.get("__name__", "")), frame.f_code
        if home.partition(".")[0] in LIBRARIES:
            is_foreign = home.startswith(_FOREIGN) or home in _FOREIGN_NAMES.get(code.co_name, ())
            is_import = code.co_name == "_load_unlocked" and self.codes is not None  # a first call's is no more made
            return f"{home}.{code.co_name}" if is_foreign or is_import else ""
        if home.startswith("namedtuple_"):  # as `collections` calls what it makes for one
            return ""
        if self.until is not None and time.monotonic() > self.until:
            return "time"
        return "" if self.codes is None or code in self.codes else f"{home}.{code.co_name}"

    def _of_builtin(self, frame: Any, function: Any) -> str:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if owner is None or isinstance(owner, ModuleType):
            homes = {str(function.__module__ or getattr(owner, "__name__", "builtins")).partition(".")[0]}
            if "builtins" in homes and name in _FOREIGN_BUILTINS:
                return name
        else:
            kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
            homes = {kind.__module__.partition(".")[0] for kind in kinds[:-1]}
        if name in _FOREIGN_METHODS or (homes & _FOREIGN_HOMES and name not in _HARMLESS):
            return name
        if self.gives is not None and name in _GIVING and not isinstance(owner, type | ModuleType):
            self.gives(owner)
        is_ours = str(frame.f_globals.get("__name__", "")).partition(".")[0] in LIBRARIES
        return "" if is_ours or not homes or homes & _OF_LIBRARIES or name in _HARMLESS else name


_GIVING = frozenset(("numpy", "data_ptr", "untyped_storage", "__dlpack__"))


@contextmanager
def watched(effects: Effects, *, ends: bool) -> Iterator[None]:
    """Within it each call is looked at, and ends in a `LeftError` before it does what cannot be undone, if it `ends`.

    Raises:
        LeftError: also of what nobody can look at, under a profiler of somebody else's.
    """
    other = sys.getprofile()
    if other is not None and not isinstance(getattr(other, "__self__", None), _Look):
        if ends:
            raise LeftError("a profiler")
        effects.found = effects.found or "a profiler"
        yield
        return
    sys.setprofile(_Look(effects, ends=ends).look)
    try:
        yield
    finally:
        sys.setprofile(other)


class _Look:
    """A profile function of ours."""

    def __init__(self, effects: Effects, *, ends: bool) -> None:
        self.effects, self.ends = effects, ends

    def look(self, frame: Any, event: str, arg: Any) -> None:
        """Every call comes here."""
        if found := self.effects.of(frame, event, arg):
            self.effects.found = self.effects.found or found
            if self.ends:
                raise LeftError(found)
