"""`discover`: this machine as a `Cluster`: what torch and the system say of it, and a preset's rates.

Nothing is guessed: a device that no preset is known to be is refused; `bench.measure` measures what it does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.errors import LaunchError, UsageError
from shardwise.hardware.cluster import GIB, Cluster, load_cluster
from shardwise.hardware.host import host_memory
from shardwise.hardware.presets import MIXED
from shardwise.launch.environment import read_environment
from shardwise.launch.variables import variables

NAMES = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"GH200 (120GB|480GB)", "gh200"),
    (r"B300( SXM6 AC)?", "b300"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100 80GB HBM3", "h100"),
    (r"H100 96GB HBM[23]e?", "h100-96g"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H20", "h20"),
    (r"A100-(SXM4|PCIE)-40GB", "a100-40g"),
    (r"A100[ -](SXM4-)?80GB( PCIe)?", "a100-80g"),
    (r"(Tesla )?V100-SXM[23]-(16|32)GB(-LS)?", "v100"),
    (r"L4", "l4"),
    (r"L40S", "l40s"),
    (r"L40", "l40"),
    (r"L20", "l20"),
    (r"A10G", "a10g"),
    (r"A10", "a10"),
    (r"A16", "a16"),
    (r"A30", "a30"),
    (r"A40", "a40"),
    (r"Tesla T4", "t4"),
    (r"H100 NVL", "h100-nvl"),
    (r"RTX A4000", "a4000"),
    (r"RTX A5000", "a5000"),
    (r"RTX A6000", "a6000"),
    (r"RTX 6000 Ada Generation", "ada6000"),
    (r"TITAN RTX", "titanrtx"),
    (r"GeForce RTX 2080 Ti", "rtx2080ti"),
    (r"GeForce GTX 1080 Ti", "gtx1080ti"),
    (r"Tesla P40", "p40"),
    (r"GeForce RTX 3060", "rtx3060"),
    (r"GeForce RTX 3060 Ti", "rtx3060ti"),
    (r"GeForce RTX 3070", "rtx3070"),
    (r"GeForce RTX 3080", "rtx3080"),
    (r"GeForce RTX 3080 Ti", "rtx3080ti"),
    (r"GeForce RTX 4060 Ti", "rtx4060ti"),
    (r"GeForce RTX 4070", "rtx4070"),
    (r"GeForce RTX 4070 Ti SUPER", "rtx4070tis"),
    (r"GeForce RTX 3090", "rtx3090"),
    (r"GeForce RTX 4080", "rtx4080"),
    (r"GeForce RTX 4080 SUPER", "rtx4080s"),
    (r"GeForce RTX 4090", "rtx4090"),
    (r"GeForce RTX 5060 Ti", "rtx5060ti"),
    (r"GeForce RTX 5070 Ti", "rtx5070ti"),
    (r"GeForce RTX 5080", "rtx5080"),
    (r"GeForce RTX 5090", "rtx5090"),
    (r"GB10", "gb10"),
    (r"Instinct MI100", "mi100"),
    (r"Instinct MI210", "mi210"),
    (r"Instinct MI250X(/MI250)?", "mi250x"),
    (r"Instinct MI300X( OAM| VF)?", "mi300x"),
    (r"Instinct MI325X( OAM| VF)?", "mi325x"),
    (r"Instinct MI355X( OAM| VF)?", "mi355x"),
)
"""Whole names as drivers report them, without the vendor, and the preset that has their rates. Slices (MIG), laptop
parts and other variants of a chip have other rates, and match none."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What is here, as torch and the system say it."""

    kind: str
    """Type of the devices, as torch names it; `cpu`: no accelerator."""
    names: tuple[str, ...]
    """Of each device of this node."""
    memory: tuple[int, ...]
    """Bytes of each, as torch reports the total."""
    units: int
    """Multiprocessors of a device; 0: torch does not say."""
    dtypes: tuple[str, ...]
    """Whose products have units of their own, as far as torch tells."""
    peers: bool
    """Every two devices of this node can read each other's memory."""
    host_memory: int
    """Bytes of this node that this process may use."""
    cores: int
    """That this process may run on."""
    nodes: int = 1
    nodes_from: str = "assumed: no launcher says otherwise"


def discover() -> Cluster:
    """This machine (and, inside a job of several, as many like it): a preset's rates, with what can be read read.

    Devices, their memory and the host's are read; rates and links are the preset's. Without an accelerator a device is
    a core, with its share of the memory, and the rates of a core are assumed.

    Raises:
        UsageError: devices that no preset is known to be, or of several kinds.
        LaunchError: a launcher's variables disagree.

    Cost: `torch.accelerator` starts the driver: processes that are forked afterwards cannot use the devices.

    >>> discover().nodes
    1
    """
    return cluster_of(look())


