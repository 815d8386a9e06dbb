"""Bytes as people read them. No torch."""

from __future__ import annotations

UNITS = ("GiB", "MiB", "KiB")


def spelled(num_bytes: float, digits: int = 1, sign: str = "") -> str:
    """In GiB, or in the next smaller unit of which it is at least a tenth.

    >>> spelled(3e9), spelled(3e7), spelled(-3e9, 2, "+"), spelled(0)
    ('2.8 GiB', '28.6 MiB', '-2.79 GiB', '0.0 GiB')
    """
    powers = [(2.0**30 / 1024**place, unit) for place, unit in enumerate(UNITS)]
    size, unit = next(((size, unit) for size, unit in powers if abs(num_bytes) >= size / 10), powers[0])
    return f"{num_bytes / size:{sign}.{digits}f} {unit}"
