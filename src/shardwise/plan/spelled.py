"""Bytes and seconds as people read them. No torch."""

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


def seconds(value: float) -> str:
    """`1.23 s`, `45.6 ms`.

    >>> seconds(1234.5), seconds(0.0456), seconds(12e-6), seconds(0)
    ('1,234.50 s', '45.6 ms', '12 us', '0 s')
    """
    if not value:
        return "0 s"
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:.1f} ms" if value >= 0.001 else f"{value * 1e6:.0f} us"
