"""Tied weights: one parameter under several names, and under a pipeline on several stages.

The first name in the order of the original module is the parameter's name everywhere: in tables, optimizers and
checkpoints. Within a stage a tie stays what it is, one `nn.Parameter` in several places. Stages that use the parameter
hold a copy each; the copies start with the same bits, their gradients are summed after every backward pass, and the
same update keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import storage_key
from shardwise.plan.schedule import stages_of


def find_ties(root: nn.Module) -> dict[str, str]:
    """Further names of each parameter -> its first name. Parameters that share all of their memory are made one.

    Raises:
        ModelError: two parameters overlap in memory and are not the same: updating one would change the other.
    """
    ties: dict[str, str] = {}
    first_of: dict[int, str] = {}
    first_in: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in list(root.named_parameters(remove_duplicate=False)):
        first = first_of.setdefault(id(parameter), name)
        if first != name:
            ties[name] = first
            continue
        held = first_in.setdefault(storage_key(parameter), [])
        twin = next((old for old, other in held if _same_memory(old, other, name, parameter)), None)
        if twin is None:
            held.append((name, parameter))
        else:
            path, _, key = name.rpartition(".")
            root.get_submodule(path).register_parameter(key, root.get_parameter(twin))
            ties[name] = twin
    return ties


def _same_memory(old: str, other: nn.Parameter, name: str, parameter: nn.Parameter) -> bool:
    if not parameter.numel() or isinstance(parameter, DTensor):
        return False
    layouts = [(p.storage_offset(), tuple(p.shape), p.stride()) for p in (other, parameter)]
    if layouts[0] == layouts[1]:
        return True
    (start, end), (low, high) = (_extent(p) for p in (other, parameter))
    if low < end and start < high:
        raise ModelError(
            f"apply: parameters {old} {list(other.shape)} and {name} {list(parameter.shape)} are different views of "
            "the same memory, and each would be sharded and updated by itself; needed: one parameter with one shape; "
            f"let the module of {name} use {old} itself (module.weight = other.weight), transposed in its forward"
        )
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int(reach) + 1


def retie(root: nn.Module, ties: Mapping[str, str]) -> None:
    """After each name was placed by its own rule: make them one parameter again.

    Raises:
        ModelError: the rules place the names differently.
    """
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, first in ties.items():
        (path, _, key), (first_path, _, first_key) = name.rpartition("."), first.rpartition(".")
        one, two = modules.get(first_path), modules.get(path)
        if one is None or two is None:
            continue
        here, there = one._parameters.get(first_key), two._parameters.get(key)
        if here is None or there is None or here is there:
            continue
        if _placements(here) != _placements(there):
            raise ModelError(
                f"tensor parallelism: {name} is tied to {first}, and their rules place it as {_placements(there)} and "
                f"{_placements(here)}, found two layouts of one parameter; needed the same on both: 'vocab' for the "
                "embedding with 'head' for the output layer, or 'replicate' for both",
                row="module.tied-layouts",
            )
        two.register_parameter(key, here)


def _placements(parameter: torch.Tensor) -> tuple[object, ...]:
    return tuple(parameter.placements) if isinstance(parameter, DTensor) else ()


def bind_stages(placed: Placed) -> Placed:
    """Find the ranks and copies of each parameter that several pipeline stages hold; no change where there is none."""
    return placed.with_(copies=StageCopies(placed, placed.shared_stages)) if placed.shared_stages else placed


class StageCopies:
    """The parameters that several pipeline stages hold; `placed.copies`."""

    def __init__(self, placed: Placed, stages: Mapping[str, tuple[int, ...]]) -> None:
        plan = placed.plan
        self._mesh: Mesh = placed.mesh
        schedule, pp = plan.schedule, plan.axes.pp
        home = {s: rank for rank in range(pp) for s in stages_of(schedule.kind, rank, pp, schedule.stages)}
        self._ranks = {name: sorted({home[stage] for stage in own}) for name, own in stages.items()}
        """Name -> the indices on the pp axis that hold it."""
        self._here: dict[str, list[nn.Parameter]] = {}
        for part in placed.parts:
            for name, parameter in part.root.named_parameters():
                known = self._here.setdefault(placed.ties.get(name, name), [])
                if not any(parameter is other for other in known):
                    known.append(parameter)
        self._here = {name: self._here[name] for name in sorted(stages) if name in self._here}

    def counts_here(self, name: str) -> bool:
        """True but on the later ones of the ranks of the pp axis that hold the parameter: one of them counts it."""
        return name not in self._ranks or self._ranks[name][0] == self._mesh.index("pp")

    def sum_gradients(self) -> None:
        """Give this rank's first copy the sum of all copies' gradients, added in the order of the stages.

        Cost: per parameter, its local shard is exchanged with each other rank of the pp axis that holds it.
        """
        for name, own in self._here.items():
            if not own[0].requires_grad:
                continue
            total = local_gradient_of(own[0])
            for other in own[1:]:
                total = total + local_gradient_of(other)
            total = self._over_ranks(self._ranks[name], total)
            own[0].grad = gradient_like(own[0], total)
            for other in own[1:]:
                other.grad = None  # no optimizer steps it, and none would clear it

    def _over_ranks(self, ranks: list[int], mine: torch.Tensor) -> torch.Tensor:
        here, group = self._mesh.index("pp"), self._mesh.group("pp")
        if len(ranks) == 1:
            return mine
        mine = mine.contiguous()
        parts = {rank: mine if rank == here else torch.empty_like(mine) for rank in ranks}
        messages = []
        for rank in ranks:
            if rank != here:
                peer = dist.get_global_rank(group, rank)
                messages.append(dist.P2POp(dist.isend, mine, peer, group))
                messages.append(dist.P2POp(dist.irecv, parts[rank], peer, group))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        total = parts[ranks[0]]
        for rank in ranks[1:]:
            total = total + parts[rank]
        return total

    @torch.no_grad()
    def refresh(self) -> None:
        """After the first of this rank's copies has changed: the others follow."""
        for first, *others in self._here.values():
            for other in others:
                _local(other).copy_(_local(first))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard of a gradient, laid out as the parameter is; zeros where there is none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(_local(parameter.detach()))
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return _local(grad)


def gradient_like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """The local gradient in the layout of its parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def follow_ties(root: nn.Module, ties: Mapping[str, str], named: set[str]) -> None:
    """A tied parameter that no rule names at its first place goes where its other name was placed."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for name, first in ties.items():
        (path, _, key), (first_path, _, first_key) = name.rpartition("."), first.rpartition(".")
        if first_path in modules and first_path not in named and path in named and path in modules:
            modules[first_path].register_parameter(first_key, modules[path]._parameters[key])
