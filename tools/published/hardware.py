"""The cluster of a row: device by its name, links by the device's preset or by the rate that the row states."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files

from published.cells import Cells, Skip
from shardwise.hardware.cluster import Cluster, Link, load_cluster
from shardwise.records import from_dict

_PLAIN = r"(?!-?(ti|super|laptop|mobile|max-?q))"
"""Behind a name: the card itself, and none of its variants, which are other chips."""
_DEVICES: tuple[tuple[str, str, str], ...] = (
    (r"gb10\b|dgx-?spark", "gb10", ""),
    (r"gb300", "gb300", ""),
    (r"gb200", "gb200", ""),
    (r"gh200", "gh200", ""),
    (r"b300", "b300", ""),
    (r"b200", "b200", ""),
    (r"b100\b", "b200", "a B100 as a B200 of 1,750 TFLOP/s"),
    (r"h200", "h200", ""),
    (r"h20\b", "h20", ""),
    (r"h100.*64g", "h100-64g", ""),
    (r"h100.*96g", "h100-96g", ""),
    (r"h100.*nvl\b", "h100-nvl", ""),
    (r"h[18]00.*pcie", "h100-pcie", ""),
    (r"h800", "h800", ""),
    (r"h100", "h100", ""),
    (r"a800", "a800", ""),
    (r"a100.*(40g|(?<!x)-40\b)", "a100-40g", ""),
    (r"a100.*64g", "a100-64g", ""),
    (r"a100.*80g", "a100-80g", ""),
    (r"a100", "a100-80g", "an A100 of 80 GB"),
    (r"mi355", "mi355x", ""),
    (r"mi350", "mi350x", ""),
    (r"mi325", "mi325x", ""),
    (r"mi300-?a", "mi300a", ""),
    (r"mi300", "mi300x", ""),
    (r"mi3(?!08)", "mi300x", "an MI300X"),
    (r"mi250", "mi250x", ""),
    (r"mi2[01]", "mi210", ""),
    (r"v100", "v100", ""),
    (r"p100", "p100", ""),
    (r"\bp40\b", "p40", ""),
    (r"l40s", "l40s", ""),
    (r"l40", "l40", ""),
    (r"l4\b", "l4", ""),
    (r"\bt4\b", "t4", ""),
    (r"a10g", "a10g", ""),
    (r"a10\b", "a10", ""),
    (r"\ba16\b", "a16", ""),
    (r"a30\b", "a30", ""),
    (r"a40\b", "a40", ""),
    (r"pro-?6000", "rtxpro6000", ""),
    (r"(a-?6000|6000)-?ada|ada-?6000", "ada6000", ""),
    (r"a6000", "a6000", ""),
    (r"a5000", "a5000", ""),
    (r"a4000", "a4000", ""),
    (r"\bl20\b", "l20", ""),
    (r"mi100", "mi100", ""),
    (r"5090", "rtx5090", ""),
    (rf"5080{_PLAIN}", "rtx5080", ""),
    (r"5070-?ti\b", "rtx5070ti", ""),
    (r"5060-?ti\b", "rtx5060ti", ""),
    (r"4090", "rtx4090", ""),
    (r"4080-?s(uper)?\b", "rtx4080s", ""),
    (r"4080", "rtx4080", ""),
    (rf"4070{_PLAIN}", "rtx4070", ""),
    (r"4070-?ti-?s(uper)?\b", "rtx4070tis", ""),
    (r"4060-?ti\b", "rtx4060ti", ""),
    (r"3090", "rtx3090", ""),
    (r"3080-?ti\b", "rtx3080ti", ""),
    (r"3080", "rtx3080", ""),
    (rf"3070{_PLAIN}", "rtx3070", ""),
    (r"3060-?ti\b", "rtx3060ti", ""),
    (rf"3060{_PLAIN}", "rtx3060", ""),
    (r"1080-?ti", "gtx1080ti", ""),
    (r"2080-?ti", "rtx2080ti", ""),
    (r"titan-?(rtx\b|$)", "titanrtx", ""),
    (r"tpu-?v?7|ironwood", "tpu-v7", ""),
    (r"v6e|trillium", "tpu-v6e", ""),
    (r"v5-?p", "tpu-v5p", ""),
    (r"v5(-?e|-?lite)|tpu-?v5", "tpu-v5e", ""),
    (r"tpu-?v?4|\bv4-\d", "tpu-v4", ""),
    (r"tpu-?v?3|\bv3-\d", "tpu-v3", ""),
    (r"trainium-?2|trn2", "trainium2", ""),
    (r"trainium|trn1", "trainium", ""),
    (r"gaudi-?3|hl-325", "gaudi3", ""),
    (r"gaudi|hl-225", "gaudi2", ""),
    (r"max-?15\d\d|ponte|\bpvc\b", "max1550", ""),
    (r"ascend|atlas-?[89]00|910[abc]?\b", "ascend910b", "an Ascend 910B"),
)
"""Pattern of the name -> preset, and what is assumed where the name leaves it open."""

_AWS = r"(\.\w+)?(?![\w.-])"
"""Sizes behind the name of an instance."""
_INSTANCES: tuple[tuple[str, str, str], ...] = (
    (rf"\bp3dn{_AWS}", "v100-32gb", "100 Gb/s"),
    (rf"\bp3{_AWS}", "v100-16gb", "25 Gb/s"),
    (rf"\bp4de{_AWS}", "a100-80gb", ""),
    (rf"\bp4d{_AWS}", "a100-40gb", ""),
    (rf"\bp5en?{_AWS}", "h200", ""),
    (rf"\bp5{_AWS}", "h100", ""),
    (rf"\bg4dn{_AWS}", "t4", "100 Gb/s"),
    (rf"\bg5{_AWS}", "a10g", "100 Gb/s"),
    (rf"\bg6e{_AWS}", "l40s", "400 Gb/s"),
    (rf"\bg6{_AWS}", "l4", "100 Gb/s"),
    (r"\ba2-ultragpu[\w-]*", "a100-80gb", "100 Gb/s"),
    (r"\ba2-(high|mega)gpu[\w-]*", "a100-40gb", "100 Gb/s"),
    (r"\ba3-ultragpu[\w-]*", "h200", "3200 Gb/s"),
    (r"\ba3-megagpu[\w-]*", "h100", "1600 Gb/s"),
    (r"\ba3-(high|edge)gpu[\w-]*", "h100", "800 Gb/s"),
    (r"\ba4-highgpu[\w-]*", "b200", "3200 Gb/s"),
    (r"\bg2-standard[\w-]*", "l4", "100 Gb/s"),
    (r"\bndm-?a100[\w-]*|\bnd\d*amsr[\w-]*", "a100-80gb", "1600 Gb/s"),
    (r"\bnd-?a100-v4|\bnd\d*asr[\w-]*", "a100-40gb", "1600 Gb/s"),
    (r"\bnd-?h100-v5|\bnd\d*isr-?h100[\w-]*", "h100", "3200 Gb/s"),
    (r"\bnd-?h200-v5|\bnd\d*isr-?h200[\w-]*", "h200", "3200 Gb/s"),
    (r"quadro-rtx-?8000|\brtx-?8000", "titan-rtx-48gb", ""),
    (r"quadro-rtx-?6000", "titan-rtx-24gb", ""),
    (r"titan-v\b", "v100-pcie-12gb", ""),
    (r"titan-xp?\b", "1080-ti-12gb", ""),
)
"""Names of instances and of cards of the same silicon -> device, and what the instance has between nodes (newer ones of
AWS say by their name that it is EFA)."""

_TDP = {"b200": 1000.0, "h100": 700.0, "h200": 700.0, "a100-80g": 400.0, "a100-40g": 400.0, "mi300x": 750.0}
"""Watts of the full power limit."""


def cluster_of(cells: Cells) -> Cluster:
    """Devices and links of a row.

    Raises:
        Skip: a device without a preset, or no number of devices.
    """
    name, wires = _named(cells["gpu"])
    found = next(((preset, says) for pattern, preset, says in _DEVICES if re.search(pattern, name)), None)
    if found is None:
        raise Skip("hardware: not stated" if not name else f"hardware: no preset for {name}")
    preset, says = found
    if says:
        cells.assume(says)
    count = cells.devices
    if count is None:
        raise Skip("hardware: number of devices not stated")
    base = _preset(preset)
    per_node = cells.count("gpus_per_node") or base.per_node
    if count < per_node or count % per_node:
        per_node = next(n for n in range(min(count, per_node), 0, -1) if count % n == 0)
    domain = base.domain if base.domain > base.per_node else per_node
    cluster = base.with_(name=name, nodes=count // per_node, per_node=per_node, domain=min(domain, count))
    cluster = _linked(cells, name, wires, _cored(preset, name, base, cluster))
    return _limited(cells, preset, name, _sized(preset, name, cluster))


def _named(gpu: str) -> tuple[str, str]:
    """The device's name with its memory's size in one word, and the network that an instance of such a name has."""
    name = re.sub(r"[\s_]+", "-", gpu.lower())
    name = re.sub(r"(?<![\d.])(\d+)-?(gi?b?)(?![a-z\d])", r"\1\2", name)
    for pattern, device, wires in _INSTANCES:
        if re.search(pattern, name):
            return re.sub(pattern, device, name, count=1), wires
    return name, ""


HOST_OF_GH200 = (120, 240, 480, 624)
"""GB by which drivers name a GH200: those of its CPU, or of both (docs.nvidia.com, Grace Hopper)."""


NODE = 3.5
"""Times a device's memory from which the number beside `DGX` is that of a node (a DGX A100 of 320 or 640 GB)."""


