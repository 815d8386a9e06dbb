"""`Look`: calls of a script's functions that leave nothing, or are not made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardwise.parallel.looks.effects import SECONDS, Effects, LeftError, watched
from shardwise.parallel.looks.reach import Reach
from shardwise.parallel.looks.writes import Writes
from shardwise.parallel.randomness.generators import restore, states

_MOST_BYTES = 2**29
"""Of tensors that are written into, to copy."""
_CALLS = 20
"""That a look makes of a function, at most, some with a part of the rows."""


class Look:
    """At functions, which are called within `kept` only."""

    def __init__(self, device: torch.device, *reaches: Any) -> None:
        """Follow the names.

        Args:
            device: on which the functions draw.
            reaches: the functions, and what they are given.
        """
        self._device, self._reach = device, Reach(*reaches)
        self._effects = Effects(self._reach.codes, until=time.monotonic() + SECONDS)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What the calls within it leave is undone, and those are left that are about to do what cannot be undone.

        Raises:
            LeftError: by such a call; and at once, where names lead to what nobody can copy.
        """
        if self._reach.opaque:
            raise LeftError(self._reach.opaque)
        generators, writes, before = states(self._device), Writes(_MOST_BYTES), self._effects.gives
        with ExitStack() as stack:
            stack.callback(restore, generators, self._device)
            stack.callback(writes.put_back)
            stack.callback(setattr, self._effects, "gives", before)
            stack.enter_context(self._reach.kept())
            stack.enter_context(writes)
            self._effects.gives = writes.keep
            stack.enter_context(watched(self._effects, ends=True))
            yield


class Repeatable:
    """Whether a function may be called again for a look: what its first call of all has done could be undone.

    Not what meets other ranks, by which a loss can be that of the whole batch, nor what prints, or steps an optimizer;
    not what is compiled, anew for other shapes; not what takes long; under a profiler nobody knows.
    """

    def __init__(self) -> None:
        """Not watched yet."""
        self.holds = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it each function that is called is looked at."""
        effects, start = Effects(), time.monotonic()
        with watched(effects, ends=False):
            yield
        self.holds = not effects.found and (time.monotonic() - start) * _CALLS < SECONDS


@contextmanager
def quietly() -> Iterator[None]:
    """What a call for a look ends in is nothing to training: an error for a part of the rows, `sys.exit`, its end."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        return
