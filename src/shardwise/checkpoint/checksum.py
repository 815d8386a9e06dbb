"""A checksum of a tensor that does not depend on how the tensor is divided: parts add up, in any order.

Elements are read as unsigned words w of 1, 2 or 4 bytes (wider ones as several along the last dim), and

    checksum = sum over all words of  w[i0, i1, ...] * k(0, i0) * k(1, i1) * ...    mod 2^64

with odd 64-bit keys k(dim, index) from splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014). One word that changes always changes the sum, since an odd key times a difference below 2^32 is no
multiple of 2^64; other changes, and elements that change places, go unnoticed with a chance of about 2^-32 or less.
It finds mistakes, not forgeries. Keys by dim make a shard's keys short, and the sum a few matrix-vector products.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.checkpoint.format import DTYPES, Box, cut

Words = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
MASK = 2**64 - 1
_CHUNK = 1 << 16
"""Words at a time: their 64-bit copies stay in the cache."""
_SLAB = 1 << 18
"""Words at a time: a sum for each row of them is held."""


def words_of(data: NDArray[np.uint8], sizes: tuple[int, ...], dtype: str) -> Words:
    """The bytes of a contiguous part as words, in its shape; a type of more than 4 bytes widens the last dim.

    Args:
        data: flat.
        sizes: of the part.
        dtype: torch's name of the type.
    """
    size = DTYPES[dtype].size
    shape = sizes or (1,)
    if size <= 4:
        return data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size]).reshape(shape)
    return data.view(np.uint32).reshape(*shape[:-1], shape[-1] * (size // 4))


def word_box(box: Box, dtype: str) -> Box:
    """The box of the words of a box of elements."""
    factor = max(1, DTYPES[dtype].size // 4)
    offsets, sizes = box.offsets or (0,), box.sizes or (1,)
    return Box((*offsets[:-1], offsets[-1] * factor), (*sizes[:-1], sizes[-1] * factor))


def contribution(words: Words, box: Box) -> int:
    """What a part of a tensor adds to its checksum.

    Args:
        words: of the part, with the sizes of `box`.
        box: its place among the words of the whole tensor.

    Cost: one pass, 4 to 11 GB/s and core for types of 4 bytes, half of it for those of 2.

    >>> import numpy as np
    >>> w = np.arange(12, dtype=np.uint32).reshape(3, 4)
    >>> total = contribution(w, Box((0, 0), (3, 4)))
    >>> parts = contribution(w[:, :1], Box((0, 0), (3, 1))) + contribution(w[:, 1:], Box((0, 1), (3, 3)))
    >>> total == parts % 2**64
    True
    """
    if box.num_elements == 0:
        return 0
    return sum(_weighted(words[slab.slices(box)], slab) for slab in cut(box, _SLAB)) & MASK


def _weighted(words: Words, box: Box) -> int:
    """The sum over the words of a box: first along rows, a chunk at a time, then along the dims before them."""
    *lead, width = range(len(box.sizes))
    rows = words.reshape(-1, box.sizes[width])
    sums, across = np.zeros(len(rows), dtype=np.uint64), min(rows.shape[1], _CHUNK)
    down = max(1, _CHUNK // across)
    room = np.empty((min(down, len(rows)), across), dtype=np.uint64)
    for start in range(0, rows.shape[1], across):
        keys = _keys(width, box.offsets[width] + start, min(across, rows.shape[1] - start))
        for at in range(0, len(rows), down):
            chunk = rows[at : at + down, start : start + across]
            wide = room[: chunk.shape[0], : chunk.shape[1]]
            wide[...] = chunk
            sums[at : at + down] += np.einsum("ij,j", wide, keys)  # for integers in two thirds of the time of `@`
    sums = sums.reshape(box.sizes[:-1])
    for dim in reversed(lead):
        sums = np.einsum("...i,i", sums, _keys(dim, box.offsets[dim], box.sizes[dim]))
    return int(sums)


@lru_cache(maxsize=8)  # those of a row are the same for all rows
def _keys(dim: int, start: int, count: int) -> NDArray[np.uint64]:
    """k(dim, start), ..., odd."""
    seed = np.uint64((dim + 1) * 0xD1342543DE82EF95 & MASK)
    z = (np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
