"""Counts in words: `4M` tokens of a step, samples of `8k`."""

from __future__ import annotations

import re

from shardwise.errors import UsageError

UNITS = {"k": 10, "m": 20, "b": 30, "g": 30, "t": 40}
MOST = 10**15
"""Tokens or samples of a step: far beyond any, and still exact as a float."""
LENGTH_HELP = "Tokens per sample: 8192, or 8k (8 x 1024)."


def count_of(text: str) -> float:
    """`300000`, `4M`, `1.5B`.

    Raises:
        UsageError: no number, an unknown unit, or more than `MOST`.
    """
    match = re.fullmatch(r"([0-9_.]+(?:[eE][0-9]+)?)\s*([a-zA-Z]?)", text.strip())
    unit = match.group(2).lower() if match else ""
    try:
        if match is None or (unit and unit not in UNITS):
            raise ValueError(text)
        count = float(match.group(1)) * float(1000 ** (UNITS[unit] // 10 if unit else 0))
    except ValueError:
        raise UsageError(f"tokens {text!r}: needed a count such as 300000, 4M or 1.5B (units: k, M, B, T)") from None
    if count > MOST:
        raise UsageError(f"tokens {text!r}: needed at most {MOST:,} in a step")
    return count


def length_of(text: str) -> int:
    """Tokens of a sample: `8192`, or by 1024 as lengths are named: `8k`, `128k`, `1M`.

    Raises:
        UsageError: no whole number of at least 1, or more than `MOST`.

    >>> length_of("8k"), length_of("1.5k")
    (8192, 1536)
    """
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKmM]?)", text.strip())
    count = float(match.group(1)) * 2 ** (UNITS[match.group(2).lower()] if match.group(2) else 0) if match else 0.0
    if count > MOST:
        raise UsageError(f"--seq {text!r}: needed at most {MOST:,} tokens in a sample")
    if count < 1 or count % 1:
        raise UsageError(f"--seq {text!r}: needed tokens per sample such as 8192, or 8k (8 x 1024), at least 1")
    return int(count)
