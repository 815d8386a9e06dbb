"""Which cores a search looks at, and in which order. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from shardwise.plan.plan import SCHEDULES, Axes, Float8, Float8Kind, Plan, Schedule
from shardwise.plan.searching.families import Core
from shardwise.plan.searching.space import Space

Queue = Iterator[list[Core]]
"""Cores of which the next ones are looked at when those before them are divided; of each list the best alone."""


def queues_of(cores: list[Core]) -> Iterator[Queue]:
    """Of cores that are cut alike one queue, by falling micro-batches: smaller ones fill kernels no better.

    Alike are those that differ in the exchange of context, which changes no size, or in sequence and loss parallelism,
    which only make sizes smaller.
    """
    cuts: dict[tuple[object, ...], dict[int, list[Core]]] = {}
    for core in cores:
        sizes = cuts.setdefault((core.tp, core.cp, core.ep, core.precision, core.float8), {})
        sizes.setdefault(core.samples, []).append(core)
    for sizes in cuts.values():
        yield iter([sizes[samples] for samples in sorted(sizes, reverse=True)])


def one_recipe(space: Space, cores: list[Core]) -> dict[Core, tuple[Float8Kind, ...]]:
    """Of cores that differ in recipes of float8 that cost the same, one; and the others' recipes."""
    groups: dict[tuple[bool, ...], list[Float8Kind]] = {}
    for recipe in sorted({core.float8 for core in cores}):
        groups.setdefault((recipe == "none", *_compiled(space, recipe)), []).append(recipe)
    firsts = {group[0]: tuple(group[1:]) for group in groups.values()}
    return {core: firsts[core.float8] for core in cores if core.float8 in firsts}


def _compiled(space: Space, recipe: Float8Kind) -> Iterator[bool]:
    """Whether plans with a recipe are compiled, in all cases that decide on it."""
    modes = {recompute.mode: recompute for recompute in space.recomputes}
    for (pp, kind), cp, recompute in product([(1, "1f1b"), *product((2,), SCHEDULES)], (1, 2), modes.values()):
        plan = Plan(axes=Axes(cp=cp, pp=pp), schedule=Schedule(kind=kind), recompute=recompute)
        yield space.compiles(plan.with_(float8=Float8(recipe=recipe)))
