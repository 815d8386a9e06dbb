"""Types of elements converted without torch: between floats, and of step counts."""

from __future__ import annotations

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
    if source == "bfloat16":
        wide = (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        wide = data.view(np.dtype(_NUMPY[source]))
    if source not in FLOATS and bool((wide.astype(np.float64).astype(target_or_wide(target)) != wide).any()):
        raise CheckpointError(f"{name}: an integer of {source} that {target} cannot hold; keep its type")
    if target != "bfloat16":
        with np.errstate(over="ignore"):
            return wide.astype(np.dtype(target)).view(np.uint8)
    return _to_bfloat16(wide).view(np.uint8)


def target_or_wide(target: str) -> str:
    """The type of numpy to try integers in: bfloat16 has none."""
    return target if target in _NUMPY else "float32"


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
