"""What torch's errors mean that a script's own lines meet with sharded tensors: in which line, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwise.errors import ShardwiseError, UsageError

_WORDS = (
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "Sharding propagation failed for",
    ".numpy() is not supported for tensor subclasses",
)
"""Parts of what torch says where it can do something with plain tensors alone."""
_OTHERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@contextmanager
def explaining_parts() -> Iterator[None]:
    """Within it a script does what it likes; where torch cannot do that with parts of tensors, it is said so.

    Raises:
        UsageError: in place of torch's error. That of an optimizer's step has been explained, and stays.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ShardwiseError) or hasattr(error, "__notes__"):
            raise
        if not any(words in str(error) for words in _WORDS):
            raise
        line = next((text.strip() for text in str(error).splitlines() if text.strip()), "")
        raise UsageError(
            f"{_where(error)}torch cannot do this with a sharded tensor (torch: {line[:200]}); found a weight, a "
            "gradient or what is computed from them, of which each rank has a part; needed: the whole on every rank, "
            "weight.full_tensor(), and what becomes of it written back, under torch.no_grad(), by weight.copy_(value) "
            "within torch.distributed.tensor.experimental.implicit_replication(), as whatever else has plain tensors "
            "beside sharded ones; or a plan of `dp`, which keeps weights whole (docs/data-parallel.md)"
        ) from error


def _where(error: BaseException) -> str:
    """The innermost line that is neither torch's nor of this library, in words."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OTHERS)]
    frames = [frame for frame in frames if Path(frame.filename).is_file()]
    return f"{frames[-1].filename}, line {frames[-1].lineno}, `{frames[-1].line}`: " if frames else ""
