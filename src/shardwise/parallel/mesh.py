"""`Mesh`: the processes of a job, arranged along the axes of a plan, and how this process reaches the others.

Every axis is always there, if only of size 1: code over `"tp"` needs no branch. Whoever communicates was given a mesh.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from shardwise.errors import LaunchError, UsageError
from shardwise.findings import nearest
from shardwise.launch.environment import HOST, LOCAL_INIT, Launch, asked_backend, read_environment
from shardwise.parallel import host_torch_private
from shardwise.parallel.echoes import forget_causes, share_cause, share_leave
from shardwise.parallel.mesh_torch_private import (
    HashStore,
    PrefixStore,
    Store,
    flatten_mesh,
    grow_segments,
    lay_out,
    release_groups,
)
from shardwise.parallel.parts_explained import explaining_parts
from shardwise.plan.constraints import check
from shardwise.plan.plan import AXES, Plan

DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes whose ranks see different samples."""
GRADIENT_AXES = (*DATA_AXES, "cp")
"""The axes whose ranks see different tokens: over them losses and gradients are sums of parts."""
_OPENED: Counter[str] = Counter()
"""How often this process has opened a mesh at an address; the ranks that meet there have all done so as often."""


@dataclass(frozen=True)
class BatchRank:
    """Which share of a global batch this rank reads: share `rank` of `size`."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The live processes of a job along the axes `pp, dp_replicate, dp_shard, cp, tp`. Made by `open_mesh`."""

    device_mesh: DeviceMesh
    device: torch.device
    rank: int
    world: int
    batch: BatchRank
    timeout_s: float = 600.0
    """After so long a collective that does not complete is an error."""
    expert_mesh: DeviceMesh | None = None
    """The ranks once more, along `pp, dp_replicate, expert_shard, ep`; None where `ep` is 1."""
    groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False, compare=False)
    at_exit: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)
    """Called when `open_mesh` is left without an error: what still needs the ranks in the background."""
    ended: list[bool] = field(default_factory=list, repr=False, compare=False)
    """Not empty once `open_mesh` is left: see `check_open`."""
    _covered: dict[DeviceMesh, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    def check_open(self, what: str) -> None:
        """Refuse what needs the ranks once they have left.

        Raises:
            UsageError: `open_mesh` is left.
        """
        if self.ended:
            raise UsageError(
                f"{what}: found a mesh that is closed, its ranks have left; needed one that is open: call it within "
                "`with open_mesh(plan) as mesh:` (look at the indentation)"
            )

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.device_mesh.size(AXES.index(axis))

    def index(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return int(self.device_mesh.get_local_rank(axis))

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group over one axis or over several together, this rank's own one.

        The first call for a new set of several axes creates groups: every rank must make it.

        >>> dist.all_reduce(tensor, group=mesh.group("dp_replicate", "dp_shard"))  # doctest: +SKIP
        """
        key = tuple(axis for axis in AXES if axis in axes and self.size(axis) > 1)
        if set(axes) - set(AXES):
            raise LaunchError(f"mesh.group({', '.join(map(repr, axes))}): unknown axis; the axes are {', '.join(AXES)}")
        if key not in self.groups:
            self.groups[key] = self._make_group(key, axes)
        return self.groups[key]

    def _make_group(self, key: tuple[str, ...], axes: tuple[str, ...]) -> dist.ProcessGroup:
        if len(key) <= 1:
            return self.device_mesh.get_group(key[0] if key else axes[0])
        return flatten_mesh(self.device_mesh, key).get_group()

    def axes_of(self, part: DeviceMesh) -> frozenset[str]:
        """The axes along which the ranks of a part of this mesh lie, whatever the part calls its own axes."""
        if part not in self._covered:  # each parameter asks, and a part lists its ranks anew each time
            ranks = part.mesh.flatten().tolist()
            covered, stride = set(), 1
            for axis in reversed(AXES):  # ranks count row by row, the last axis fastest
                if len({rank // stride % self.size(axis) for rank in ranks}) > 1:
                    covered.add(axis)
                stride *= self.size(axis)
            self._covered[part] = frozenset(covered)
        return self._covered[part]

    @property
    def num_gradient_ranks(self) -> int:
        """Ranks whose gradients of one parameter add up: those of the data axes and of `cp`."""
        return math.prod(self.size(axis) for axis in GRADIENT_AXES)

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the world: who prints and writes."""
        return self.rank == 0

    @property
    def tells(self) -> bool:
        """True on one rank of those that call a loss function, the last stages of a pipeline: who speaks of it."""
        return self.batch.rank == self.index("tp") == self.index("cp") == 0

    def barrier(self) -> None:
        """Wait until every rank of the world is here."""
        if self.world > 1:
            dist.barrier()

    def all_reduce_sum(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Sum a tensor in place over some axes (the whole world when none is named) and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM, axes)

    def all_reduce_max(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Maximum in place over some axes (the whole world when none is named)."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX, axes)

    def all_reduce_min(self, tensor: torch.Tensor, *axes: str) -> torch.Tensor:
        """Minimum in place over some axes (the whole world when none is named)."""
        return self._all_reduce(tensor, dist.ReduceOp.MIN, axes)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, axes: tuple[str, ...]) -> torch.Tensor:
        if not axes:
            if self.world > 1:
                dist.all_reduce(tensor, op=op)
        elif any(self.size(axis) > 1 for axis in axes):
            dist.all_reduce(tensor, op=op, group=self.group(*axes))
        return tensor


@contextmanager
def open_mesh(
    plan: Plan,
    *,
    backend: str | None = None,
    init: str | Store | None = None,
    timeout_s: float = 600.0,
    device: str | torch.device | None = None,
) -> Iterator[Mesh]:
    """Join the job's processes and arrange them along the plan's axes; leave them at the end.

    Rank and world size come from the launcher's environment (torchrun, SLURM, Open MPI; none of them: one
    process). A process group that exists already is used and left alone.

    Args:
        plan: its axes give the mesh; their product must be the number of processes.
        backend: `nccl`, `gloo`, `mpi`, ...; `host`: messages pass through the host's memory, so that ranks may share a
            device, slowly; None: what SHARDWISE_BACKEND says, else what torch prefers for the device.
        init: `env://`, `tcp://host:port`, `file://path`, or a torch `Store`; None: what the launcher left.
        timeout_s: seconds after which a collective that does not complete is an error.
        device: `cpu`, `cuda`, ...; None: the accelerator that torch sees, else the CPU.

    Raises:
        LaunchError: the world is not what the plan needs, the launcher's variables contradict each other, the device
            or the back-end is not there, or the ranks did not meet in time.
        UsageError: `plan` is no Plan, or `timeout_s` no number of seconds.

    >>> with open_mesh(Plan()) as mesh:  # doctest: +SKIP
    ...     print(mesh.rank, mesh.batch)
    """
    backend = asked_backend(os.environ) if backend is None else backend
    _check_arguments(plan, backend, timeout_s)
    own = not dist.is_initialized()
    pretended = not own and dist.get_backend() == "fake"  # launcher's variables are not about its ranks
    launch = read_environment({} if pretended else os.environ)
    world = launch.world if own else dist.get_world_size()
    if world != plan.world:
        fix = next(finding.fix for finding in check(plan, world=world) if finding.id == "world.size")
        raise LaunchError(
            f"open_mesh: the plan `{plan}` needs {plan.world} processes, found {world} "
            f"({'an initialised process group' if not own else f'launcher: {launch.launcher}'}); {fix}"
        )
    here = _device(device, launch.local_rank, may_share=backend == HOST)
    if here.type != "cpu":
        _take(here)
    if own:
        _join(launch, backend or _backend(here), init, timeout_s)
    try:
        forget_causes()
        mesh = replace(_arrange(plan, here), timeout_s=timeout_s)
        with _finishing(mesh), explaining_parts():
            yield mesh
        if own:  # not after an error: to end a group is to wait for collectives, and others may never join theirs
            share_leave(mesh.rank, mesh.world)
            mesh.groups.clear()
            for part in (each for each in (mesh.device_mesh, mesh.expert_mesh) if each is not None):
                release_groups(part)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _finishing(mesh: Mesh) -> Iterator[None]:
    """What waits for the end of the block is done however that comes: a save that has begun is a save."""
    try:
        yield
    except BaseException as error:
        share_cause(error, mesh.rank, mesh.world)
        _finish(mesh, error)
        raise
    _finish(mesh, None)


def _finish(mesh: Mesh, error: BaseException | None) -> None:
    failed: list[Exception] = []
    for finish in reversed(mesh.at_exit):  # all of them, whatever becomes of one
        try:
            finish()
        except Exception as raised:
            failed.append(raised)
    mesh.ended.append(True)
    if failed and (error is None or isinstance(error, SystemExit)):
        raise failed[0]
    for other in failed:
        assert error is not None
        error.add_note(f"at the end of open_mesh, besides: {other}")


def _check_arguments(plan: object, backend: str | None, timeout_s: object) -> None:
    if not isinstance(plan, Plan):
        raise UsageError(
            f"open_mesh: found {plan!r} of type {type(plan).__name__}, needed a Plan; write open_mesh(Plan.parse(...))"
        )
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
        raise UsageError(
            f"open_mesh: timeout_s: found {timeout_s!r}, needed a number of seconds above 0 and at most {_LONGEST_S:g}"
        )
    known = [b for b in dist.Backend.backend_list if b not in ("undefined", "fake") and dist.is_backend_available(b)]
    if backend == HOST:
        host_torch_private.register()
        return
    for part in (backend or known[0]).lower().split(","):
        name = part.rpartition(":")[2]
        if name not in known:
            raise LaunchError(
                f"open_mesh: backend={backend!r}: this build of torch has no back-end {name!r}; "
                f"{nearest(name, [*known, HOST])}; leave backend= out to take the device's own"
            )


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user says how the allocator shall work; who says nothing gets segments that grow."""
_LONGEST_S = 1e8
"""Three years; torch counts the nanoseconds of a timeout in 64 bits."""


def _device(device: str | torch.device | None, local_rank: int, *, may_share: bool) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu", *([accelerator.type] if accelerator else [])]
    if device is None:
        device = kinds[-1]
    try:
        here = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LaunchError(
            f"open_mesh: device={device!r} is no device of torch; {nearest(str(device), kinds)}; leave device= out to "
            "take what this machine has"
        ) from error
    if here.type == "cpu":
        return here
    count = torch.accelerator.device_count() if here.type in kinds else 0
    index = here.index if here.index is not None else local_rank
    if may_share and count:
        index %= count
    if index >= count:
        raise LaunchError(
            f"open_mesh: local rank {local_rank} has no device {here.type}:{index}, this machine shows {count} of that "
            f"kind; {f'start at most {count} processes here, share them (backend={HOST!r}), or ' if count else ''}pass "
            "device='cpu'"
        )
    return torch.device(here.type, index)


def _take(device: torch.device) -> None:
    torch.accelerator.set_device_index(device)
    if device.type == "cuda" and torch.version.cuda and not any(os.environ.get(name) for name in _ALLOCATOR):
        grow_segments()


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    # collectives on CPU tensors (checkpoints, tickets) go through gloo beside the device's own back-end
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _join(launch: Launch, backend: str, init: str | Store | None, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    method = launch.init if init is None else init
    if isinstance(method, str) and method.startswith("file://"):
        folder = Path(method.removeprefix("file://")).parent
        if not folder.is_dir():  # torch would look for five minutes
            raise LaunchError(
                f"open_mesh: rank {launch.rank} of {launch.world} could not join ({method}): {folder} is no folder; "
                "give a file:///path in a folder that every rank can write to"
            )
    try:
        if isinstance(method, Store):
            dist.init_process_group(backend, store=method, rank=launch.rank, world_size=launch.world, timeout=timeout)
        elif init is None and launch.init == LOCAL_INIT:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            where: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world, "timeout": timeout}
            number = _OPENED[method]
            _OPENED[method] += 1
            if number and str(method).startswith("file://"):  # who leaves last removes a file, others may be back
                path, mark, query = str(method).partition("?")
                dist.init_process_group(backend, init_method=f"{path}-{number}{mark}{query}", **where)
            elif number:  # what the ranks left there before is of groups that are gone
                store = PrefixStore(f"opened {number}", next(rendezvous(method, **where))[0])
                dist.init_process_group(backend, store=store, **where)
            else:
                dist.init_process_group(backend, init_method=method, **where)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"open_mesh: rank {launch.rank} of {launch.world} could not join ({backend}, {method}): "
            f"{str(error).splitlines()[0]}{_unresolved(method)}; check that every rank was started and can reach the "
            "address of rank 0, and that no other job uses the port; init= is env://, tcp://host:port, file:///path or "
            "a torch Store"
        ) from error


def _unresolved(method: str | Store) -> str:
    """Which host has no address here, if that is why nobody was met: torch only says that it waited."""
    url = urlsplit(method) if isinstance(method, str) else None
    host = url and (os.environ.get("MASTER_ADDR") if url.scheme == "env" else url.hostname)
    try:
        socket.getaddrinfo(host or "localhost", None)
    except OSError as error:
        return f" ({host}: {error.strerror}; export MASTER_ADDR=<an address of rank 0's host>)"
    return ""


def _arrange(plan: Plan, device: torch.device) -> Mesh:
    axes = plan.axes
    shape = (axes.pp, axes.dp_replicate, axes.dp_shard, axes.cp, axes.tp)
    device_mesh = lay_out(device.type, shape, AXES)
    replicate, shard = (int(device_mesh.get_local_rank(axis)) for axis in DATA_AXES)
    mesh = Mesh(
        device_mesh=device_mesh,
        device=device,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        batch=BatchRank(rank=replicate * axes.dp_shard + shard, size=axes.data),
        expert_mesh=_arrange_experts(plan, device)
        if axes.ep > 1 and not axes.dp_shard * axes.cp * axes.tp % axes.ep
        else None,
    )
    mesh.group(*DATA_AXES)  # created here, while every rank is at the same place
    mesh.group(*GRADIENT_AXES)
    return mesh


def _arrange_experts(plan: Plan, device: torch.device) -> DeviceMesh:
    """`ep` is innermost in `dp_shard x cp x tp`; what is left of them shards each expert's parameters further."""
    axes = plan.axes
    rest = axes.dp_shard * axes.cp * axes.tp // axes.ep
    shape = (axes.pp, axes.dp_replicate, rest, axes.ep)
    return lay_out(device.type, shape, ("pp", "dp_replicate", "expert_shard", "ep"))
