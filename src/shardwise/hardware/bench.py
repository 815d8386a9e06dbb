"""`measure`: what the devices of this machine and the links between them do, as a `Cluster` with measured numbers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol, TypeVar

from shardwise.errors import UsageError
from shardwise.hardware import stages
from shardwise.hardware.cluster import AttentionKernels, Cluster, Device, Link, Rates, load_cluster
from shardwise.hardware.fit import (
    Heads,
    Message,
    Product,
    Stream,
    fit_attention,
    fit_link,
    fit_products,
    fit_stream,
    nearest_preset,
)
from shardwise.hardware.local import Found, preset_named
from shardwise.plan.costs.links import Group
from shardwise.plan.stack import load_stack

SHARES = {"products": 0.4, "memory": 0.1, "attention": 0.1, "host": 0.05, "links": 0.35}
"""Of the time that is given."""
MAIN = ("fp32", "bf16")
"""Dtypes that get twice the time of others."""
Reading = TypeVar("Reading", Product, Stream, Heads, Message)


class Runner(Protocol):
    """Runs a module-level function on every rank of a world at once; its results by rank."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """All results, by rank."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What was timed, with the ranks' medians."""

    found: Found
    nodes: int
    per_node: int
    products: tuple[Product, ...]
    copies: tuple[Stream, ...]
    streams: tuple[Stream, ...]
    heads: tuple[Heads, ...]
    launch: float
    """Seconds of the host per kernel."""
    product_launch: float
    """And per matrix product."""
    biased_launch: float
    """And per product with a bias."""
    host: float
    """Bytes per second from the host to a device."""
    links: Mapping[str, tuple[Message, ...]]
    """By tier; a tier without two ranks is not there."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A cluster, and how far the planner's formulas are with its constants from what was timed."""

    cluster: Cluster
    nearest: str
    """The preset that it is nearest to: what was not measured is from there."""
    launch: float
    """Seconds of the host per kernel."""
    errors: Mapping[str, float]
    """Median |predicted / measured - 1| of products, streams, attention and the tiers of links."""
    readings: Readings
    seconds: float
    """That it took."""


def measure(
    run: Runner, *, seconds: float = 30.0, on_stage: Callable[[str, float], None] = lambda _name, _done: None
) -> Measured:
    """Measure devices and links under a world of ranks.

    Args:
        run: runs a function on all ranks, which have a launcher's variables.
        seconds: about what it may take.
        on_stage: told the name of each stage before it starts, and the share of the work that is done.

    Returns:
        Rates, curve, bandwidth, stream, attention, host bandwidth, and each tier of links that has two ranks. What such
        a world cannot show is the nearest preset's, and `Cluster.origins` says so.

    Raises:
        UsageError: nodes whose devices differ.

    Cost: about `seconds`, and some seconds to start ranks and to fit.

    >>> measure(partial(World(2), 2)).cluster.local.origin  # doctest: +SKIP
    'measured'
    """
    start = time.perf_counter()
    readings = _read(run, seconds, on_stage)
    on_stage("fitting", 0.97)
    found = fitted(readings)
    return replace(found, seconds=time.perf_counter() - start)


def _read(run: Runner, seconds: float, on_stage: Callable[[str, float], None]) -> Readings:
    on_stage("devices", 0.0)
    places = run(stages.place)
    found, per_node = places[0]
    kinds = {here.names[0] for here, _ in places}
    if len(kinds) > 1 or {count for _, count in places} != {per_node}:
        raise UsageError(
            f"probe: nodes differ: found {', '.join(sorted(kinds))} and {sorted({n for _, n in places})} ranks per "
            "node, needed equal nodes; a job goes at the pace of its slowest node: measure nodes of one kind at a time"
        )
    done = 0.02
    products: list[Product] = []
    weights = {dtype: 2.0 if dtype in MAIN else 1.0 for dtype in found.dtypes}
    for dtype, weight in weights.items():
        on_stage(f"products {dtype}", done)
        share = SHARES["products"] * weight / sum(weights.values())
        products += _middle(run(stages.products, dtype, seconds * share))
        done += share * 0.95
    results: dict[str, list[Any]] = {}
    for name in ("memory", "attention", "host", "links"):
        on_stage(name, done)
        more = (per_node,) if name == "links" else ()
        results[name] = run(getattr(stages, name), *more, seconds * SHARES[name])
        done += SHARES[name] * 0.95
    copies, streams = (_middle(rows) for rows in zip(*results["memory"], strict=True))
    tiers = {tier: _middle([rank[tier] for rank in results["links"]]) for tier in results["links"][0]}
    launch, product, biased, host = (median(values) for values in zip(*results["host"], strict=True))
    return Readings(
        found=found, nodes=len(places) // per_node, per_node=per_node, products=tuple(products), copies=copies,
        streams=streams, heads=_middle(results["attention"]), launch=launch, product_launch=product,
        biased_launch=biased, host=host, links=tiers,
    )  # fmt: skip