def look(env: Mapping[str, str] | None = None) -> Found:
    """Ask torch, the system and the launcher's variables.

    Args:
        env: the environment; None: this process's.
    """
    nodes, why = nodes_of(variables() if env is None else env)
    cores = num_cores()
    host = host_memory()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Found(
            kind="cpu", names=("cpu",) * cores, memory=(host // cores,) * cores, units=1,
            dtypes=("fp32", "bf16", "fp16"), peers=True, host_memory=host, cores=cores, nodes=nodes, nodes_from=why,
        )  # fmt: skip
    module = torch.get_device_module(accelerator)
    count = torch.accelerator.device_count()
    facts = [module.get_device_properties(index) for index in range(count)]
    may_read = getattr(module, "can_device_access_peer", lambda *_: True)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    return Found(
        kind=accelerator.type,
        names=tuple(fact.name for fact in facts),
        memory=tuple(fact.total_memory for fact in facts),
        units=getattr(facts[0], "multi_processor_count", 0),
        dtypes=_dtypes(module) if torch.version.cuda else ("fp32", "bf16", "fp16"),
        peers=all(may_read(*pair) for pair in pairs),
        host_memory=host,
        cores=cores,
        nodes=nodes,
        nodes_from=why,
    )


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nodes_of(env: Mapping[str, str]) -> tuple[int, str]:
    """(nodes of the job around this process, who says so).

    Raises:
        LaunchError: variables that are partial, disagree, or tell of nodes that differ.

    >>> nodes_of({"SLURM_NNODES": "16"})
    (16, 'read: SLURM_NNODES')
    >>> nodes_of({})
    (1, 'assumed: no launcher says otherwise')
    """
    name = "SLURM_NNODES" if env.get("SLURM_NNODES") else "SLURM_JOB_NUM_NODES"  # the same, by its newer name
    said = env.get(name)
    if said:
        if not re.fullmatch("[1-9][0-9]{0,8}", said):
            raise LaunchError(
                f"{name}={said[:40]!r}: needed the number of nodes of the job; SLURM sets it: unset it, or "
                "give the cluster by its name, as h100:8x4"
            )
        return int(said), f"read: {name}"
    launch = read_environment(env, command="shardwise probe")
    if launch.launcher == "none":
        return 1, "assumed: no launcher says otherwise"
    if launch.world % launch.local_world:
        raise LaunchError(
            f"found {launch.world} ranks, {launch.local_world} of them on this node, so nodes that differ; {MIXED}"
        )
    return launch.world // launch.local_world, f"read: {launch.world} ranks, {launch.local_world} on this node"


def cluster_of(found: Found) -> Cluster:
    """The cluster that was found, with a preset's rates and links.

    Raises:
        UsageError: as `discover`.
    """
    preset = preset_of(found)
    per_node = len(found.names)
    base = load_cluster(f"{preset}:{per_node}x{found.nodes}")
    cpu = found.kind == "cpu"
    device = replace(base.device, memory=float(min(found.memory)), origin="assumed" if cpu else "table")
    local, links = base.local, "table: of the preset"
    if not found.peers and per_node > 1:
        local, links = load_cluster("l4").local, "assumed: PCIe, as devices cannot read each other's memory"
    if "PCIE" in found.names[0].upper() and preset.startswith("a100"):
        local, links = load_cluster("l4").local, "assumed: PCIe, by the device's name"
    return base.with_(
        name=f"{preset}:{per_node}x{found.nodes}, found",
        device=device,
        local=replace(local, origin="assumed" if links.startswith("assumed") else local.origin),
        host_memory=float(found.host_memory),
        origins=(
            f"device.memory: read, {'a share of the host per core' if cpu else 'the least of the devices'}",
            f"host_memory: read, {found.host_memory / GIB:.1f} GiB",
            f"per_node: read, {f'{per_node} cores' if cpu else ', '.join(dict.fromkeys(found.names))}",
            f"nodes: {found.nodes_from}",
            f"local: {links}",
        ),
    )


def preset_of(found: Found) -> str:
    """The preset with the rates of the devices that were found.

    Raises:
        UsageError: no preset is known to be this device, or devices differ.
    """
    if found.kind == "cpu":
        return "cpu"
    kinds = sorted(set(found.names))
    if len(kinds) > 1:
        raise UsageError(
            f"detect: this node: found devices of {len(kinds)} kinds ({', '.join(kinds)}), needed one; a job goes at "
            "the pace of its slowest device: show torch only those of one kind (CUDA_VISIBLE_DEVICES)"
        )
    preset = preset_named(kinds[0], min(found.memory))
    if preset is None:
        raise UsageError(
            f"detect: {found.kind} device {kinds[0]!r} ({min(found.memory) / GIB:.0f} GiB): found no preset with the "
            "rates of this device, and none is guessed; needed its rates and links: run `shardwise probe` on it, or "
            "give a preset or a .toml file (`Cluster.save` writes one)"
        )
    return preset


def preset_named(name: str, memory: float) -> str | None:
    """The preset of a device by the name that its driver reports, and its memory in bytes; None: none is known.

    >>> preset_named("NVIDIA H100 80GB HBM3", 85.0e9), preset_named("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10e9)
    ('h100', None)
    """
    short = re.sub(r"^(NVIDIA|AMD)\s+", "", name.strip())
    if short == "H100":  # one name for three memories
        return "h100-96g" if memory > 95e9 else "h100" if memory > 75e9 else "h100-64g"
    return next((preset for pattern, preset in NAMES if re.fullmatch(pattern, short)), None)


def _dtypes(cuda: Any) -> tuple[str, ...]:
    """Of an NVIDIA device: tf32 came with compute capability 8.0, with it bf16; fp8 with 8.9."""
    capability = cuda.get_device_capability(0)
    tf32 = ("tf32", "bf16") if capability >= (8, 0) else ()
    return ("fp32", *tf32, "fp16", *(("fp8",) if capability >= (8, 9) else ()))
