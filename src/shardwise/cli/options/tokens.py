"""The batch of a step, from samples or from words such as `4M` tokens."""

from __future__ import annotations

import math
from bisect import bisect

from shardwise.cli.options.counts import MOST, UNITS, count_of
from shardwise.errors import UsageError
from shardwise.plan.repair import divisors
from shardwise.plan.search import near_batches

NEAR = 0.05
"""How far the tokens of a step may be from a round number that was asked, for a batch that the devices divide."""


def batch_of(batch: int | None, tokens: str | None, seq: int, world: int) -> tuple[int, list[str]]:
    """(samples per step, what was assumed)."""
    if batch is not None and tokens is not None:
        raise UsageError("--global-batch and --tokens are both given; keep one of them")
    if batch is not None and batch > MOST:
        raise UsageError(f"--global-batch {batch}: needed at most {MOST:,} samples in a step")
    if batch is not None:
        return batch, _remark(batch, world)
    if tokens is None:
        samples = f"{world:,} sample{'s' * (world > 1)}"
        return world, [f"global batch: {samples}, one per device (give --global-batch or --tokens)"]
    wanted = count_of(tokens)
    if wanted < seq:
        raise UsageError(f"--tokens {tokens}: less than one sequence of {seq} tokens; give at least {seq}")
    size = _samples(tokens.strip(), wanted, seq, world)
    said = f"tokens: {tokens.strip()} asked, {size:,} sample{'s' * (size > 1)} of {seq:,} = {size * seq:,} tokens"
    return size, [said, *_remark(size, world)]


def _samples(tokens: str, wanted: float, seq: int, world: int) -> int:
    """Samples of a step for a number of tokens.

    A number in full is kept where it is whole sequences. Any other is round: of the batches within 5 % of it, the one
    that shares the largest divisor with the devices, then what the words say exactly (M: 10^6, then 2^20), then the
    nearest.

    >>> _samples("67108864", 67108864, 4096, 24), _samples("64M", 64e6, 4096, 2048), _samples("1e9", 1e9, 4096, 2048)
    (16384, 16384, 243712)
    """
    if wanted % seq == 0 and tokens.replace(".", "").isdigit():
        return int(wanted // seq)
    unit, below = tokens[-1].lower(), int(wanted // seq)
    binary = float(tokens[:-1]) * 2 ** UNITS[unit] / seq if unit in UNITS else 0.0
    least, most = math.ceil(wanted * (1 - NEAR) / seq), int(wanted * (1 + NEAR) / seq)
    multiples = (below // world * world, (below // world + 1) * world, binary)
    near = [int(n) for n in multiples if n % world == 0 and least <= n <= most]
    near = near or list(range(least, most + 1))  # no multiple is near: these are few, at most as many as devices
    return max(
        near or (below, below + 1),
        key=lambda n: (math.gcd(n, world) if near else 0, n == wanted / seq, n == binary, -abs(n * seq - wanted)),
    )


def _remark(batch: int, world: int) -> list[str]:
    """Where few layouts divide a batch: devices and batch, whichever is more, is no multiple of the other.

    >>> _remark(16, 128), _remark(100, 128)[0].rpartition("; ")[2]
    ([], 'nearest: 64 or 128')
    """
    if batch < 1 or max(batch, world) % min(batch, world) == 0:  # none at all is refused by `Workload`
        return []
    sizes = divisors(world)
    near = near_batches(batch, world) if batch > world else sizes[(at := bisect(sizes, batch)) - 1 : at + 1]
    return [
        f"global batch: {batch} samples and {world} devices, neither a multiple of the other: few layouts divide them; "
        f"nearest: {' or '.join(map(str, near))}"
    ]
