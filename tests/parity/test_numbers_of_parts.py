"""What a script reads off weights, and writes into parts of them: of the whole, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import implicit_replication

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gate


def read(text: str) -> tuple[list[float], list[str]]:
    """Numbers of the whole, and what was said of those of parts."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        module = sw.apply(Net, plan, mesh).module
        weight, said = module.linear.weight.detach(), []
        whole = [w.full_tensor() if hasattr(w := f(weight), "full_tensor") else w for f in (torch.norm, torch.max)]
        for part in (weight.norm(), weight.max(), weight.mean()):
            try:
                float(part), bool(part)
            except UsageError as error:
                said.append(str(error))
        return [*map(float, whole), float(module.gate.detach())], said


@pytest.mark.parametrize(("text", "ranks"), [("fsdp2", 2), ("dp2", 2), ("fsdp1", 1)])
def test_a_number_of_a_shard_is_refused(world: World, text: str, ranks: int) -> None:
    """Each rank got that of its own part, without a word."""
    alone, nothing = world(1, read, "dp1")[0]
    assert not nothing
    for numbers, said in world(ranks, read, text):
        assert numbers == pytest.approx(alone, rel=1e-6)
        assert len(said) == (3 if text == "fsdp2" else 0)
        assert not said or "found (Partial(avg),) over (2,) ranks" in said[2] and ".full_tensor().item()" in said[2]


def row(weight: Tensor) -> None:
    weight[0].zero_()


def row_of_data(weight: Tensor) -> None:
    weight.data[0].normal_()


def rows(weight: Tensor) -> None:
    weight[1:3] = 0.5


def diagonal(weight: Tensor) -> None:
    weight.diagonal().mul_(2)


def of_a_list(weight: Tensor) -> None:
    torch._foreach_mul_([weight[0], weight[2]], 2.0)


def into_out(weight: Tensor) -> None:
    torch.mul(weight[0], 2.0, out=weight[0])


def column(weight: Tensor) -> None:
    weight[:, 1].zero_()


def masked(weight: Tensor) -> None:
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    mask[0], mask[:, 2] = True, True
    with implicit_replication():
        weight.masked_fill_(mask, 0.5)


def identity(weight: Tensor) -> None:
    nn.init.eye_(weight)


def copied_as_a_list(weight: Tensor) -> None:
    torch._foreach_copy_([weight], [weight * 2])


def unbound(weight: Tensor) -> None:
    for each in weight:
        each.zero_()


def plain_noise(weight: Tensor) -> None:
    weight.add_(torch.randn(weight.size(), dtype=weight.dtype))


def by_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[0] = 0.0


def written(text: str, write: Callable[[Tensor], None]) -> Any:
    """A weight after a write; or what was said."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, torch.no_grad():
        weight: Any = sw.apply(Net, plan, mesh, seed=1).module.linear.weight
        torch.manual_seed(2)
        try:
            write(weight)
        except UsageError as error:
            return str(error)
        return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).clone()


@pytest.mark.parametrize("write", [row, row_of_data, rows, diagonal, of_a_list, into_out])
def test_a_write_into_a_part_that_is_a_copy_is_refused(world: World, write: Callable[[Tensor], None]) -> None:
    """The weight stayed as it was, without a word."""
    for said in world(2, written, "fsdp2", write):
        assert isinstance(said, str) and "of a sharded tensor (4, 4) is written in place" in said


@pytest.mark.parametrize(
    ("text", "write"),
    [
        ("fsdp2", column),
        ("fsdp2", masked),
        ("fsdp2", identity),
        ("fsdp2", copied_as_a_list),
        ("dp2", row),
        ("dp2", masked),
        ("dp2", of_a_list),
    ],
)
def test_a_write_that_reaches_the_weight_is_made(world: World, text: str, write: Callable[[Tensor], None]) -> None:
    (alone,) = world(1, written, "dp1", write)
    assert all(torch.equal(one, alone) for one in world(2, written, text, write))


def met(text: str, write: Callable[[Tensor], None]) -> str:
    """What becomes of an error that a script leaves to the end of its mesh."""
    plan = sw.Plan.parse(f"{text} / fp64")
    try:
        with sw.open_mesh(plan) as mesh, torch.no_grad():
            write(sw.apply(Net, plan, mesh, seed=1).module.linear.weight)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (unbound, "for each in weight:"),
        (plain_noise, "weight.add_(torch.randn(weight.size(), dtype=weight.dtype))"),
        (by_numpy, "weight.detach().numpy()[0] = 0.0"),
    ],
)
def test_torchs_words_for_sharded_tensors_are_explained(
    world: World, write: Callable[[Tensor], None], line: str
) -> None:
    """They were torch's own, from deep inside."""
    for said in world(2, met, "fsdp2", write):
        assert f"{__file__}, line" in said and f"`{line}`: torch cannot do this with a sharded tensor" in said
        assert "weight.full_tensor()" in said and "implicit_replication()" in said
    assert world(2, met, "dp2", write) == [""] * 2


def test_other_errors_of_a_script_are_left_alone(world: World) -> None:
    with pytest.raises(AssertionError, match="RuntimeError: of the script"):
        world(2, met, "fsdp2", misshapen)


def misshapen(weight: Tensor) -> None:
    raise RuntimeError(f"of the script {tuple(weight.shape)}")


def with_anomalies_looked_for(text: str) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, torch.autograd.set_detect_anomaly(True):
        placed = sw.apply(Two, plan, mesh, seed=1, rules={"up": "column", "down": "row"} if plan.axes.tp > 1 else None)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda out, x: out.square().mean())
        return [step(torch.ones(4, 4, dtype=torch.float64)).loss for _ in range(2)]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_anomalies_are_looked_for_where_gradients_are_sharded(world: World) -> None:
    """Torch had no rule for the question whether a part of a gradient has a NaN."""
    (alone,) = world(1, with_anomalies_looked_for, "dp1")
    assert world(2, with_anomalies_looked_for, "tp2") == [pytest.approx(alone, rel=1e-12)] * 2
