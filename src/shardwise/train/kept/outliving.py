"""Memory that outlives the processes that write it: two `Slot`s per rank, and a `Board` for the job. No torch.

They are anonymous files in memory (`memfd_create`) that the supervisor of a job makes and its ranks inherit, so they
have no name, nobody else can open them, and they are gone when the last process of the job is.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import compress
from operator import not_
from typing import Any

import xxhash

DATA = 4096
"""Where a slot's tensors begin: a page, so that they are aligned."""
_HEADER = struct.Struct("@QQQQQ")
_SEAL = struct.Struct("@QQ")
_WORDS = struct.Struct("@QQQ")
_RANK_BYTES = 64


@dataclass(frozen=True)
class Header:
    """What a slot holds."""

    count: int
    """Number of this copy, counted from the beginning of the job; 0: nothing, or half a copy."""
    step: int
    end: int
    """Where the description begins, after the tensors."""
    length: int
    """Bytes of the description."""
    ranks: int
    """How many ranks made this copy: those from 0 on, each one its part."""


class Slot:
    """One copy of one rank's state: a header, tensors from `DATA` on, then their description as JSON.

    A copy exists from the write of its header on, which comes last and is one system call: a process that is killed
    while it copies leaves a slot without a copy, never half of one.
    """

    def __init__(self, file: int) -> None:
        """See the class."""
        self.file = file
        self._map: mmap.mmap | None = None

    def header(self) -> Header:
        """What lies here now."""
        found = os.pread(self.file, _HEADER.size, 0)
        return Header(*_HEADER.unpack(found)) if len(found) == _HEADER.size else Header(0, 0, 0, 0, 0)

    def clear(self) -> None:
        """From now on nothing lies here."""
        os.pwrite(self.file, _HEADER.pack(0, 0, 0, 0, 0), 0)

    def commit(self, header: Header, description: str) -> Header:
        """Say that the tensors up to `header.end` are a copy, and return its header: `length` is the description's."""
        text = description.encode()
        os.pwrite(self.file, text, header.end)
        header = replace(header, length=len(text))
        os.pwrite(self.file, _HEADER.pack(header.count, header.step, header.end, header.length, header.ranks), 0)
        return header

    def seal(self, header: Header) -> None:
        """Keep a digest of the copy that was committed, behind its header; who wrote it calls it, once, or `check`."""
        os.pwrite(self.file, _SEAL.pack(header.count, self._digest(header)), _HEADER.size)

    def check(self) -> bool:
        """Whether the copy that lies here, if any, is the one that was sealed. No rank may be running.

        One whose rank ended before it had sealed it is sealed now: from here on it is known, however long it waits.
        """
        header, found = self.header(), os.pread(self.file, _SEAL.size, _HEADER.size)
        count, digest = _SEAL.unpack(found) if len(found) == _SEAL.size else (0, 0)
        if not header.count:
            return True
        if not DATA <= header.end <= header.end + header.length <= os.fstat(self.file).st_size:
            return False
        if header.count != count:
            self.seal(header)
            return True
        return bool(self._digest(header) == digest)

    def _digest(self, header: Header) -> int:
        found = xxhash.xxh3_64(_HEADER.pack(header.count, header.step, header.end, header.length, header.ranks))
        with memoryview(self.data(header.end)) as memory, memory[DATA : header.end] as tensors:
            found.update(tensors)  # without the lock of the interpreter: beside the next step
        found.update(os.pread(self.file, header.length, header.end))
        return found.intdigest()

    def text(self, header: Header) -> str:
        """The description that was committed with a copy."""
        return os.pread(self.file, header.length, header.end).decode(errors="replace")

    def data(self, end: int, *, mine: bool = False) -> mmap.mmap:
        """The memory from the beginning to `end`, shared by all processes; mapped again only when it has grown.

        `mine`: this process will write to it, and asks for its pages now, not while others wait for it.
        """
        if self._map is None or len(self._map) < end:
            if os.fstat(self.file).st_size < end:
                os.ftruncate(self.file, end)
            self._map = mmap.mmap(self.file, end, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if mine else 0))
        return self._map


class Board:
    """A few words per rank, that it writes and the supervisor reads: which world it is of, and since when it trains."""

    def __init__(self, file: int) -> None:
        """See the class."""
        self.file = file

    def read(self, rank: int) -> tuple[int, int, int]:
        """(world that it joined, world that it trains in, when that began in ns of the monotonic clock)."""
        found = os.pread(self.file, _WORDS.size, rank * _RANK_BYTES)
        joined, trains, since = _WORDS.unpack(found) if len(found) == _WORDS.size else (0, 0, 0)
        return joined, trains, since

    def write(self, rank: int, joined: int, trains: int, since_ns: int) -> None:
        """Replace a rank's words, all at once."""
        os.pwrite(self.file, _WORDS.pack(joined, trains, since_ns), rank * _RANK_BYTES)


