"""What `mesh.py` uses of torch that is private there.

Apart from `torch_private.py`, so that a mesh opens without importing sharding and pipelines, which take as long to
import as the rest of torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level  # public and untyped, too
from torch._C._distributed_c10d import HashStore as HashStore  # public as torch.distributed.HashStore, untyped there
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store


def default_store() -> Store:
    """The store in which the ranks of the default group met: `_get_default_store`."""
    return _get_default_store()


def grow_segments() -> None:
    """Let CUDA's caching allocator grow what it holds in place of asking for another piece beside it.

    Of a step with large logits it then holds some per cent more than is alive, and a fifth more otherwise (measured).
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def lay_out(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, whose groups wait no longer than that of the world."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    _limit_waits(mesh)
    return mesh


def flatten_mesh(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """One axis out of several: `DeviceMesh._flatten`, private in torch 2.13. Every rank must call it."""
    flat = mesh[axes]._flatten("_".join(axes))
    _limit_waits(flat)
    return flat


def _limit_waits(mesh: DeviceMesh) -> None:
    """Torch gives a mesh's groups its own time limit (gloo 30 min, NCCL 10), whatever that of the world is."""
    for device, backend in _backends(_get_default_group()).items():
        if (options := getattr(backend, "options", None)) is not None:
            for group in mesh.get_all_groups():
                own = _backends(group)[device]  # inside of torch's checks, under TORCH_DISTRIBUTED_DEBUG=DETAIL
                getattr(own, "wrapped_pg", own)._set_default_timeout(options._timeout)


def _backends(group: Any) -> dict[Any, Any]:
    """What carries a group's messages, by device; one that is written in Python names what it stands on."""
    if (carrier := getattr(group, "carrier", None)) is not None:
        return {None: carrier}
    return {device: group._get_backend(device) for device in group._device_types}


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Two axes of one mesh, either of them flattened or not, side by side: `DeviceMesh._concatenate`, private."""
    return DeviceMesh._concatenate([outer, inner])


def release_groups(mesh: DeviceMesh) -> None:
    """Let go of the process groups that a mesh holds: `DeviceMesh._pg_registry`, of the mesh that was opened.

    Who holds a mesh when the process ends would else hold gloo's threads: one that still has a tensor to give back
    then meets an interpreter that is gone, and the process aborts after its work is done (2 of 16 quick runs).
    """
    getattr(mesh, "_pg_registry", {}).clear()  # not in torch 2.11, where groups are held elsewhere


def unwrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the whole world in which DDP can work: every rank must call it.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL a group checks its collectives in a wrapper, which DDP's logger takes for the
    gloo group itself: the process is killed (torch 2.13, one rank too). So DDP gets a group without the wrapper, which
    is made while the level is lower; the others keep theirs.
    """
    level = get_debug_level()
    if level != DebugLevel.DETAIL or dist.get_backend(group) != "gloo":
        return group
    assert group.size() == dist.get_world_size()  # where DDP carries the data axes there are no others
    set_debug_level(DebugLevel.INFO)
    try:
        return cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    finally:
        set_debug_level(level)
