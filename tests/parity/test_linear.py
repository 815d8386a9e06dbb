"""`ColumnParallelLinear` and `RowParallelLinear` against `nn.Linear`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.plan.plan import Axes, Plan
from shardwise.testing.world import World

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}


def by_hand(kind: str, layers: list[nn.Linear], mesh: Mesh) -> nn.Module:
    first, second = layers
    match kind:
        case "column-row":
            column = ColumnParallelLinear.from_linear(first, mesh)
            return nn.Sequential(column, nn.Tanh(), RowParallelLinear.from_linear(second, mesh))
        case "column-gather":
            column = ColumnParallelLinear.from_linear(first, mesh, gather_output=True)
            return nn.Sequential(column, nn.Tanh(), copy.deepcopy(second))
        case _:
            row = RowParallelLinear.from_linear(second, mesh, input_is_parallel=False)
            return nn.Sequential(copy.deepcopy(first), nn.Tanh(), row)


def compare(kind: str, tp: int, dtype: torch.dtype, bias: bool) -> dict[str, float]:
    """Relative difference of the output, the input's gradient and each parameter's gradient."""
    with open_mesh(Plan(axes=Axes(tp=tp))) as mesh:
        torch.manual_seed(5)
        layers = [nn.Linear(12, 16, bias=bias, dtype=dtype), nn.Linear(16, 8, bias=bias, dtype=dtype)]
        reference = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        model = by_hand(kind, layers, mesh)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
        x = torch.randn(3, 5, 12, dtype=dtype)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [m(i) for m, i in zip((model, reference), inputs, strict=True)]
        for output in outputs:
            output.square().sum().backward()
        pairs = {"output": (outputs[0].detach(), outputs[1].detach()), "input": (inputs[0].grad, inputs[1].grad)}
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.shape == expected[name].shape
            gradient = parameter.grad
            pairs[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, expected[name].grad)
        return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


@pytest.mark.share(2)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", ["column-row", "column-gather", "row-whole"])
def test_equals_one_process(world: World, kind: str, dtype: torch.dtype, bias: bool) -> None:
    for found in world(2, compare, kind, 2, dtype, bias):
        assert {k: v for k, v in found.items() if not v <= TOLERANCE[dtype]} == {}


def test_equals_one_process_on_four(world: World) -> None:
    for found in world(4, compare, "column-row", 4, torch.float64, True):
        assert max(found.values()) <= 1e-11


def constructed() -> list[float]:
    """Fresh layers: the ranks agree on the weights, and shards differ."""
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        torch.manual_seed(mesh.rank)
        column, row = ColumnParallelLinear(8, 6, mesh), RowParallelLinear(6, 8, mesh, bias=False)
        assert row.bias is None and "tp=2" in repr(column) and "tp=2" in repr(row)
        output = row(column(torch.ones(2, 8)))
        assert output.shape == (2, 8) and column(torch.ones(2, 8)).shape == (2, 3)
        whole = column.weight.full_tensor()  # type: ignore[attr-defined]
        assert not torch.equal(whole[:3], whole[3:])
        return [*output.flatten().tolist(), *whole.flatten().tolist()]


def test_fresh_layers_are_the_same_on_all_ranks(world: World) -> None:
    first, second = world(2, constructed)
    assert first == second


def refusals() -> list[str]:
    found = []
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        for attempt in (
            lambda: ColumnParallelLinear(8, 5, mesh),
            lambda: RowParallelLinear.from_linear(nn.Linear(5, 8), mesh),
            lambda: RowParallelLinear(6, 8, mesh)(torch.ones(2, 6)),
        ):
            try:
                attempt()
                found.append("accepted")
            except ModelError as error:
                found.append(str(error))
    return found


def test_what_does_not_divide_or_fit_is_refused(world: World) -> None:
    column, row, whole = world(2, refusals)[0]
    assert "tp=2 does not divide out_features=5 of ColumnParallelLinear; use tp in {1, 5}" in column
    assert "in_features=5 of RowParallelLinear" in row
    assert "has 6 features (shape (2, 6)), needed 3" in whole
