"""`Cluster`: devices, memory, rates and links as data, each number with where it came from.

Rates are nominal unless named otherwise; what a kernel reaches of them is `Curve`, by shape.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from shardwise.errors import ConfigError, PlanError, UsageError
from shardwise.findings import nearest
from shardwise.records import RecordError, as_dict, from_dict, hash_of, located, read_file, write_file

Origin = Literal["measured", "read", "table", "assumed"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Floating point operations per second by dtype of the inputs, dense; 0: the device has no such unit."""

    fp32: float
    bf16: float
    tf32: float = 0.0
    fp16: float = 0.0
    fp8: float = 0.0
    fp4: float = 0.0

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
    """What a matrix product reaches of the nominal rate, by shape. See `plan.kernels.matmul_time` for the formula."""

    best: float = 0.8
    """Share of the nominal rate that the best shape sustains, under the power limit."""
    units: int = 108
    """Streaming multiprocessors (or compute units): tiles run in waves of so many."""
    depth: float = 384.0
    """Inner size at which half of `best` would be reached, were the other sizes unbounded."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernels:
    """Share of the bf16 rate that each generation of fused attention reaches, forward, with heads of 128."""

    flash1: float = 0.3
    flash2: float = 0.5
    flash3: float = 0.5


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
        for name in ("memory", "bandwidth"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"device {self.name}: {name}: found {getattr(self, name)}, needed more than 0")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One tier of links: time of a message of n bytes between two devices is `latency + n / bandwidth`."""

    bandwidth: float
    """Bytes per second and device, one way, that a long message reaches."""
    latency: float
    """Seconds of one step of a collective."""
    origin: Origin = "table"

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.latency < 0:
            raise ConfigError(
                f"link: found bandwidth={self.bandwidth}, latency={self.latency}; needed a bandwidth above 0 and a "
                "latency of at least 0"
            )


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
    origins: tuple[str, ...] = ()
    """`name: measured|read|table|assumed, how`, a line for each number that has another origin than its record says."""

    def __hash__(self) -> int:
        return hash_of(self)

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster {self.name}: {name}: found {getattr(self, name)}, needed at least 1")
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
        write_file(
            path,
            {"format": 1, **as_dict(self)},
            comment=f"{self.name}: {self.nodes} x {self.per_node} {self.device.name}",
        )


def load_cluster(source: str | os.PathLike[str]) -> Cluster:
    """A preset (`h100`, `h100:8` one node of 8, `h100:8x16` 16 nodes of 8), or a .toml or .json file.

    Raises:
        UsageError: an unknown device, with the nearest; a size that is no number.
        ConfigError: a file that does not describe a cluster, with key and line.
    """
    if isinstance(source, str) and not source.endswith((".toml", ".json")):
        return _preset(source)
    data, text = read_file(source)
    try:
        return cluster_from(data)
    except (ConfigError, PlanError) as error:
        raise located(error, source, text) from None


def cluster_from(data: Mapping[str, Any]) -> Cluster:
    """The cluster that plain data describes.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, nodes that differ, or another format.
    """
    rest = dict(data)
    found = rest.pop("format", 1)
    if found != 1:
        raise RecordError(
            ("format",),
            f"found {found!r}, this version of Shardwise reads 1; write the file with the Shardwise that reads it "
            "(`shardwise probe`, or `load_cluster(...).save(...)`)",
        )
    for key in ("device", "nodes", "per_node"):
        if isinstance(rest.get(key), list):
            raise RecordError((key,), f"found a list; {_MIXED}")
    _refuse_units(rest)
    return from_dict(Cluster, rest)


_MIXED = (
    "needed one kind of device and a number of equal nodes, as h100:8x16; a job goes at the pace of its slowest node: "
    "plan for one kind, or for as many of the smallest as there are nodes"
)
_UNITS = {"memory": "bytes", "bandwidth": "bytes per second", "latency": "seconds", "context": "bytes"}


def _refuse_units(data: Mapping[str, Any], keys: tuple[str, ...] = ()) -> None:
    """A number with a unit is a text: say which unit the number is in."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            _refuse_units(value, (*keys, key))
        elif isinstance(value, str) and re.fullmatch(r"\s*[\d.]+(e[+-]?\d+)?\s*[a-zA-Z/]*\s*", value) and key != "name":
            unit = next((said for word, said in _UNITS.items() if word in key), "no unit")
            raise RecordError((*keys, key), f"found the text {value!r}, needed a number in {unit}, as 80e9")


def device_names() -> list[str]:
    """Names that presets know."""
    return [name for name in _table() if name != "link"]


def _preset(text: str) -> Cluster:
    if re.search(r"[,+;]", text):
        raise UsageError(f"cluster {text!r}: found several kinds of nodes; {_MIXED}")
    match = re.fullmatch(r"([a-zA-Z0-9.-]+?)(?::(\d+)(?:x(\d+))?)?", text)
    name = match.group(1).lower() if match else text
    if match is None or name not in device_names():
        raise UsageError(
            f"cluster {text!r}: unknown; {nearest(name, device_names())} A preset is written device:per-nodexnodes, "
            "as h100:8x16; or give a .toml file, `probe` or `detect`"
        )
    entry = dict(_table()[name])
    local, network = (from_dict(Link, _table()["link"][entry.pop(tier)]) for tier in ("local", "network"))
    shape: dict[str, Any] = {key: entry.pop(key) for key in ("per_node", "domain", "host_bandwidth") if key in entry}
    per_node = int(match.group(2) or shape.pop("per_node", 8))
    shape.pop("per_node", None)
    nodes = int(match.group(3) or 1)
    if not per_node or not nodes:
        raise UsageError(f"cluster {text!r}: found a size of 0, needed at least one node of one device")
    device = from_dict(Device, {"name": name, **entry})
    return Cluster(name=text, device=device, nodes=nodes, per_node=per_node, local=local, network=network, **shape)


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shardwise.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))
