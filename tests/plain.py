"""A state of a few tensors without a model or a process group: what a store saves where only files matter."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.agree import Peers
from shardwise.plan.plan import Plan

SHAPES: dict[str, tuple[int, ...]] = {
    "model.w": (40, 11), "model.b": (7,), "optim.w.exp_avg": (40, 11), "optim.b.exp_avg": (7,), "optim.step": (),
}  # fmt: skip


def values(step: int) -> dict[str, Tensor]:
    """The tensors at a step."""
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


class Plain:
    """A `Saveable`: every rank holds all of it, so each stores a part of the tensors."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.step, self.content = 0, values(0)
        place: dict[str, Any] = {
            "size": lambda axis: world if axis == "dp_replicate" else 1,
            "index": lambda axis: rank if axis == "dp_replicate" else 0,
        }
        whole = {"rank": rank, "world": world, "device": torch.device("cpu"), "at_exit": [], **place}
        self.mesh: Any = SimpleNamespace(check_open=lambda _: None, timeout_s=600.0, **whole)
        plan = Plan.parse(f"dp{world}")
        self.placed: Any = SimpleNamespace(plan=plan, mesh=self.mesh)

    def advance(self, steps: int = 1) -> None:
        self.step += steps
        self.content = values(self.step)

    def tensors(self) -> dict[str, Tensor]:
        return self.content

    def scalars(self) -> dict[str, Any]:
        return {"step": self.step}

    def template(self, names: Collection[str]) -> dict[str, Tensor]:
        return {name: torch.empty(shape) for name, shape in SHAPES.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.content = tensors

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        self.step = int(scalars["step"])

    def close(self) -> None:
        """As the end of a mesh."""
        while self.mesh.at_exit:
            self.mesh.at_exit.pop()()

    def is_of(self, seed: int) -> bool:
        """Whether every bit is that of `values(seed)`."""
        wanted = values(seed)
        return all(torch.equal(self.content[name], tensor) for name, tensor in wanted.items())


def meet_over(sockets: tuple[socket.socket, ...]) -> None:
    """In a forked rank: `Peers.gather` goes over pairs of sockets, and no process group is needed.

    Args:
        sockets: on rank 0 one to every other rank, by rank; elsewhere one, to rank 0.
    """

    def gather(self: Peers, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        if self.rank:
            _send(sockets[0], value)
            return list(_receive(sockets[0]))
        values = [value, *(_receive(peer) for peer in sockets)]
        for peer in sockets:
            _send(peer, values)
        return values

    Peers.gather, Peers.apart = gather, staticmethod(lambda mesh, _: Peers.of(mesh))  # of this process only


def _send(peer: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    peer.sendall(len(data).to_bytes(8, "little") + data)


def _receive(peer: socket.socket) -> Any:
    return pickle.loads(_exactly(peer, int.from_bytes(_exactly(peer, 8), "little")))


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = peer.recv(count - len(data))
        if not got:
            raise ConnectionError("the other rank is gone")
        data += got
    return data
