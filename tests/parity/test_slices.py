"""Code between split layers that takes a slice for the whole is refused at the first forward; what does not, trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.init import init_model
from shardwise.plan.plan import Plan
from shardwise.testing.world import World

DIM, HEADS, SIZE = 8, 4, 4
QKV = {"q": "column", "k": "column", "v": "column", "o": "row"}
MLP = {"up": "column", "down": "row"}


class Look(nn.Module):
    """Attention that counts heads from its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, HEADS * SIZE) for _ in range(3))
        self.o = nn.Linear(HEADS * SIZE, DIM)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        seen = self.see(*(self.heads(layer(x)) for layer in (self.q, self.k, self.v)))
        return self.o(seen.transpose(1, 2).flatten(2))


class Counting(Look):
    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Sloped(Look):
    """Slopes for as many heads as it is told."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** (-4 * (i + 1) / self.num_heads) for i in range(self.num_heads)])
        places = torch.arange(q.shape[2])
        return (q @ k.mT - slopes.view(-1, 1, 1) * (places[:, None] - places).abs()).softmax(-1) @ v


class Tempered(Look):
    """A number for each head, which of one head makes four."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.rand(HEADS, 1, 1))

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().see(q * self.heat, k, v)


class Gated(Look):
    """What is made of the whole input meets heads: its gradient would be a part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.see(*(self.heads(layer(x)) for layer in (self.q, self.k, self.v)))
        return self.o(seen.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class Scaled(Look):
    """The same of a parameter whose gradients are summed: right."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SIZE))

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().see(q * self.scale, k, v)


class OneByOne(Look):
    """A head at a time, by the number that is theirs on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        pieces = (layer(x).chunk(self.num_heads, -1) for layer in (self.q, self.k, self.v))
        return self.o(torch.cat([self.see(*each) for each in zip(*pieces, strict=True)], -1))


class Steered(Look):
    """What steers heads is given as numbers that nobody learns: a mask, a turn; so is a scale that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(SIZE), requires_grad=False)

    def forward(self, x: Tensor, turn: Tensor | None = None, *, mask: Tensor | float = 0.0) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
        seen = (q * self.scale * turn @ k.mT + mask).softmax(-1) @ v
        return self.o(seen.transpose(1, 2).flatten(2))


class Steering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look = Steered()

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.linspace(1, 2, x.shape[1] * SIZE, dtype=x.dtype).view(x.shape[1], SIZE).cos()
        return self.look(x, turn, mask=x.new_full((x.shape[1], x.shape[1]), -2.0).triu(1))


class Recomputing(Look):
    """Its rows are called again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Inner(Look):
    """The row layer stands outside of what holds the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Identity()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.o = Inner(), nn.Linear(HEADS * SIZE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.inner(x))


class Fused(nn.Module):
    """A gate and what it is for in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Normed(nn.Module):
    """A norm over all features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.normalize(self.up(x), dim=-1))


class RecomputingFused(Fused):
    """Its layers are called again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


SEEN: list[Any] = []


def look_at(module: nn.Module) -> None:
    """Keep what goes into it, and what comes out of each layer."""
    module.register_forward_pre_hook(lambda _module, args: SEEN.extend(args))
    for layer in module.children():
        layer.register_forward_hook(lambda _module, _args, output: SEEN.append(output))


class HookedFused(Fused):
    """Looked at."""

    def __init__(self) -> None:
        super().__init__()
        look_at(self)


class HookedLook(Look):
    """Looked at."""

    def __init__(self) -> None:
        super().__init__()
        look_at(self)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, str], int, str]] = {
    "counting": (Counting, QKV, 2, "what o takes is no slice"),
    "sloped": (Sloped, QKV, 2, "what o takes is no slice"),
    "tempered": (Tempered, {**QKV, "": "heads"}, 4, "what o takes is no slice"),
    "gated": (Gated, {**QKV, "gate": "heads"}, 2, "another gradient of what it is given"),
    "scaled, not summed": (Scaled, {**QKV, "": "replicate"}, 2, "on a rank another gradient of scale"),
    "fused": (Fused, MLP, 2, "what down takes is no slice"),
    "fused, recomputed": (RecomputingFused, MLP, 2, "what down takes is no slice"),
    "fused, hooked": (HookedFused, MLP, 2, "what down takes is no slice"),
    "normed": (Normed, MLP, 2, "what down takes is no slice"),
}
TRAINED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "plain": (Look, QKV),
    "plain, hooked": (HookedLook, QKV),
    "scaled": (Scaled, {**QKV, "": "heads"}),
    "one by one": (OneByOne, QKV),
    "steered": (Steering, {**{f"look.{name}": style for name, style in QKV.items()}, "look": "replicate"}),
    "recomputing": (Recomputing, QKV),
    "outer": (Outer, {"inner.q": "column", "inner.k": "column", "inner.v": "column", "o": "row"}),
    "fused, gathered": (Fused, {**MLP, "up": "column-gather"}),
}


class Net(nn.Module):
    def __init__(self, made: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(made() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_fn(output: Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output - 1).square())


def rows() -> Tensor:
    return torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trained(made: Callable[[], nn.Module], rules: dict[str, str], text: str) -> str | dict[str, Tensor]:
    """The parameters after a step, or why there is none."""
    plan = Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        names = {f"blocks.*.{name}".rstrip("."): style for name, style in rules.items()}
        placed = sw.apply(lambda: Net(made), plan, mesh, seed=3, rules=names)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        try:
            step(rows().tensor_split(mesh.batch.size)[mesh.batch.rank])
        except ModelError as error:
            return str(error)
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in placed.named_parameters().items()}
        return {name: parameter.detach() for name, parameter in whole.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_a_slice_for_the_whole_is_refused(world: World, name: str) -> None:
    made, rules, tp, text = REFUSED[name]
    for found in world(tp, trained, made, rules, f"tp{tp} / fp64"):
        assert isinstance(found, str) and text in found and f"blocks.0 ({made.__name__})" in found, found


@pytest.mark.parametrize("plan", ["tp2 / fp64", "fsdp2 tp2 / mb2 / fp64 / recompute=blocks"])
@pytest.mark.parametrize("name", TRAINED)
def test_what_works_on_slices_trains_as_one_process(world: World, name: str, plan: str) -> None:
    made, rules = TRAINED[name]
    model = init_model(lambda: Net(made), seed=3, dtype=torch.float64)
    loss = loss_fn(model(rows()), None)
    (loss.sum / loss.weight).backward()
    expected = {n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters() if p.grad is not None}
    for found in world(Plan.parse(plan).world, trained, made, rules, plan):
        assert isinstance(found, dict), found
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-13)