def _middle(ranks: Iterable[Sequence[Reading]]) -> tuple[Reading, ...]:
    """The same readings with the median of the ranks' times."""
    times: dict[Reading, list[float]] = defaultdict(list)
    for rows in ranks:
        for row in rows:
            times[replace(row, seconds=0.0)].append(row.seconds)
    return tuple(replace(row, seconds=median(values)) for row, values in times.items())


def fitted(readings: Readings) -> Measured:
    """The cluster whose constants tell the readings back; `seconds` is left 0.

    A device that a preset is known to be keeps the preset's nominal numbers, and the shares of them are measured; of
    another, what the best product and the best copy reached counts as nominal.
    """
    found = readings.found
    errors: dict[str, float] = {}
    preset = "cpu" if found.kind == "cpu" else preset_named(found.names[0], min(found.memory))
    known = load_cluster(preset).device if preset and preset != "cpu" else None
    bandwidth = known.bandwidth if known else max(row.size / row.seconds for row in readings.copies + readings.streams)
    memory = found.host_memory / readings.per_node if found.kind == "cpu" else min(found.memory)
    stream, errors["element-wise"] = fit_stream(readings.streams, bandwidth)
    bare = Device(
        name=preset or found.names[0], memory=float(memory), rates=Rates(fp32=1.0, bf16=1.0), bandwidth=bandwidth,
        stream=stream, origin="measured",
    )  # fmt: skip
    told = fit_products(readings.products, bare, units=found.units, nominal=known.rates if known else None)
    errors["products"] = told.error
    seen = {row.dtype: getattr(told.rates, row.dtype) for row in readings.products}
    rates = replace(known.rates, **seen) if known else told.rates
    device = replace(bare, rates=rates, curve=told.curve, low_best=told.low_best)
    stack = load_stack("shardwise")
    share, errors["attention"] = fit_attention(readings.heads, device, stack)
    nearest = preset or nearest_preset(device)
    like = load_cluster(f"{nearest}:{readings.per_node}x{readings.nodes}")
    kernels = (
        replace(known.attention, **{stack.attention: share})
        if known
        else AttentionKernels(flash1=share, flash2=share, flash3=share)
    )
    if "fp8" not in seen:
        device = replace(device, low_best=like.device.low_best)
    device = replace(device, attention=kernels, context=like.device.context)
    cluster, missing = _linked(readings, like.with_(device=device, host_memory=float(found.host_memory)), errors)
    origins = (
        f"device.memory: read, {'a share of the host per rank' if preset == 'cpu' else 'the least of the devices'}",
        f"device.context: table, {nearest}",
        *(
            f"device.rates.{name}: table, {nearest}"
            for name in vars(rates)
            if name not in seen and getattr(rates, name)
        ),
        *(f"{tier}: table, {nearest}: no two ranks on such links" for tier in missing),
        "nodes: read, from the ranks",
    )
    name = f"{nearest if preset else device.name}:{readings.per_node}x{readings.nodes}, measured"
    cluster = cluster.with_(
        name=name, origins=origins, host_bandwidth=readings.host, launch=readings.launch,
        product_launch=readings.product_launch, biased_launch=readings.biased_launch,
    )  # fmt: skip
    return Measured(
        cluster=cluster, nearest=nearest, launch=readings.launch, errors=errors, readings=readings, seconds=0.0
    )


def _linked(readings: Readings, cluster: Cluster, errors: dict[str, float]) -> tuple[Cluster, list[str]]:
    """(the cluster with the tiers that were measured, the others)."""
    measured = []
    if "local" in readings.links:
        link, errors["local links"] = fit_link(readings.links["local"], Group(readings.per_node, 1), cluster)
        cluster = cluster.with_(local=link)
        measured.append("local")
    if "network" in readings.links:
        group = Group(readings.nodes, readings.per_node)
        tier = "network" if group.inside(cluster) < group.size else "local"  # a fast domain may span nodes
        if not measured:  # one rank per node: nothing but the network binds
            cluster = cluster.with_(local=Link(bandwidth=1e15, latency=0.0))
        link, errors["links between nodes"] = fit_link(readings.links["network"], group, cluster)
        cluster = cluster.with_(**{tier: link}, **({} if measured else {"local": link}))
        measured += [tier, "local"]
    return cluster, [tier for tier in ("local", "network") if tier not in measured]
