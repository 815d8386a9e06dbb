"""Constants of a `Cluster` from timings: least squares over the planner's own formulas, without torch.

Each constant is the one with which `plan.costs.kernels` or `plan.costs.links` tells the measured times back with the
least squared logarithm of the ratio. `error` is the median of |predicted / measured - 1| that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from statistics import median

from shardwise.hardware.cluster import Cluster, Curve, Device, Link, Rates, device_names, load_cluster
from shardwise.model.ops import Attention
from shardwise.plan.costs.kernels import PLAIN, TAIL, attention_time, matmul_time, misaligned
from shardwise.plan.costs.links import Group, collective_time
from shardwise.plan.stack import Stack

UNITS = (1, 16, 32, 64, 80, 108, 132, 148, 192, 256, 304)
"""Tried where the device does not say how many units it has."""
LOW = ("fp8", "fp4")


@dataclass(frozen=True)
class Product:
    """`[m, k] x [k, n]` in a dtype."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        """Operations per second."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class Stream:
    """An element-wise operator over memory, by name: bytes read and written."""

    name: str
    size: float
    seconds: float


@dataclass(frozen=True)
class Heads:
    """Forward of fused causal attention: sequences, heads of a size, tokens."""

    batch: int
    heads: int
    size: int
    length: int
    seconds: float


@dataclass(frozen=True)
class Message:
    """A collective of `size` bytes, counted as `plan.costs.links.collective_time` counts them."""

    kind: str
    size: int
    seconds: float


@dataclass(frozen=True)
class Products:
    """What products show of a device: rates, and share of them by shape."""

    rates: Rates
    curve: Curve
    low_best: float
    error: float


def least(function: Callable[[float], float], low: float, high: float, grid: int = 16) -> float:
    """Where a function of a positive number is least: a grid in its logarithm, then the golden section.

    >>> round(least(lambda x: (x - 3.0) ** 2, 0.1, 100.0), 3)
    3.0
    """
    points = [low * (high / low) ** (step / grid) for step in range(grid + 1)]
    best = min(range(grid + 1), key=lambda index: function(points[index]))
    left, right = log(points[max(best - 1, 0)]), log(points[min(best + 1, grid)])
    golden = (5**0.5 - 1) / 2
    inner = [right - golden * (right - left), left + golden * (right - left)]
    values = [function(exp(x)) for x in inner]
    while right - left > 1e-4:
        if values[0] < values[1]:
            right, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = right - golden * (right - left)
            values[0] = function(exp(inner[0]))
        else:
            left, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = left + golden * (right - left)
            values[1] = function(exp(inner[1]))
    return exp((left + right) / 2)


def fit_products(
    products: Sequence[Product], device: Device, *, units: int = 0, nominal: Rates | None = None
) -> Products:
    """Rates by dtype, and the curve, of a device whose `bandwidth` and `stream` are known already.

    Args:
        products: of at least one dtype; several inner sizes, or `depth` is not determined.
        device: gives bandwidth and stream; its rates and its curve are not read.
        units: of the device; 0: the number with which the fit is best.
        nominal: rates of the data sheet; None: the best that a product reached counts as nominal.

    The dtype with the highest rate above 8 bits sets the curve; a rate of another dtype is such that the curve holds
    for it too, so that what is predicted is what was measured.
    """
    apart = [p for p in products if misaligned(p.n, p.k)]
    products = [p for p in products if not misaligned(p.n, p.k)]
    by_dtype = {name: [p for p in products if p.dtype == name] for name in dict.fromkeys(p.dtype for p in products)}
    wide = [name for name in by_dtype if name not in LOW]
    main = max(wide, key=lambda name: max(p.rate for p in by_dtype[name]))

    def bare(depth: float, count: int) -> Device:
        return replace(device, curve=Curve(best=1.0, units=count, depth=depth), low_best=1.0)

    def loss(depth: float, count: int) -> float:
        here = bare(depth, count)
        return _misfit(by_dtype[main], here, _top(by_dtype[main], here))

    tried = [(count, least(partial(loss, count=count), 1.0, 4096.0)) for count in ((units,) if units else UNITS)]
    count, depth = min(tried, key=lambda pair: loss(pair[1], pair[0]))
    found = {name: _top(those, bare(depth, count)) for name, those in by_dtype.items()}
    seen = {name: max(p.rate for p in those) for name, those in by_dtype.items()}
    top = nominal.of(main) if nominal else seen[main]
    best = found[main] / top
    low_best = best
    rates = {name: found[name] / best for name in wide} | {main: top}
    if "fp32" in rates and found["fp32"] / max(best, PLAIN) <= top / 2:
        rates["fp32"] = found["fp32"] / max(best, PLAIN)
    for name in set(by_dtype) & set(LOW):
        rates[name] = nominal.of(name) if nominal else seen[name]
        low_best = found[name] / rates[name]
    curve = Curve(best=best, units=count, depth=depth)
    whole = Rates(**{"fp32": rates[main], "bf16": rates[main], **rates})
    fitted = replace(device, rates=whole, curve=curve, low_best=low_best)
    if apart:
        even = (matmul_time.__wrapped__(p.m, p.n, p.k, fitted, p.dtype) for p in apart)
        slower = [time / p.seconds * misaligned(p.n, p.k) for time, p in zip(even, apart, strict=True)]
        curve = replace(curve, unaligned=min(1.0, exp(sum(map(log, slower)) / len(slower))))
    told = [matmul_time.__wrapped__(p.m, p.n, p.k, fitted, p.dtype) / p.seconds for p in products]
    return Products(whole, curve, low_best, _error(told))


