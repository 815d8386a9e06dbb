"""Errors that say that memory ran out: how they are known, and what is said where no smaller micro-batch helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.errors import OutOfMemoryError

_TEXTS = re.compile("DefaultCPUAllocator|_STATUS_ALLOC_FAILED|_ALLOCATION_FAILED|error: out of memory")
"""In a plain RuntimeError: of torch's CPU allocator; of cuBLAS, cuDNN and their like, whose handles and workspaces are
not torch's to allocate (cuDNN 9 has the second word); of the CUDA driver."""
_WHAT = "divide it over more ranks (zero, fsdp, tp, pp), or see what plans take: `shardwise estimate`"
MODEL_ROOM = f"room for them, and then for gradients and the optimizer's state, beside what is there already; {_WHAT}"
STATE_ROOM = f"room for its state beside parameters and gradients, which no smaller micro-batch makes; {_WHAT}"
"""What is needed where a model does not fit, and where an optimizer's state does not."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: that of an accelerator, its libraries, Python, or torch's CPU.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shape mismatch"))
    (True, False)
    """
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None)


def what_ran_out(error: BaseException) -> str:
    """The first line of the error that says so, which torch's pipeline stages wrap; empty: memory did not run out."""
    cause: BaseException | None = error
    while cause is not None and not is_out_of_memory(cause):
        cause = cause.__cause__
    return "" if cause is None else f"{type(cause).__name__}: {cause}".partition("\n")[0]


@contextmanager
def fitting(what: str, needed: str) -> Iterator[None]:
    """Within it, memory that runs out is an error that says what it was for, and what to do.

    Args:
        what: failed, and where.
        needed: what is, and what to do.

    Raises:
        OutOfMemoryError: in place of torch's own.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (found := what_ran_out(error)):
            raise
        raise OutOfMemoryError(f"{what}: out of memory ({found}); needed: {needed}") from error
