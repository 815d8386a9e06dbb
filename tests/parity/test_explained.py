"""What torch says deep inside where ranks have parts of the weights is said with the module, and what to do."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import shardwise as sw
from shardwise.errors import ModelError, ReplicaError
from shardwise.testing import World

DIM = 8


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.kind = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), kind
        made: dict[str, Any] = {
            "weight_norm": nn.utils.weight_norm,
            "spectral_norm": nn.utils.spectral_norm,
            "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
            "parametrized": nn.utils.parametrizations.weight_norm,
        }
        if kind in made:
            with warnings.catch_warnings(action="ignore"):  # torch calls the old ones that
                self.up = made[kind](self.up)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in place":
            x += 1
        if self.kind == "view":
            return (x + self.down(F.gelu(self.up(self.norm(x)))))[:, :]
        run = torch.func.vmap(self.up) if self.kind == "vmap" else self.up
        y = F.linear(self.norm(x), self.up.weight) if self.kind == "weight" else run(self.norm(x))
        return x + self.down(F.gelu(y))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if layer.kind == "view":
                x += 1
        return x


def trained(text: str, kind: str, style: str) -> str:
    """A step; what it refuses."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        names = [name for name, module in Net(kind).named_modules() if [*module.parameters(recurse=False)]]
        rules = {name: "replicate" for name in names}
        if style == "split":
            for name in names:
                end = name.rpartition(".")[2]
                rules[name] = {"up": "column", "down": "row"}.get(end, "replicate")
        if style == "other rules" and mesh.rank == 0:
            rules |= {"layers.0.up": "column", "layers.0.down": "row"}
        try:
            placed = sw.apply(lambda: Net(kind), plan, mesh, seed=1, rules=rules if plan.axes.tp > 1 else None)
            step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, _: output.square().mean())
            with warnings.catch_warnings(action="ignore"):  # torch's own, of views
                step(torch.ones(2, DIM))
        except (ModelError, ReplicaError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "kind", "style", "expected"),
    [
        ("tp2", "weight", "split", r"\[module.weight-elsewhere\] layers.0 \(Block\).*a call of the module that"),
        ("tp2", "vmap", "split", r"\[module.transformed\] layers.0.* a transform of torch.func"),
        ("fsdp2", "in place", "", r"\[module.writes-input\] layers.\d .*: it writes in place into what an engine"),
        (
            "tp2",
            "other rules",
            "other rules",
            r"parameter layers.0.up.weight must be equal on ranks 0, 1: found .*column",
        ),
        ("tp2", "parametrized", "replicated", "^$"),
    ],
)
def test_a_refusal_names_the_module(world: World, text: str, kind: str, style: str, expected: str) -> None:
    """These ended in torch's words, or (rules that ranks have not in common) in a KeyError."""
    found = world(2, trained, text, kind, style)
    assert all(re.search(expected, said) for said in found), found


def one_step(text: str, kind: str) -> dict[str, list[float]]:
    """Loss, norm and parameters of a step of a model whose layers are all whole."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        names = [name for name, module in Net(kind).named_modules() if [*module.parameters(recurse=False)]]
        rules = dict.fromkeys(names, "replicate") if plan.axes.tp > 1 else None
        with warnings.catch_warnings(action="ignore"):
            placed = sw.apply(lambda: Net(kind), plan, mesh, seed=1, rules=rules)
            step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda output, _: output.square().mean())
            metrics = step(
                torch.linspace(-1, 2, 4 * DIM).reshape(4, DIM)[2 * mesh.batch.rank :][: 4 // mesh.batch.size]
            )
        found = {"loss": [metrics.loss], "norm": [metrics.grad_norm]}
        for name, parameter in placed.module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = whole.detach().flatten().tolist()
    return found


@pytest.mark.parametrize("kind", ["weight", "weight_norm", "spectral_norm", "prune"])
def test_a_weight_of_a_whole_layer_may_be_read_where_all_is_whole(world: World, kind: str) -> None:
    """As mixers of state-space models read that of their convolution; it was refused."""
    truth = world(1, one_step, "dp1", kind)[0]
    for found in (*world(2, one_step, "tp2", kind), *world(4, one_step, "fsdp2 tp2", kind)):
        assert found.keys() == truth.keys()
        for name, values in truth.items():
            assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


class Sometimes(nn.Module):
    """Uses its second layer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum() > 0 else self.first(x)


def stepped(is_ours: bool) -> list[Tensor]:
    """Weights after steps with momentum, by our optimizer or torch's own."""
    rows = [torch.full((2, DIM), sign, dtype=torch.float64) for sign in (-1.0, 1.0, -1.0, 1.0)]
    plan = sw.Plan.parse("dp1 / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Sometimes, plan, mesh, seed=1)
        if is_ours:
            step = sw.make_step(
                sw.TrainState(placed, sw.sgd(placed, 0.1, momentum=0.9)), lambda y, _: y.square().mean()
            )
            for x in rows:
                step(x)
        else:
            optimizer = torch.optim.SGD(placed.module.parameters(), lr=0.1, momentum=0.9, fused=False)
            for x in rows:
                optimizer.zero_grad()
                placed.module(x).square().mean().backward()
                optimizer.step()
        return [weight.detach().clone() for weight in placed.module.parameters()]


def test_momentum_of_a_layer_that_is_used_later(world: World) -> None:
    """Torch's kernel takes momenta of all weights, or of none, and ended in its own words."""
    ours, torchs = world(1, stepped, True)[0], world(1, stepped, False)[0]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, torchs, strict=True))


class Observer(nn.Module):
    """In training the range of its whole input, which it is given split where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y / y.abs().max() if self.training else y)


def test_rules_are_inferred_from_the_forward_of_training() -> None:
    assert sw.infer_rules(Observer, [torch.empty(2, DIM)]).rules["up"] != "column"


def test_a_sample_may_be_a_tensor_or_a_dict() -> None:
    """A tensor was taken apart into rows, and a dict into its keys."""
    expected = sw.infer_rules(Sequential, [torch.empty(2, DIM)]).rules
    assert sw.infer_rules(Sequential, torch.empty(2, DIM)).rules == expected
    assert sw.infer_rules(Sequential, {"x": torch.empty(2, DIM)}).rules == expected


def test_rules_of_lazy_layers_are_refused_as_apply_does() -> None:
    with pytest.raises(ModelError, match=r"parameter 0.weight has no shape yet \(a lazy module\)"):
        sw.infer_rules(lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), [torch.empty(2, 3)])


class Sequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))