def _top(products: Sequence[Product], bare: Device) -> float:
    """The rate of an endless product that explains those of one dtype best."""
    fastest = max(p.rate for p in products)
    return least(partial(_misfit, products, bare), fastest / 2, fastest * 64)


def _misfit(products: Sequence[Product], bare: Device, top: float) -> float:
    device = replace(bare, rates=Rates(fp32=top, bf16=top, tf32=top, fp16=top, fp8=top, fp4=top))
    # without the cache: a search asks each question once
    told = (matmul_time.__wrapped__(p.m, p.n, p.k, device, p.dtype) / p.seconds for p in products)
    return sum(log(ratio) ** 2 for ratio in told)


def fit_stream(streams: Sequence[Stream], bandwidth: float) -> tuple[float, float]:
    """(share of the bandwidth that element-wise operators reach, error)."""
    share = exp(sum(log(s.size / max(s.seconds - TAIL, s.seconds / 10)) for s in streams) / len(streams)) / bandwidth
    return share, _error([(s.size / (bandwidth * share) + TAIL) / s.seconds for s in streams])


def fit_attention(readings: Sequence[Heads], device: Device, stack: Stack) -> tuple[float, float]:
    """(share of the bf16 rate that fused attention reaches with heads of 128, error)."""

    def told(share: float) -> list[float]:
        kernels = replace(device.attention, **{stack.attention: share})
        known = replace(device, attention=kernels)
        return [
            attention_time(
                Attention(heads=r.heads, kv_heads=r.heads, qk_dim=r.size, v_dim=r.size),
                (r.batch, r.length, r.length), 1, known, stack,
            ) / r.seconds
            for r in readings
        ]  # fmt: skip

    share = least(lambda value: sum(log(ratio) ** 2 for ratio in told(value)), 1e-3, 1e2)
    return share, _error(told(share))


def fit_link(messages: Sequence[Message], group: Group, cluster: Cluster) -> tuple[Link, float]:
    """(the tier that a group's messages pass, error); in a group that crosses domains it is the network."""
    tier = "network" if group.inside(cluster) < group.size else "local"

    def told(bandwidth: float, latency: float) -> list[float]:
        known = cluster.with_(**{tier: Link(bandwidth=bandwidth, latency=latency)})
        # without the cache, as above
        return [collective_time.__wrapped__(m.kind, m.size, group, known) / m.seconds for m in messages]

    def loss(bandwidth: float, latency: float) -> float:
        return sum(log(ratio) ** 2 for ratio in told(bandwidth, latency))

    def latency_for(bandwidth: float) -> float:
        return least(lambda latency: loss(bandwidth, latency), 1e-7, 1e-1)

    bandwidth = least(lambda value: loss(value, latency_for(value)), 1e6, 1e13)
    latency = latency_for(bandwidth)
    return Link(bandwidth=bandwidth, latency=latency, origin="measured"), _error(told(bandwidth, latency))


def nearest_preset(device: Device) -> str:
    """The preset whose 16-bit rate, bandwidth and memory are nearest, by the sum of the logarithms of the ratios.

    >>> nearest_preset(load_cluster("h100").device)
    'h100'
    """

    def distance(name: str) -> float:
        other = load_cluster(name).device
        pairs = (
            (device.rates.of("bf16"), other.rates.of("bf16")),
            (device.bandwidth, other.bandwidth),
            (device.memory, other.memory),
        )
        return sum(abs(log(mine / its)) for mine, its in pairs)

    return min(device_names(), key=distance)


def _error(ratios: Iterable[float]) -> float:
    return median(abs(ratio - 1) for ratio in ratios)