def _sized(preset: str, name: str, cluster: Cluster) -> Cluster:
    """Memory by the size in the name, where it is not the preset's; frameworks see some 6 % more than 10^9 each."""
    stated = re.search(r"\b(\d+)gi?b?\b", name)
    if stated and preset == "gh200" and int(stated.group(1)) in HOST_OF_GH200:
        stated = None
    memory = int(stated.group(1)) * 1.06e9 if stated else cluster.device.memory
    if re.search(r"\bdgx\b", name) and memory > NODE * cluster.device.memory:
        memory /= cluster.per_node
    if preset == "mi250x":
        return _carded(name, memory, cluster)
    if abs(memory / cluster.device.memory - 1) < 0.1:
        return cluster
    return cluster.with_(device=replace(cluster.device, name=name, memory=memory))


CORES = {"trainium": 2, "trainium2": 8, "max1550": 2}
"""NeuronCores of a chip, which AWS's own tools count as the devices, and the tiles of a card, which torch does."""


def _cored(preset: str, name: str, base: Cluster, cluster: Cluster) -> Cluster:
    """A core of a chip, where there are as many devices on a node as it has cores, or the name says so."""
    cores = CORES.get(preset, 1)
    parts = cluster.per_node // base.per_node if cluster.per_node > base.per_node else 1
    if "neuroncore" in name.replace("-", "") or (parts > 1 and cores % parts == 0):
        parts = parts if parts > 1 else cores
    else:
        return cluster
    chip = cluster.device
    rates = replace(chip.rates, **{f.name: getattr(chip.rates, f.name) / parts for f in fields(chip.rates)})
    core = replace(chip, memory=chip.memory / parts, bandwidth=chip.bandwidth / parts, rates=rates)
    core = replace(core, curve=replace(chip.curve, units=max(chip.curve.units // parts, 1)))
    return cluster.with_(
        device=core,
        local=replace(cluster.local, bandwidth=cluster.local.bandwidth / parts),
        network=replace(cluster.network, bandwidth=cluster.network.bandwidth / parts),
    )


def _carded(name: str, memory: float, cluster: Cluster) -> Cluster:
    """A card of two dies that a source counts as one device, as its memory says."""
    device = cluster.device
    if memory < 1.5 * device.memory:
        return cluster
    rates = replace(device.rates, **{f.name: 2 * getattr(device.rates, f.name) for f in fields(device.rates)})
    twice = replace(device, name=name, memory=memory, bandwidth=2 * device.bandwidth, rates=rates)
    return cluster.with_(device=replace(twice, curve=replace(device.curve, units=2 * device.curve.units)))


def _linked(cells: Cells, name: str, wires: str, cluster: Cluster) -> Cluster:
    """Links by what the row says of them. `wires`: the network of an instance that it names."""
    text = cells["interconnect"].lower()
    domain = re.search(r"nvl(?:ink)?(?: domain)?[ -]?(\d+)", text)
    if domain and int(domain.group(1)) > cluster.per_node:
        cluster = cluster.with_(domain=min(int(domain.group(1)), cluster.world))
    linked = re.search(r"nvlink|nvswitch", text) and not re.search(r"(no|without) nv(link|switch)", text)
    if "pcie" in f"{text} {name}" and not linked:
        third = re.search(r"pci-?e[ -]?(gen)?[ .-]?3", text)
        cluster = cluster.with_(local=_link("pcie3" if third else "pcie4"))
        reached = re.search(_REACHED, text)
        if reached:  # a slot of few lanes, or host memory in between, which no name says
            cluster = cluster.with_(local=replace(cluster.local, bandwidth=float(reached.group(1)) * 1e9))
    elif linked and cluster.per_node == 2 and cluster.local.bandwidth < _link("bridge").bandwidth:
        cluster = cluster.with_(local=_link("bridge"))
    elif "v100" in name and (re.search(r"sxm3|dgx-?2", name) or cells.count("gpus_per_node") == 16):
        cluster = cluster.with_(local=replace(cluster.local, wires=0))  # a DGX-2 has switches
    stated = (
        cells["interconnect"]
        or _noted(cells)
        or wires
        or ("8x100 Gb/s" if "v100" in name and cells.count("gpus_per_node") == 16 else "")
    )
    network = _network(stated, name, cells.count("gpus_per_node") or cluster.per_node)  # 16 V100 are a DGX-2
    if network is None and cluster.world > cluster.domain:
        cells.assume("the network of the device's preset")
    return cluster.with_(network=network) if network else cluster


_REACHED = r"all-?reduces? reach(?:es)? (\d+(?:\.\d+)?) gb/s"
"""What a row measured of the links inside its node, beside what they are."""
_WIRES = r"infiniband|\bib\b|\b[hnex]dr\b|roce|ethernet|\befa\b|\bp[45]d?e?n?[.]\d|rdma|inter-?node|network|slingshot"


def _noted(cells: Cells) -> str:
    """The clauses of notes, and of the device's name, about the network between nodes."""
    clauses = re.split(r"[;,()]", f"{cells['gpu']};{cells['notes']}")
    return ", ".join(clause for clause in clauses if re.search(_WIRES, clause.lower()))


def _network(stated: str, name: str, per_node: int) -> Link | None:
    """Between nodes: by name of the fabric, or by the stated rate."""
    text = stated.lower()
    if "omni-path" in text:
        count = re.search(r"(\d+) links", text)
        link = _link("opa4")
        return replace(link, bandwidth=link.bandwidth * (int(count.group(1)) if count else 4) / 4 * 8 / per_node)
    nominal, efa = _stated(stated, per_node), re.search(r"\befa|\bp[45]d?e?n?[.]\d", text) is not None
    if efa and nominal is None:
        nominal = 400e9 / 8 / per_node if re.search(r"a100|v100", name) else 50e9
    if nominal is None:
        return None
    link = _link("efa" if efa else "ib400")  # presets of 50 GB/s nominal
    return replace(link, bandwidth=link.bandwidth * nominal / 50e9)


_INSIDE = r"nvlink|nvswitch|nvl\d|pcie|pci-e|xgmi|infinity"
"""What a rate inside a node belongs to."""
_RATE = r"(\d+(?:\.\d+)?)\s*-?(?:([GT])([Bb](?:/s|ps)?|bit(?:/s)?|bE\b|\b)|(gbps|tbps|gbe\b))"
_ADAPTER = r"\bib\b|infiniband|roce|rdma|ethernet|gbe\b|connectx|\bcx-?[678]\b"
_OF_NODE = r"per[ -]node|node-to-node|inter-?node|between nodes|total|aggregate"
_FABRICS = {"xdr": 100e9, "ndr": 50e9, "hdr": 25e9, "edr": 12.5e9}
"""Bytes per second of one adapter of InfiniBand."""


def _stated(text: str, per_node: int) -> float | None:
    """Nominal bytes per second and device that a sentence states; Gb are bits, GB are bytes.

    Of all adapters of a node, or of those that are counted; rates that adapters have (200 to 800 Gb/s, where nothing
    says that they are a node's) are of one, and each device has one.
    """
    for part in re.split(r"[,+;]| and |/(?= )", text):
        lower = part.lower()
        fabric = re.search(r"\b(xdr|ndr|hdr|edr)\d*\b", lower)
        match = re.search(_RATE, part)
        if re.search(_INSIDE, lower) or not (match or fabric):
            continue
        if match:
            scale = 1e12 if (match.group(2) or match.group(4) or "")[:1].lower() == "t" else 1e9
            value = float(match.group(1)) * scale / (1 if (match.group(3) or "").startswith("B") else 8)
            before, after = lower[: match.start()], lower[match.end() :]
        else:
            value, before, after = _FABRICS[fabric.group(1)] if fabric else 0.0, lower, ""
        found = re.search(r"(\d+)\s*[x×*]", before) or re.search(r"[x×*]\s*(\d+)", after)
        found = found or re.search(r"(\d+)\s*(?:nics?|adapters?|hcas?|links|rails|ports)", lower)
        adapter = value >= 25e9 and (fabric or (re.search(_ADAPTER, lower) and value <= 100e9))
        each = re.search(r"per (gpu|device|adapter|nic)|/gpu", lower) or (adapter and not re.search(_OF_NODE, lower))
        return value * int(found.group(1)) / per_node if found else value / (1 if each else per_node)
    return None


def _limited(cells: Cells, preset: str, name: str, cluster: Cluster) -> Cluster:
    """A power limit below the full one: clocks fall about as the square root of the power."""
    watts = re.search(r"(\d{3,4})\s*-?w\b", name)
    limit = float(watts.group(1)) if watts else 0.0
    if "power" in name and not limit:
        stated = cells.noted(r"(\d{3,4})\s*w\b")
        limit = float(stated.group(1)) if stated else 0.5 * _TDP.get(preset, 0.0)
        cells.assume(f"a power limit of {limit:.0f} W")
    full = _TDP.get(preset, 0.0)
    if not limit or limit >= full:
        return cluster
    curve = replace(cluster.device.curve, best=cluster.device.curve.best * (limit / full) ** 0.5)
    return cluster.with_(device=replace(cluster.device, name=name, curve=curve))


@cache
def _preset(name: str) -> Cluster:
    return load_cluster(name)


@cache
def _link(name: str) -> Link:
    """A tier of the device presets."""
    text = files("shardwise.hardware").joinpath("devices.toml").read_text(encoding="utf-8")
    return from_dict(Link, tomllib.loads(text)["link"][name])
