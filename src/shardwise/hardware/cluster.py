"""`Cluster`: devices, memory, rates and links as data, each number with where it came from.

Rates are nominal unless named otherwise; what a kernel reaches of them is `Curve`, by shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from math import inf
from typing import Any, Literal, NamedTuple

from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.hardware.presets import MIXED, domain_fault, on_preset, read_word
from shardwise.hardware.presets import device_names as device_names
from shardwise.records import RecordError, as_dict, from_dict, hash_of, located, read_kind, write_file

Origin = Literal["measured", "read", "table", "assumed"]
GIB = 2**30


def _refuse(what: str, record: object, above_zero: str, from_zero: str = "") -> None:
    for name in f"{above_zero} {from_zero}".split():
        value, zero = getattr(record, name), name in from_zero.split()
        if not (0 < value < inf or (zero and value == 0)):
            raise ConfigError(
                f"{what}: {name}: found {value}, needed {'at least 0' if zero else 'more than 0'}, finite"
            )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Floating point operations per second by dtype of the inputs, dense; 0: the device has no such unit."""

    fp32: float
    bf16: float
    tf32: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    fp4: float = 0.0

    def __post_init__(self) -> None:
        _refuse("rates", self, "fp32 bf16", "tf32 fp16 fp8 fp4")

    def of(self, dtype: str) -> float:
        """The rate of a dtype; fp64 counts as half of fp32, a missing 16-bit or tf32 unit as the next wider one.

        Raises:
            UsageError: a low precision that the device has no unit for.
        """
        if dtype == "fp64":
            return self.fp32 / 2
        rate: float = getattr(self, dtype)
        if rate:
            return rate
        if dtype in ("fp8", "fp4"):
            raise UsageError(f"dtype {dtype}: the device has no unit for it; needed one of its rates, e.g. bf16")
        return self.bf16 if dtype == "fp16" else self.fp32


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a matrix product reaches of the nominal rate, by shape: see `plan.costs.kernels.matmul_time`."""

    best: float = 0.8
    """Share of the nominal rate that the best shape sustains, under the power limit."""
    units: int = 108
    """Streaming multiprocessors (or compute units): tiles run in waves of so many."""
    depth: float = 384.0
    """Inner size at which half of `best` would be reached, were the other sizes unbounded."""
    unaligned: float = 1.0
    """Share of all that in 16 bits with a row of a size that is no multiple of 8; half of it with an odd one."""

    def __post_init__(self) -> None:
        _refuse("curve", self, "best units unaligned", "depth")


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """Share of the 16-bit rate that each generation of fused attention reaches, forward, with heads of 128."""

    flash1: float = 0.3
    flash2: float = 0.5
    flash3: float = 0.5
    triton: float = 0.0  # those in Triton of 2023; 0: as flash2
    rise: float = 512.0  # keys at which flash2 reaches half of its share; others do at 512

    def __post_init__(self) -> None:
        _refuse("attention", self, "flash1 flash2 flash3 rise", "triton")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or the cores of a CPU).

    `memory` is what the framework can see, in bytes; `context` what driver, context and libraries take of it before
    the first tensor.
    """

    name: str
    memory: float
    rates: Rates
    bandwidth: float
    """Bytes per second of device memory, nominal."""
    context: float = 0.6 * GIB
    curve: Curve = field(default_factory=Curve)
    low_best: float = 0.7
    """`Curve.best` for fp8 and fp4 products, with their casts."""
    stream: float = 0.8
    """Share of `bandwidth` that an element-wise kernel reaches."""
    attention: AttentionKernels = field(default_factory=AttentionKernels)
    price: float = 0.0
    """Currency per device and hour; 0: not given."""
    origin: Origin = "table"

    def __hash__(self) -> int:
        return hash_of(self)

    def __post_init__(self) -> None:
        _refuse(f"device {self.name}", self, "memory bandwidth low_best stream", "context price")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One tier of links: time of a message of n bytes between two devices is `latency + n / bandwidth`."""

    bandwidth: float
    """Bytes per second and device, one way, that a long message reaches."""
    latency: float
    """Seconds of one step of a collective."""
    origin: Origin = "table"
    wires: int = 0
    """Of a tier without a switch: the wires of a device to others, which reach `bandwidth` together; 0: a switch."""

    def __post_init__(self) -> None:
        _refuse("link", self, "bandwidth", "latency wires")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Bytes per second of samples, as models are given them, that all loader processes of a node make together."""

    rows: float = 2e9
    """Rows of token ids that are mapped from a file. Assumed: what one core of a Xeon makes (measured: 1.8e9)."""
    decoded: float = 4e9
    """Pictures and sounds, decoded. Assumed: 40 cores at 160 pictures of 224 x 224 x 3 in fp32 each."""
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        _refuse("loading", self, "rows decoded")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` x `per_node` equal devices. `domain` devices share the fast tier (`local`); beyond it is `network`.

    >>> load_cluster("h100:8x16").world
    128
    """

    name: str
    device: Device
    nodes: int
    per_node: int
    local: Link
    network: Link
    domain: int = 0
    """Devices of one fast domain; 0: a node."""
    host_bandwidth: float = 25e9
    """Bytes per second between a device and its host's memory, one way."""
    host_memory: float = 0.0
    """Bytes per node; 0: not known."""
    launch: float = 0.0
    """Seconds of the host per kernel, as a probe found it; 0: as the software stack says."""
    product_launch: float = 0.0
    """The same per matrix product, whose library picks a kernel; 0: as any."""
    biased_launch: float = 0.0
    """The same per product with a bias, for which another library looks anew each time; 0: as one without."""
    loading: Loading = field(default_factory=Loading)
    origins: tuple[str, ...] = ()
    """`name: measured|read|table|assumed, how`, a line for each number that has another origin than its record says."""

    def __hash__(self) -> int:
        return hash_of(self)

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster {self.name}: {name}: found {getattr(self, name)}, needed at least 1")
        _refuse(f"cluster {self.name}", self, "host_bandwidth", "domain host_memory " + " ".join(_HOST))
        object.__setattr__(self, "domain", self.domain or self.per_node)

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.nodes * self.per_node

    def with_(self, **changes: Any) -> Cluster:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a .toml or .json file, atomically."""
        comment = " ".join(f"{self.name}: {self.nodes} x {self.per_node} {self.device.name}".split())
        write_file(path, {"format": 1, **as_dict(self)}, comment=comment)


def load_cluster(source: str | os.PathLike[str]) -> Cluster:
    """A preset (`h100`, `h100:8` one node of 8, `h100:8x16` 16 nodes of 8), or a .toml or .json file.

    A preset's links are those that its device usually has; `h100:8x16@eth100` names the network, and
    `h100:8x16@pcie5/eth100` the fast tier too.

    Raises:
        UsageError: an unknown device or link, with the nearest; a size that is no number.
        ConfigError: a file that does not describe a cluster, with key and line.
    """
    if isinstance(source, str) and not source.endswith((".toml", ".json")):
        word = read_word(source)
        local, network = (from_dict(Link, link) for link in (word.local, word.network))
        size: dict[str, Any] = {"nodes": word.nodes, "per_node": word.per_node, "origins": word.origins, **word.shape}
        return Cluster(name=source, device=from_dict(Device, word.device), local=local, network=network, **size)
    data, text = read_kind(source, "cluster")
    try:
        return cluster_from(data)
    except (ConfigError, PlanError) as error:
        raise located(error, source, text) from None


def cluster_from(data: Mapping[str, Any]) -> Cluster:
    """The cluster that plain data describes; `origins` says which numbers are not in it.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a number that can only be in another unit, nodes that
            differ, or another format.
    """
    rest = on_preset(data)
    found = rest.pop("format", 1)
    if found != 1 or isinstance(found, bool):
        raise RecordError(
            ("format",),
            f"found {found!r}, this version of Shardwise reads 1; write the file with the Shardwise that reads it "
            "(`shardwise probe`, or `load_cluster(...).save(...)`)",
        )
    for key in ("device", "nodes", "per_node"):
        if isinstance(rest.get(key), list):
            raise RecordError((key,), f"found a list; {MIXED}")
    for path in (("name",), ("device", "name")):
        word = _at(rest, path)
        if isinstance(word, str) and not (word.strip() and word.isprintable()):
            raise RecordError(path, f"found {word!r}, needed a name in one line")
    for keys in _QUANTITIES:
        _check(keys, _at(rest, keys), measured=_at(rest, (keys[0], "origin")) == "measured")
    cluster = from_dict(Cluster, _with_origins(rest))
    fault = domain_fault(cluster.domain, cluster.nodes, cluster.per_node, cluster.device.name)
    if fault:
        raise RecordError(("domain",), fault)
    if cluster.device.context >= cluster.device.memory:
        given = f"found {cluster.device.context:g} bytes, needed less than memory, {cluster.device.memory:g}"
        raise RecordError(("device", "context"), given)
    return cluster


class _Quantity(NamedTuple):
    """What a number of a file is in, and where it is plausible."""

    unit: str
    example: str
    least: float
    most: float
    zero: bool = False
    """0 is a value too: there is none, or nobody knows."""
    slips: tuple[tuple[str, int, float, float], ...] = ()
    """Units that people write instead: name, its power of ten, and the numbers that are usual in it."""


_HOST = ("launch", "product_launch", "biased_launch")
_FLOPS = (("TFLOP/s", 12, 5, 2e4), ("GFLOP/s", 9, 2e4, 2e7), ("PFLOP/s", 15, 0.01, 5))
_BYTES = (("GB", 9, 0.5, 2048), ("MB", 6, 2048, 2e6))
_CONTEXT = (("GB", 9, 0.05, 50), ("MB", 6, 50, 5e4))
_RATE = _Quantity("FLOP/s", "989e12", 1e8, 1e17, slips=_FLOPS)
_SHARE = _Quantity("fractions of 1", "0.8", 1e-4, 1, slips=(("per cent", -2, 10, 101),))
_LINK = _Quantity(
    "bytes per second", "45e9", 1e6, 1e14, slips=(("GB/s", 9, 0.1, 2e3), ("Gbit/s", 9, 10, 2e3), ("MB/s", 6, 2e3, 1e6))
)
_LATENCY = _Quantity("seconds", "12e-6", 0, 1, slips=(("microseconds", -6, 1, 2e3), ("nanoseconds", -9, 2e3, 1e6)))
_QUANTITIES: Mapping[tuple[str, ...], _Quantity] = {
    ("nodes",): _Quantity("whole nodes", "16", 1, 1e6),
    **{(name,): _Quantity("whole devices", "8", 1, 1e6, zero=name == "domain") for name in ("per_node", "domain")},
    ("device", "memory"): _Quantity("bytes", "80e9", 1e8, 1e14, slips=_BYTES),
    **{("device", "rates", name): _RATE for name in ("fp32", "bf16")},
    **{("device", "rates", name): _RATE._replace(zero=True) for name in ("tf32", "fp16", "fp8", "fp4")},
    ("device", "bandwidth"): _Quantity(
        "bytes per second", "3350e9", 1e8, 1e15, slips=(("GB/s", 9, 20, 2e4), ("TB/s", 12, 0.1, 20))
    ),
    ("device", "context"): _Quantity("bytes", "600e6", 1e6, 1e12, zero=True, slips=_CONTEXT),
    ("device", "curve", "units"): _Quantity("whole units", "132", 1, 1e6),
    ("device", "curve", "depth"): _Quantity("elements", "384", 0, 1e6),
    **{("device", *keys.split(".")): _SHARE for keys in ("curve.best", "curve.unaligned", "low_best", "stream")},
    **{("device", "attention", name): _SHARE for name in ("flash1", "flash2", "flash3")},
    ("device", "attention", "triton"): _SHARE._replace(zero=True),
    ("device", "attention", "rise"): _Quantity("keys", "512", 1, 1e6),
    ("device", "price"): _Quantity("currency per hour", "2.5", 0, 1e6),
    **{keys: _LINK for keys in (("local", "bandwidth"), ("network", "bandwidth"), ("host_bandwidth",))},
    **{keys: _LATENCY for keys in (("local", "latency"), ("network", "latency"), *((name,) for name in _HOST))},
    **{(tier, "wires"): _Quantity("whole wires", "7", 0, most) for tier, most in (("local", 64), ("network", 0))},
    ("host_memory",): _Quantity("bytes", "2e12", 1e8, 1e15, zero=True, slips=_BYTES),
    **{("loading", name): _LINK for name in ("rows", "decoded")},
}
_RECORDS: Mapping[tuple[str, ...], type] = {
    (): Cluster,
    ("device",): Device,
    ("device", "rates"): Rates,
    ("device", "curve"): Curve,
    ("device", "attention"): AttentionKernels,
    **dict.fromkeys((("local",), ("network",)), Link),
    ("loading",): Loading,
}
_NOT_GUESSED = ("origin", "origins", "price", "host_memory", *_HOST, "loading", "unaligned", "wires", "triton", "rise")
"""Fields whose defaults stand for no number, or that are said to be assumed where they are used."""


def _at(data: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    found: Any = data
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _check(keys: tuple[str, ...], value: object, *, measured: bool) -> None:
    """Refuse a number with a unit, which is a text, and one that is plausible in another unit only."""
    unit, example, least, most, zero, slips = _QUANTITIES[keys]
    if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+(e[+-]?\d+)?\s*[a-zA-Z/]*\s*", value):
        raise RecordError(keys, f"found the text {value!r}, needed a number in {unit}, as {example}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return  # of another type: from_dict says so
    number = inf if isinstance(value, int) and abs(value) >= 2**1023 else float(value)
    if measured and _QUANTITIES[keys] is _SHARE:
        most = 100.0  # nominal is then the best product, and other kernels may do better
    if least <= number <= most or (zero and number == 0):
        return
    meant = [
        f"{name}: write {number / 8 if 'bit' in name else number:.12g}e{power}"
        for name, power, low, high in slips
        if low <= number < high
    ]
    hint = f"; {number:.12g} looks like {', or '.join(meant)}" if meant else ""
    if number == 0 and keys[-1] == "bf16":
        hint = "; a device without a bf16 unit computes in fp32: write that rate"
    span = f"{unit} between {least:g} and {most:g}{', or 0' if zero else ''}"
    raise RecordError(keys, f"found {number:.12g}, needed {span.replace('e+0', 'e').replace('e+', 'e')}{hint}")


def _with_origins(data: dict[str, Any]) -> dict[str, Any]:
    """The same data; what it holds is `read` where it does not say otherwise, and what it leaves out is `assumed`.

    Raises:
        RecordError: a key without a default is missing.
    """
    said = data.get("origins", [])
    if not isinstance(said, list) or not all(isinstance(line, str) for line in said):
        return data  # from_dict says what is wrong
    known = {line.split(":")[0] for line in said}
    assumed = []
    for keys, kind in _RECORDS.items():
        table = _at(data, keys)
        names = {f.name for f in fields(kind)}
        if not isinstance(table, Mapping) or set(table) - names:
            continue  # from_dict says what is wrong
        for name in (f.name for f in fields(kind) if f.name not in table and f.name not in _NOT_GUESSED):
            path = (*keys, name)
            how = _default(kind, path)
            if not {".".join(path[:size]) for size in (1, 2, 3)} & known:
                assumed.append(f"{'.'.join(path)}: assumed, {how}")
    records = {
        key: data[key] for key in ("device", "local", "network", "loading") if isinstance(data.get(key), Mapping)
    }
    read = {key: {"origin": "read", **table} for key, table in records.items()}
    return {**data, **read, "origins": [*said, *assumed]}


def _default(kind: type, path: tuple[str, ...]) -> str:
    """What stands for a key that is missing."""
    found = next(f for f in fields(kind) if f.name == path[-1])
    if found.default_factory is not MISSING:
        return ", ".join(f"{key}={value:g}" for key, value in vars(found.default_factory()).items())
    if found.default is not MISSING:
        in_words = {"domain": "a node", **dict.fromkeys(("tf32", "fp16", "fp8", "fp4"), "no such unit")}
        return in_words.get(path[-1]) or f"{found.default:g}"
    quantity, table = _QUANTITIES.get(path), _RECORDS.get(path)
    needed = f"a number in {quantity.unit}, as {quantity.example}" if quantity else "a text"
    if table:
        needed = "a table of " + ", ".join(f.name for f in fields(table) if f.default is f.default_factory is MISSING)
    error = RecordError(path, f"missing; needed {needed}, or a file that begins with preset = 'h100:8x2'")
    error.keys = path[:-1]  # the line of the table that lacks it
    raise error
