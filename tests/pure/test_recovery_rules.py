"""Memory that outlives its writers, how often is recovered, and what `--recover` refuses. No torch, no ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.errors import ExitCode
from shardwise.train.kept.outliving import DATA, Board, Copy, Header, Memory, Place, Slot, newest


@pytest.fixture
def memory() -> Memory:
    return Memory.create(range(2))


def copy(memory: Memory, rank: int, count: int) -> None:
    slot = memory.pair(rank)[count % 2]
    slot.clear()
    slot.data(DATA + 8)[DATA : DATA + 8] = bytes([count] * 8)
    slot.commit(Header(count, 10 * count, DATA + 8, 0, 2), '{"of": "é"}')


def test_a_copy_is_there_when_it_is_complete(memory: Memory) -> None:
    slot = memory.pair(0)[1]
    assert slot.header() == Header(0, 0, 0, 0, 0)
    copy(memory, 0, 1)
    assert slot.header() == Header(1, 10, DATA + 8, 12, 2)
    assert slot.text(slot.header()) == '{"of": "é"}'
    assert bytes(slot.data(DATA + 8)[DATA : DATA + 8]) == bytes([1] * 8)
    slot.clear()  # what the next copy into it begins with: a process that dies then leaves none
    assert slot.header().count == 0


def test_the_newest_copy_is_that_which_all_ranks_have(memory: Memory) -> None:
    assert newest(memory.made()) is None
    for rank, count in ((0, 1), (1, 1), (0, 2), (1, 2), (0, 3)):
        copy(memory, rank, count)
    assert newest(memory.made()) == Copy(count=2, ranks=2, step=20)
    memory.keep(Copy(count=2, ranks=2, step=20))
    assert [Slot(file).header().count for pair in memory.slots for file in pair] == [2, 0, 2, 0]


PLACES = pytest.mark.parametrize("at", [DATA + 3, DATA + 9, 17], ids=["tensors", "description", "header"])


@PLACES
def test_a_copy_that_is_not_what_was_written_is_named_and_passed_over(memory: Memory, at: int) -> None:
    for rank, count in ((0, 1), (1, 1), (0, 2), (1, 2)):
        copy(memory, rank, count)
        slot = memory.pair(rank)[count % 2]
        slot.seal(slot.header())
    copy(memory, 0, 3)  # its rank was killed before it had sealed this one, which is no reason to call it damaged
    assert memory.check() == []
    file = memory.slots[1][0]
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 64]), at)
    assert memory.check() == ["what rank 1 had copied after step 20 was damaged in memory"]
    assert newest(memory.made()) is None  # rank 0 has begun to overwrite the one before
    copy(memory, 0, 1)
    assert newest(memory.made()) == Copy(count=1, ranks=2, step=10)


@PLACES
def test_a_copy_that_its_rank_has_not_sealed_is_sealed_when_it_is_first_looked_at(memory: Memory, at: int) -> None:
    """It may wait for long: until enough slots of an elastic run can be used, or through another recovery."""
    for rank in (0, 1):
        copy(memory, rank, 1)
    assert memory.check() == []
    file = memory.slots[1][1]
    os.pwrite(file, bytes([os.pread(file, 1, at)[0] ^ 64]), at)
    assert memory.check() == ["what rank 1 had copied after step 10 was damaged in memory"]


def test_one_rank_without_a_copy_means_none(memory: Memory) -> None:
    copy(memory, 0, 1)
    assert newest(memory.made()) is None
    memory.keep(None)
    assert memory.pair(0)[1].header().count == 0


def test_hosts_have_the_newest_copy_that_all_of_their_ranks_have() -> None:
    """Each host knows of its own ranks; a copy of half as many ranks does not count for all."""
    hosts = [Memory.create(range(2)), Memory.create(range(2, 4))]
    for host in hosts:
        for rank in host.ranks:
            for count in (4, 5):
                host.pair(rank)[count % 2].commit(Header(count, 10 * count, DATA, 0, 4), "")
    assert hosts[1].ranks == range(2, 4) and hosts[1].count(hosts[1].ranks) == 5
    hosts[1].pair(3)[1].clear()  # it died while it made the newest
    made = {rank: copies for host in hosts for rank, copies in host.made().items()}
    assert newest(made) == Copy(count=4, ranks=4, step=40)
    assert newest(hosts[0].made()) is None and newest(hosts[1].made()) is None


def test_a_copy_outlives_who_wrote_it(memory: Memory) -> None:
    pid = os.fork()
    if not pid:
        copy(memory, 0, 1)
        copy(memory, 1, 1)
        Board(memory.board).write(1, 4, 5, 6)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert newest(memory.made()) == Copy(count=1, ranks=2, step=10)
    assert Board(memory.board).read(1) == (4, 5, 6) and Board(memory.board).read(0) == (0, 0, 0)


def test_a_place_is_read_as_it_was_written(memory: Memory) -> None:
    for streams in (None, (3, 4)):
        place = Place(job="ab" * 16, rank=1, world=7, order=9, memory=memory, streams=streams, halvings=2)
        assert Place.parse(place.dump()) == place


def refused(*words: str, **env: str) -> str:
    command = [sys.executable, "-m", "shardwise", "run", "--recover", __file__, *words]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    assert found.returncode == ExitCode.USAGE, found.stderr
    return found.stderr


def test_recover_is_for_processes_that_are_started_here() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert "found 2 processes that torchrun started" in refused("dp2", **env)


def test_recover_takes_its_own_ports() -> None:
    assert "leave --port out" in refused("dp2", "--port", "29500")
