"""A small model placed by hand in several layouts, and a state around it: what optimizer and store tests run on.

Sizes do not divide: under `fsdp4` some ranks hold no row of some parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Part, Placed
from shardwise.plan.plan import Axes, Plan
from shardwise.train.updates.optim import NamedOptimizer

LAYOUTS: dict[str, Plan] = {
    "one": Plan(),
    "dp2": Plan(axes=Axes(dp_replicate=2)),
    "fsdp2": Plan(axes=Axes(dp_shard=2), zero=3),
    "fsdp4": Plan(axes=Axes(dp_shard=4), zero=3),
    "tp2": Plan(axes=Axes(tp=2)),
    "hsdp2x2": Plan(axes=Axes(dp_replicate=2, dp_shard=2), zero=3),
    "fsdp2tp2": Plan(axes=Axes(dp_shard=2, tp=2), zero=3),
    "pp2": Plan(axes=Axes(pp=2)),
    "pp2fsdp2": Plan(axes=Axes(pp=2, dp_shard=2), zero=3),
}


class Net(nn.Module):
    """Matrices, biases, a norm and a 3-dim parameter; `stages` says which half to keep."""

    def __init__(self, dtype: torch.dtype = torch.float32, wide: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, dtype=dtype)
        self.up = nn.Linear(6, wide, dtype=dtype)
        self.down = nn.Linear(wide, 5, dtype=dtype)
        self.norm = nn.LayerNorm(5, dtype=dtype)
        self.cube = nn.Parameter(torch.empty(3, 2, 4, dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))


STAGES = (("embed", "up"), ("down", "norm", "cube", "seen"))
COLUMN, ROW = ("embed.weight", "up.weight", "up.bias"), ("down.weight",)


def place(layout: str, mesh: Mesh, dtype: torch.dtype = torch.float32, wide: int = 7) -> Placed:
    """The model under a layout, by torch's own means."""
    plan, net = LAYOUTS[layout], Net(dtype, wide)
    for stage, names in enumerate(STAGES):
        for name in names:
            if plan.axes.pp > 1 and stage != mesh.index("pp"):
                delattr(net, name)
    if plan.axes.tp > 1:
        for name, parameter in list(net.named_parameters()):
            placement = Shard(0) if name in COLUMN else Shard(1) if name in ROW else Replicate()
            owner, _, leaf = name.rpartition(".")
            shard = distribute_tensor(parameter.detach(), mesh.device_mesh["tp"], [placement], src_data_rank=None)
            setattr(net.get_submodule(owner), leaf, nn.Parameter(shard))
    if plan.zero == 3:
        axes = ("dp_replicate", "dp_shard") if plan.axes.dp_replicate > 1 else ("dp_shard",)
        fully_shard(net, mesh=mesh.device_mesh[axes])
    return Placed(parts=(Part(root=net, run=net),), plan=plan, mesh=mesh)


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def split_as(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks know, laid out as `like`."""
    if not isinstance(like, DTensor):
        return whole.clone()
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def gradients(net: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """A gradient for every parameter, a function of its name and the step alone."""
    grads = {}
    for name, parameter in net.items():
        draw = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
        whole = torch.randn(tuple(parameter.shape), generator=draw, dtype=torch.float64).to(parameter.dtype)
        grads[name] = split_as(whole, parameter)
    return grads


def train(placed: Placed, optimizer: NamedOptimizer, steps: range) -> None:
    """Some updates from given gradients."""
    for step in steps:
        optimizer.take_grads(gradients(dict(placed.named_parameters()), step))
        optimizer.step()
        optimizer.zero_grad()


class State:
    """The least that a store can save."""

    def __init__(self, placed: Placed, optimizer: NamedOptimizer) -> None:
        self.placed, self.optimizer, self.step = placed, optimizer, 0

    @property
    def mesh(self) -> Mesh:
        return self.placed.mesh

    def _model(self) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {**self.placed.named_parameters(), **self.placed.named_buffers()}
        return {f"model.{name}": tensor.detach() for name, tensor in own.items()}

    def tensors(self) -> dict[str, Tensor]:
        return self._model() | self.optimizer.state_tensors()

    def scalars(self) -> dict[str, Any]:
        return {"step": self.step}

    def template(self, names: Collection[str]) -> dict[str, Tensor]:
        fresh = {name: torch.empty_like(tensor) for name, tensor in self._model().items()}
        return fresh | self.optimizer.state_template([n for n in names if n.startswith("optim.")])

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in self._model().items():
            tensor.copy_(tensors[name])
        self.optimizer.load_state_tensors({n: t for n, t in tensors.items() if n.startswith("optim.")})

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.step = int(scalars["step"])

    def run(self, steps: int) -> None:
        train(self.placed, self.optimizer, range(self.step, self.step + steps))
        self.step += steps

    def whole(self) -> dict[str, Tensor]:
        """Every tensor of this rank's stage, gathered."""
        return {name: full(tensor) for name, tensor in self.tensors().items()}
