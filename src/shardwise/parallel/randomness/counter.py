"""Random numbers that are a function of where they are used: a counter hashed, nothing drawn in turn.

Element i of a stream is the i-th output of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014, figure 13 and section 5; mixing function: Stafford's variant 13):

    z = start + i * gamma;  z = (z ^ z >>> 30) * 0xbf58476d1ce4e5b9;  z = (z ^ z >>> 27) * 0x94d049bb133111eb
    bits = z ^ z >>> 31

`start` and the odd `gamma` are hashes of (seed, step, module, call, draw), so two streams do not share a sequence.
All of it is 64-bit integer arithmetic that wraps around: the same bits on every device, in any order, for any part
of a tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
MULTIPLIER = 0xD1342543DE82EF95
"""Its powers have no short integer relations (Steele, Vigna: arXiv 2001.05304): no two places of a tensor meet."""
CPU_CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 24
"""Elements hashed at once: two buffers of 8 bytes each stay in a core's cache, or take 256 MiB of a GPU."""

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def signed(bits: int) -> int:
    """64 bits as the signed integer that torch's int64 holds them in."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def strides(count: int) -> list[int]:
    """Strides of dims, the last dim's first, for an index that does not depend on the sizes of the dims.

    >>> strides(1)
    [1]
    """
    return [signed(pow(MULTIPLIER, power, 1 << 64)) for power in range(count)]


@dataclass(frozen=True)
class Stream:
    """One endless sequence of 64-bit numbers."""

    start: int
    gamma: int
    """Odd; the distance of two neighbours before they are mixed."""

    @classmethod
    def of(cls, *key: object) -> Stream:
        """The stream of a key: numbers and names, told apart by their text.

        >>> Stream.of(0, 1, "drop", 0, 0) == Stream.of(0, 1, "drop", 0, 0) != Stream.of(0, 2, "drop", 0, 0)
        True
        """
        digest = hashlib.blake2b("\n".join(map(str, key)).encode(), digest_size=16).digest()
        gamma = int.from_bytes(digest[8:], "little") | 1
        if (gamma ^ gamma >> 1).bit_count() < 24:  # too regular: OOPSLA 2014, section 5
            gamma ^= 0xAAAAAAAAAAAAAAAA
        return cls(signed(int.from_bytes(digest[:8], "little")), signed(gamma))


@dataclass(frozen=True)
class Elements:
    """Which elements of a stream a tensor's own elements are: index = sum over dims of `along[d][coordinate d]`."""

    shape: tuple[int, ...]
    along: tuple[torch.Tensor, ...]
    """One int64 tensor of `shape[d]` numbers per dim."""

    @classmethod
    def row_major(cls, shape: Sequence[int], device: torch.device) -> Elements:
        """0, 1, 2, ... in the order of a contiguous tensor."""
        along, stride = [], 1
        for size in reversed(shape):
            along.append(torch.arange(size, device=device) * stride)
            stride *= size
        return cls(tuple(shape), tuple(reversed(along)))


@dataclass(frozen=True)
class Numbers:
    """The random numbers of one draw: a stream, and where in it the tensor's elements are."""

    stream: Stream
    elements: Elements
    device: torch.device

    def keep(self, drop: float) -> torch.Tensor:
        """A mask, true with probability 1 - `drop`: the same for every floating-point type."""
        least = min(signed(-(1 << 63) + round(drop * 2**64)), (1 << 63) - 1) if drop < 1 else (1 << 63) - 1
        return self._made(torch.bool, lambda bits: bits >= least)

    def integers(self, count: int) -> torch.Tensor:
        """The top `count` bits, at most 31, as int32 numbers from 0."""
        return self._made(torch.int32, lambda bits: top(bits, count))

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """In [0, 1): as many of the top bits as the type has digits, 24 in fp32 and 53 in fp64."""
        kept = DIGITS[dtype]
        return self._made(dtype, lambda bits: top(bits, kept).to(dtype) * 2.0**-kept)

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        """Standard normal by Box and Muller (1958), in fp64 from two halves of 32 bits: tails reach 6.7 sigma."""

        def finish(bits: torch.Tensor) -> torch.Tensor:
            radius = top(bits, 32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
            angle = (bits & 0xFFFFFFFF).double().mul_(2.0**-32 * 2 * math.pi)
            return radius * angle.cos_()

        return self._made(dtype, finish)

    def exponential(self, dtype: torch.dtype) -> torch.Tensor:
        """Of mean 1, never 0: -log of a uniform number in (0, 1)."""
        return self._made(dtype, lambda bits: top(bits, 52).double().add_(0.5).mul_(2.0**-52).log_().neg_())

    def _made(self, dtype: torch.dtype, finish: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Hash every element, and make numbers of the bits, some chunks at a time."""
        made = torch.empty(self.elements.shape, dtype=dtype, device=self.device)
        if made.is_meta or not made.numel():
            return made
        outer, last = self._counters()
        flat = made.view(len(outer), len(last))
        chunk = max(1, (CPU_CHUNK if made.device.type == "cpu" else DEVICE_CHUNK) // len(last))
        for begin in range(0, len(outer), chunk):
            flat[begin : begin + chunk] = finish(mixed(outer[begin : begin + chunk, None] + last))
        return made

    def _counters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Start + index * gamma, as a sum over all dims but the last, and the last dim's summand."""
        along = [dim * self.stream.gamma for dim in self.elements.along]
        if not along:
            along = [torch.zeros(1, dtype=torch.int64, device=self.device)]
        *others, last = along
        outer = reduce(lambda sums, dim: (sums[:, None] + dim).flatten(), others, last.new_zeros(1))
        if len(outer) == 1:  # long and one-dimensional: chunks are cut from it
            outer, last = outer + last, last.new_zeros(1)
        return outer + self.stream.start, last


def mixed(z: torch.Tensor) -> torch.Tensor:
    """The 64 random bits of each counter, in place."""
    for shift, factor in MIX:
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)  # torch shifts the sign in; the mask takes it out
        z *= signed(factor)
    z ^= (z >> LAST_SHIFT).bitwise_and_((1 << 64 - LAST_SHIFT) - 1)
    return z


def top(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The upper `count` bits as a number from 0."""
    return (bits >> 64 - count).bitwise_and_((1 << count) - 1)
