"""Types of elements converted without torch: between floats, and of step counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import CheckpointError

FLOATS = ("float64", "float32", "float16", "bfloat16")
_NUMPY = {name: name for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")}


def can_cast(source: str, target: str) -> bool:
    """Whether `cast_bytes` converts between two types.

    >>> can_cast("float32", "bfloat16"), can_cast("float32", "int64")
    (True, False)
    """
    return source == target or (target in FLOATS and (source in FLOATS or source in _NUMPY))


def cast_bytes(data: NDArray[np.uint8], source: str, target: str, name: str) -> NDArray[np.uint8]:
    r"""Elements of one type as those of another, rounded to nearest, ties to even.

    Args:
        data: bytes of `source`, flat.
        source: torch's name of the type, as `target`.
        target: the new type.
        name: for the message.

    Raises:
        CheckpointError: no such conversion, or an integer changes its value.

    >>> cast_bytes(np.asarray([1.0], dtype="f4").view("u1"), "float32", "bfloat16", "w").tobytes()
    b'\x80?'
    """
    if source == target:
        return data
    if not can_cast(source, target):
        raise CheckpointError(
            f"{name}: found {source}, needed {target}, and there is no conversion; keep its type, or convert it first"
        )
    wide = _values(data, source)
    if target == "bfloat16":
        found = _to_bfloat16(wide).view(np.uint8)
    else:
        with np.errstate(over="ignore"):
            found = wide.astype(np.dtype(target)).view(np.uint8)
    if source not in FLOATS and not _holds(_values(found, target).astype(np.float64), wide):
        raise CheckpointError(
            f"{name}: found an integer of {source} that {target} cannot hold, needed one that it can; keep its type"
        )
    return found


def num_finite(data: NDArray[np.uint8], dtype: str) -> int:
    """How many elements are neither infinite nor NaN."""
    return int(np.count_nonzero(np.isfinite(_values(data, dtype))))


def _values(data: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Elements in numpy's type; numpy has no bfloat16, and float32 holds each."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view(np.dtype(_NUMPY[dtype]))


def _holds(floats: NDArray[np.float64], integers: NDArray[Any]) -> bool:
    """Whether each float is the integer; compared as integers, for float64 has no 2^53 + 1 either."""
    kind = np.iinfo(integers.dtype)
    inside = (floats >= kind.min) & (floats < kind.max + 1.0)
    return bool((inside & (np.where(inside, floats, 0.0).astype(integers.dtype) == integers)).all())


def _to_bfloat16(wide: NDArray[np.generic]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16; float64 goes through the float32 that is rounded to odd, so it rounds once."""
    single = wide.astype(np.float32)
    bits = single.view(np.uint32)
    if wide.dtype == np.float64:
        exact = wide.astype(np.float64)
        off = np.isfinite(single) & (single.astype(np.float64) != exact)
        past = off & (np.abs(single.astype(np.float64)) > np.abs(exact))
        bits = np.where(past, bits - np.uint32(1), bits)
        bits = np.where(off, bits | np.uint32(1), bits)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits  # only NaNs go past the end
    rounded >>= np.uint32(16)
    found = rounded.astype(np.uint16)
    unknown = np.isnan(single)
    found[unknown] = (bits[unknown] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return found