@dataclass(frozen=True, order=True)
class Copy:
    """A copy of the whole state, of which every rank has made its part."""

    count: int
    """Number of it."""
    ranks: int
    step: int


def newest(made: Mapping[int, Collection[Copy]]) -> Copy | None:
    """The newest copy that every rank of its set has made; None: there is none.

    Args:
        made: what lies in the slots of each rank.

    >>> newest({0: [Copy(2, 2, 2), Copy(3, 2, 3)], 1: [Copy(2, 2, 2), Copy(1, 2, 1)]})
    Copy(count=2, ranks=2, step=2)
    """
    whole = [copy for copy in {*made.get(0, ())} if all(copy in made.get(rank, ()) for rank in range(copy.ranks))]
    return max(whole, default=None)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The files of a job on one host, by number: the same numbers in the supervisor and in all ranks."""

    board: int
    slots: tuple[tuple[int, int], ...]
    """The two slots of each rank of this host. A copy goes where the last but one was."""
    first: int = 0
    """The first rank of this host."""

    @classmethod
    def create(cls, ranks: range) -> Memory:
        """Make the files; bytes are taken when copies are made.

        Raises:
            OSError: no more files can be opened.
        """
        names = [f"shardwise-rank{rank}-{which}" for rank in ranks for which in (0, 1)]
        files = [os.memfd_create(name, 0) for name in names]
        slots = tuple(zip(files[::2], files[1::2], strict=True))
        return cls(board=os.memfd_create("shardwise-board", 0), slots=slots, first=ranks.start)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Memory:
        """The inverse of `asdict`."""
        slots = tuple((first, second) for first, second in found["slots"])
        return cls(board=found["board"], slots=slots, first=found["first"])

    @property
    def files(self) -> tuple[int, ...]:
        """All of them."""
        return (self.board, *(file for pair in self.slots for file in pair))

    @property
    def ranks(self) -> range:
        """Those of this host."""
        return range(self.first, self.first + len(self.slots))

    def pair(self, rank: int) -> tuple[Slot, Slot]:
        """The slots of a rank of this host."""
        one, other = self.slots[rank - self.first]
        return Slot(one), Slot(other)

    def made(self) -> dict[int, list[Copy]]:
        """Of which copies each rank of this host has made its part, at most two.

        Ranks are never more than one copy apart: each step has collectives of all.
        """
        found = {rank: [slot.header() for slot in self.pair(rank)] for rank in self.ranks}
        return {rank: [Copy(h.count, h.ranks, h.step) for h in pair if h.count] for rank, pair in found.items()}

    def check(self) -> list[str]:
        """Clear what is no longer what its rank has written, and say what that was. No rank may be running."""
        slots = [(rank, slot) for rank in self.ranks for slot in self.pair(rank)]
        with ThreadPoolExecutor(8) as pool:
            whole = list(pool.map(Slot.check, (slot for _, slot in slots)))
        found = []
        for rank, slot in compress(slots, map(not_, whole)):
            found.append(f"what rank {rank} had copied after step {slot.header().step} was damaged in memory")
            slot.clear()
        return found

    def keep(self, copy: Copy | None) -> None:
        """Clear every slot that is not part of a copy. No rank may be running."""
        for slot in (slot for rank in self.ranks for slot in self.pair(rank)):
            header = slot.header()
            if copy is None or (header.count, header.ranks) != (copy.count, copy.ranks):
                slot.clear()

    def count(self, ranks: range) -> int:
        """Number of the newest copy that each of these ranks has made; they may be running."""
        return min(max(slot.header().count for slot in self.pair(rank)) for rank in ranks)

    def close(self) -> None:
        """Close this process's files."""
        for file in self.files:
            os.close(file)


def call_process(name: str) -> None:
    """What `top` and `ps` call this process, in at most 15 letters."""
    with open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name[:15])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who a rank is to its supervisor; travels in SHARDWISE_RECOVER."""

    job: str
    """Its id, 32 hexadecimal digits."""
    rank: int
    world: int
    """Number of the set of processes that it belongs to, from 1; a recovery starts a new one."""
    order: int
    """File from which it reads what it shall go on with: a line of JSON."""
    memory: Memory
    streams: tuple[int, int] | None = None
    """Of a standby: the job's standard output and error, which are not connected before it is called."""
    halvings: int = 0
    """How often its micro-batches are to be halved at least: ranks before it ran out of memory."""

    def dump(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Place:
        """The inverse of `dump`."""
        found = json.loads(text)
        streams = tuple(found["streams"]) if found["streams"] else None
        return cls(**(found | {"memory": Memory.from_json(found["memory"]), "streams": streams}))
