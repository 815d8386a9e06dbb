"""What would fit where nothing does: more nodes or host memory, shorter samples, one word allowed or not forbidden.

And a near batch that is divided better, where the batch decides. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.hardware.cluster import GIB, Cluster, load_cluster
from shardwise.plan.hosting import host_share, on_host
from shardwise.plan.plan import SCHEDULES
from shardwise.plan.repair import divisors
from shardwise.plan.search import HEADROOM, Candidate, Goal, Search, Walk, near_batches
from shardwise.plan.searching.space import OPT_IN, Space
from shardwise.plan.shorthand import axis_word

SECONDS = 4.0
"""Of processor time: no further question is begun after so many."""
DEVICES = 16384
"""More are not advised."""
LEAST_SEQ = 128
HOST = 1e15
"""Bytes of host memory per node: a cluster file may not say more."""
LESS = 0.9
"""So much of the host memory that a plan needs is tried next."""
USUAL = (
    *(kind for kind in SCHEDULES if kind != "1f1b"),
    "recompute=every",
    "recompute=ratio",
    "gather",
    "ulysses",
    "zero2",
)
"""Left out, so that each question takes a fraction of a second: some plan that fits is wanted, not the best."""


@dataclass(frozen=True)
class Advice:
    """One change to what was asked, and a plan that fits then: it was estimated in full."""

    change: str
    """In words, with what to write."""
    found: Candidate


def advise(space: Space, seconds: float = SECONDS) -> tuple[Advice, ...]:
    """Changes under which a plan fits, each alone; only what was tried and fits.

    Each plan is the fastest of the usual ones (1F1B, a ring, recompute of blocks or operators): there may be better.

    Cost: some 20 searches of 0.1 to 1 s, as many as begin within `seconds`.
    """
    tries = _Tries(space, time.process_time() + seconds)
    return tuple(advice for make in (_nodes, _host, _words, _seq) for advice in make(tries))


NEAR = 0.1
"""Of the batch: as far away others are looked at."""
MORE = 0.02
"""Of tokens per second: what is worth another batch."""


def better_batch(search: Search, seconds: float = SECONDS) -> Advice | None:
    """The nearest global batch of which a plan does more tokens per second, where this one is divided badly.

    That is where the devices do not divide it, or its samples per device are a prime, or twice one: then no plan has
    micro-batches between one sample and all of them. None: it is not, or no other one does better.

    Cost: as many searches as begin within `seconds`, at most 6.
    """
    space, best = search.space, search.best
    batch, world = space.workload.global_batch, space.cluster.world
    count, rest = divmod(batch, world)
    if best is None or search.goal == "memory" or not count or (not rest and (count < 11 or len(divisors(count)) > 4)):
        return None
    tries = _Tries(space, time.process_time() + seconds)
    near = {other for more in (1, 2, 8) for other in near_batches(batch, world * more)} - {batch}
    for other in sorted(near, key=lambda each: (abs(each - batch), each)):
        if abs(other - batch) <= max(NEAR * batch, world):
            found = tries.best(search.goal, workload=replace(space.workload, global_batch=other))
            if found and found.score(search.goal) / other * (1 + MORE) < best.score(search.goal) / batch:
                return Advice(f"--global-batch {other}", found)
    return None


@dataclass
class _Tries:
    """Searches until a deadline."""

    space: Space
    deadline: float

    def fit(self, **changes: Any) -> Candidate | None:
        """The fastest plan when some of cluster, workload, allow and forbid are others; None: none was found."""
        return self._first("time", changes, USUAL)

    def best(self, goal: Goal, **changes: Any) -> Candidate | None:
        """The best plan of all."""
        return self._first(goal, changes, ())

    def fits(self, **changes: Any) -> bool:
        """Whether there is one: what needs least is found in half the time."""
        return self._first("memory", changes, USUAL) is not None

    def _first(self, goal: Goal, changes: dict[str, Any], forbid: tuple[str, ...]) -> Candidate | None:
        if time.process_time() > self.deadline:
            return None
        try:
            asked = replace(self.space, **changes)
            space = replace(asked, forbid=(*asked.forbid, *forbid))
            return next(iter(Walk(space, goal, space.cluster.device.memory * (1 - HEADROOM)).run(1)), None)
        except ShardwiseError:  # the device has no such unit, or the batch no such division
            return None


def _nodes(tries: _Tries) -> Iterator[Advice]:
    """The fewest nodes that were found: doubled until a plan fits, then halved between the two."""
    cluster = tries.space.cluster
    least, most, fits = cluster.nodes, cluster.nodes * 2, False
    while most * cluster.per_node <= DEVICES and not fits:
        fits = tries.fits(cluster=cluster.with_(nodes=most))
        least, most = (least, most) if fits else (most, 2 * most)
    while fits and most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if tries.fits(cluster=cluster.with_(nodes=middle)) else (middle, most)
    if fits and (found := tries.fit(cluster=cluster.with_(nodes=most))):
        words = f"{cluster.device.name}:{cluster.per_node}x{most}" + "".join(cluster.name.partition("@")[1:])
        word = f" ({words})" if _is_preset(words, cluster.with_(nodes=most)) else ""
        yield Advice(f"{most} nodes in place of {cluster.nodes}{word}", found)


def _host(tries: _Tries) -> Iterator[Advice]:
    """Host memory for the states of a plan that offloads them: of those that were tried, the one that needs least."""
    cluster = tries.space.cluster
    there, least, needs, room = host_share(cluster), None, 0.0, HOST / cluster.per_node
    while room > there and (found := tries.fit(cluster=cluster.with_(host_memory=room * cluster.per_node))):
        least, needs = found, on_host(found.memory, found.plan, cluster.per_node)
        room = needs * LESS
    if least and needs > there:
        now = f"{there / GIB:.0f}{'' if cluster.host_memory else ' (assumed)'}"
        yield Advice(f"{ceil(needs / GIB)} GiB of host memory per device in place of {now}", least)


def _is_preset(words: str, cluster: Cluster) -> bool:
    """Whether the words name such a cluster, and not one of other links or another memory."""
    try:
        return replace(load_cluster(words), name=cluster.name) == replace(cluster, origins=())
    except ShardwiseError:
        return False


def _words(tries: _Tries) -> Iterator[Advice]:
    """Each word that could be allowed, and each that was forbidden, alone."""
    space = tries.space
    for word in OPT_IN:
        known = (*space.allow, *space.forbid, *dict(space.left_out))
        found = None if word in known else tries.fit(allow=(*space.allow, word))
        if found:
            yield Advice(f"--allow {word} ({OPT_IN[word]})", found)
    for word in dict.fromkeys(space.forbid):
        found = tries.fit(forbid=tuple(other for other in space.forbid if other != word))
        if found:
            yield Advice(f"without --forbid {axis_word(word)}", found)


def _seq(tries: _Tries) -> Iterator[Advice]:
    """The longest of halved samples that fits; the shortest is tried first, as states alone may be too much."""
    workload = tries.space.workload
    lengths = [workload.seq_len >> n for n in range(1, 24) if workload.seq_len >> n >= LEAST_SEQ]
    spec = tries.space.spec
    if not spec or spec.patch or not lengths or not tries.fits(workload=replace(workload, seq_len=lengths[-1])):
        return
    for length in lengths:
        found = tries.fit(workload=replace(workload, seq_len=length))
        if found:
            yield Advice(f"--seq {length}", found)
            return
