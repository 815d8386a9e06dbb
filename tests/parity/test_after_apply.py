"""What a script or a forward does to a placed model: done as in one process, or refused by name."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardwise.errors import ModelError, UsageError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.placed import Placed
from shardwise.plan.plan import Plan
from shardwise.testing import World
from shardwise.train.batches import eval_batches
from shardwise.train.ema import Ema
from shardwise.train.loop import evaluate
from shardwise.train.loss import mean_over
from shardwise.train.optimizers import sgd
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

DIM = 6


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Model(nn.Module):
    """Two layers, of which one is frozen at first, and a norm; `writes` is what its forward does to a weight."""

    def __init__(self, writes: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)
        self.first.requires_grad_(bool(writes))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes == "clamp":
            with torch.no_grad():
                self.last.weight.clamp_(-0.1, 0.1)
        if self.writes == "data":
            self.last.weight.data = functional.normalize(self.last.weight.data)
        return self.last(self.norm(torch.tanh(self.first(x))))


def losses(placed: Placed) -> list[float] | str:
    """Of three steps; or the message of a refusal."""
    mesh, state = placed.mesh, TrainState(placed, sgd(placed, lr=0.3))
    rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = rows.tensor_split(mesh.batch.size)[mesh.batch.rank].to(next(placed.parameters()).dtype)
    try:
        step = make_step(state, lambda out, x: mean_over((out - x).square()))
        return [step(own).loss for _ in range(3)]
    except ModelError as error:
        return str(error)


def changed(text: str, what: str) -> list[float] | str:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Model, plan, mesh, seed=3)
        if what == "made":
            placed.module.last.extra = nn.Parameter(torch.ones(DIM))
        elif what == "replaced":
            placed.module.last.weight = nn.Parameter(torch.ones(DIM, DIM, dtype=torch.float64))
        elif what == "hooked":
            placed.module.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        else:
            (placed.module.first if what == "unfrozen" else placed.module.last).requires_grad_(what == "unfrozen")
        return losses(placed)


@pytest.mark.parametrize("what", ["made", "frozen", "unfrozen", "replaced", "hooked"])
@pytest.mark.parametrize("text", ["dp2 / fp64", "fsdp2 / fp64"])
def test_parameters_that_change_after_apply(world: World, text: str, what: str) -> None:
    """`fully_shard` asks each time which parameters are trained; DDP was told; nobody knows of new ones."""
    found = world(2, changed, text, what)
    if what == "hooked" or what == "replaced" and text.startswith("dp2"):
        names = "last.weight has a hook on its gradient" if what == "hooked" else "last.weight (1 parameters) got no"
        assert all(names in str(message) for message in found)
    elif what == "replaced":
        assert all("last.weight was replaced after apply" in str(message) for message in found)
    elif what == "made" or text.startswith("dp2"):
        assert all(f"was {what} after apply" in str(message) for message in found)
    else:
        assert found == [pytest.approx(world(1, changed, "dp1 / fp64", what)[0], rel=1e-12)] * 2


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


SAVED: dict[str, Callable[[Placed], Any]] = {
    "state_dict": lambda placed: {"model": placed.module.state_dict()},
    "of a block": lambda placed: placed.module.get_submodule(f"blocks.{placed.mesh.rank % 2}").state_dict(),
    "on the CPU": lambda placed: {name: value.cpu() for name, value in placed.module.state_dict().items()},
    "parameters": lambda placed: list(placed.parameters()),
    "copied": lambda placed: [copy.copy(value) for value in placed.module.state_dict().values()],
    "whole": lambda placed: {name: full(value).clone() for name, value in placed.module.state_dict().items()},
}


def saved(text: str, what: str, folder: str) -> str:
    """What `torch.save` says after a step; nothing where it saves. Torch's DCP, on all ranks, saves under each plan."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Chain, plan, mesh, seed=3)
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda out, x: mean_over((out - x).square()))
        step(torch.ones(4, DIM))
        dcp.save(placed.module.state_dict(), checkpoint_id=folder)
        try:
            torch.save(SAVED[what](placed), io.BytesIO())
        except UsageError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("text", "what", "found"),
    [
        *[
            ("fsdp2", what, "its part (3, 6) of")
            for what in ("state_dict", "of a block", "on the CPU", "parameters", "copied")
        ],
        *[("pp2 / 1f1b mb2", what, "a layer of blocks.") for what in ("state_dict", "parameters", "copied")],
        ("fsdp2", "whole", ""),
        ("dp2", "state_dict", ""),
    ],
)
def test_a_save_of_a_part_of_a_model_is_refused(world: World, text: str, what: str, found: str, tmp_path: Path) -> None:
    for rank, said in enumerate(world(2, saved, text, what, str(tmp_path))):
        assert f"found {found}" in said if found else not said, said
        assert not found or f"on rank {rank}, which without those of the other ranks is no model" in said


def copied(text: str) -> None:
    """`copy.copy` asks as a pickle does; the copy is in this process, and has the same values."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        for parameter in apply(Chain, plan, mesh, seed=3).parameters():
            other = copy.copy(parameter)
            assert (
                type(other) is type(parameter) and other is not parameter and torch.equal(full(other), full(parameter))
            )


@pytest.mark.parametrize("text", ["fsdp2", "pp2 / 1f1b mb2"])
def test_a_part_of_a_model_may_be_copied(world: World, text: str) -> None:
    world(2, copied, text)


def unfrozen_late(text: str) -> str:
    """The refusal of a third step, over whose model a torch optimizer holds everything."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Model, plan, mesh, seed=3)
        step = make_step(
            TrainState(placed, torch.optim.SGD(placed.parameters(), lr=0.1)), lambda y, x: y.square().sum()
        )
        for _ in range(2):
            step(torch.ones(4, DIM))
        before = [p.detach().clone() for p in placed.local_parameters().values()]
        placed.module.first.requires_grad_(True)
        with pytest.raises(ModelError) as refused:
            step(torch.ones(4, DIM))
        for parameter, value in zip(placed.local_parameters().values(), before, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
        return str(refused.value)


@pytest.mark.parametrize("text", ["dp1", "dp2", "fsdp2"])
def test_a_parameter_that_is_unfrozen_between_steps_is_refused_before_one(world: World, text: str) -> None:
    for message in world(Plan.parse(text).world, unfrozen_late, text):
        assert "first.weight was unfrozen after make_step" in message and "a constructor that freezes less" in message


def within_averages() -> None:
    plan = Plan.parse("dp1")
    with open_mesh(plan) as mesh:
        placed = apply(lambda: nn.Linear(DIM, 1), plan, mesh, seed=3)
        state = TrainState(placed, sgd(placed, lr=0.1), ema=Ema(placed, 0.9))
        step = make_step(state, lambda y, x: y.square().sum())
        step(torch.ones(4, DIM))
        names = state.tensors().keys()
        own = placed.module.weight.detach().clone()
        with state.ema.applied():
            for what, function in (
                ("stepped", lambda: step(torch.ones(4, DIM))),
                ("saved", state.tensors),
                ("loaded", lambda: state.template(names)),
                ("applied again", lambda: state.ema.applied().__enter__()),
            ):
                with pytest.raises(UsageError, match=f"the state is {what} within `ema.applied\\(\\)`"):
                    function()
        assert torch.equal(placed.module.weight, own) and state.step == 1
        step(torch.ones(4, DIM))


def test_nothing_takes_averages_for_the_weights(world: World) -> None:
    world(1, within_averages)


def written(text: str, writes: str) -> list[float] | str:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        return losses(apply(lambda: Model(writes), plan, mesh, seed=3))


@pytest.mark.parametrize("writes", ["clamp", "data"])
@pytest.mark.parametrize(
    "text", ["fsdp2 / mb2 / fp64", "fsdp2 zero1", "dp1 zero3 / offload=state", "dp1 / bf16", "dp2 / bf16"]
)
def test_a_forward_that_writes_a_weight_is_refused_where_that_is_lost(world: World, text: str, writes: str) -> None:
    for message in world(Plan.parse(text).world, written, text, writes):
        assert "[module.writes-weights] forward writes into the weight last.weight" in str(message)


@pytest.mark.parametrize("writes", ["clamp", "data", "nothing"])
def test_a_forward_that_writes_a_weight_of_a_replica_is_as_in_one_process(world: World, writes: str) -> None:
    one = world(1, written, "dp1 / fp64", writes)[0]
    for text in ["dp2 / fp64", *(["fsdp2 / fp64"] if writes == "nothing" else [])]:
        assert world(2, written, text, writes) == [pytest.approx(one, rel=1e-12)] * 2


def modes(text: str) -> list[bool]:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Model, plan, mesh, seed=3)
        placed.module.norm.eval()
        data: Any = [torch.ones(DIM) * i for i in range(4)]
        evaluate(placed, lambda out, x: mean_over((out - x).square()), eval_batches(data, 2, mesh))
        found = [placed.module.training, placed.module.norm.training]
        placed.train(False)
        evaluate(placed, lambda out, x: mean_over((out - x).square()), eval_batches(data, 2, mesh))
        return [*found, placed.module.training]


@pytest.mark.parametrize("text", ["dp2", "fsdp2"])
def test_an_evaluation_leaves_each_module_in_its_mode(world: World, text: str) -> None:
    assert world(2, modes, text) == [[True, False, False]] * 2


def with_no_rows(text: str) -> tuple[float, bool, bool]:
    """The last rank has none."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(lambda: nn.Linear(DIM, DIM), plan, mesh, seed=3)
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda out, batch: functional.mse_loss(out, batch[1]))
        rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = rows[:0] if mesh.rank else rows
        with warnings.catch_warnings(action="ignore"):  # that ranks hold different numbers of rows
            m = [step((own, own.flip(1))) for _ in range(2)][-1]
        return m.loss, m.skipped, bool(placed.local_parameters()["weight"].isfinite().all())


@pytest.mark.parametrize("text", ["dp2 / fp64", "fsdp2 / fp64"])
def test_the_mean_of_no_rows_weighs_nothing(world: World, text: str) -> None:
    loss = world(1, with_no_rows, "dp1 / fp64")[0][0]
    assert world(2, with_no_rows, text) == [(pytest.approx(loss, rel=1e-12), False, True)] * 2


class Forces(nn.Module):
    """An energy and its derivative, which the loss is of; or the energy, and the loss takes the derivative."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = x
        for block in self.blocks:
            energy = block(energy)
        energy = torch.tanh(energy)
        return torch.autograd.grad(energy.sum(), x, create_graph=True)[0] if self.inside else energy


def second(text: str, inside: bool, since: int = 0) -> list[float] | str:
    """`since`: the first step whose loss takes the derivative."""
    plan, columns = Plan.parse(text), {"blocks.*": "column-gather"}

    def loss_fn(out: Tensor, x: Tensor) -> Any:
        if not inside and step.state.step >= since:
            out = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        return mean_over((out - x).square())

    with open_mesh(plan) as mesh:
        rules = columns if plan.axes.tp > 1 else None
        sample = None if plan.axes.pp > 1 else torch.ones(2, DIM)  # a pipeline is traced by the first step, too
        placed = apply(lambda: Forces(inside), plan, mesh, seed=3, sample=sample, rules=rules)
        rows = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = rows.tensor_split(mesh.batch.size)[mesh.batch.rank]
        try:
            step = make_step(TrainState(placed, sgd(placed, lr=0.3)), loss_fn)
            return [step(own.clone()).loss for _ in range(3)]
        except ModelError as error:
            return str(error)


@pytest.mark.parametrize("inside", [True, False])
def test_derivatives_of_derivatives(world: World, inside: bool) -> None:
    """Under `dp` as in one process; weights that are gathered for one backward pass are gone in the second.

    What layers that are split exchange in a backward pass has no derivative: another update, without a word.
    """
    one = world(1, second, "dp1 / fp64", inside)[0]
    assert world(2, second, "dp2 / fp64", inside) == [pytest.approx(one, rel=1e-12)] * 2
    for text in ("fsdp2 / fp64", "tp2 / fp64", *(("pp2 / gpipe mb2 / fp64",) if inside else ())):
        assert all("[module.second-derivatives]" in str(found) for found in world(2, second, text, inside))


@pytest.mark.parametrize("text", ["fsdp2 / fp64", "tp2 / fp64"])
def test_a_derivative_that_begins_in_a_later_step_is_refused_then(world: World, text: str) -> None:
    """Torch ended in an error of its storages; and a layer that is split went on, with another update."""
    assert all("[module.second-derivatives]" in str(found) for found in world(2, second, text, False, 2))


class Halved(nn.Module):
    """Its blocks are called with half of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        halves = {name: weight * 0.5 for name, weight in self.blocks.named_parameters()}
        return torch.func.functional_call(self.blocks, halves, (x,))


def halved(text: str) -> list[float] | str:
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        return losses(apply(Halved, plan, mesh, seed=3))


def test_a_call_with_other_weights(world: World) -> None:
    """What is gathered, or computed again, took the module's own, without a word."""
    expected = world(1, halved, "dp1 / fp64")[0]
    assert world(2, halved, "dp2 / fp64") == [pytest.approx(expected, rel=1e-12)] * 2
    for text in ("fsdp2 / fp64", "fsdp2 zero1 / fp64", "dp1 / fp64 / recompute=blocks"):
        for said in world(Plan.parse(text).world, halved, text):
            assert "[module.other-weights] blocks.0 is called with another tensor" in str(said)


def looked_at(text: str) -> list[float]:
    """The model is called by the script before its optimizer is built, and before its weights are clipped and saved."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Halves, plan, mesh, seed=3)
        rows = torch.ones(8 // mesh.batch.size, DIM, dtype=torch.float64)

        def look() -> None:
            with torch.no_grad():
                placed.module(rows)

        look()
        step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda out, x: mean_over((out - x).square()))
        found = []
        for _ in range(2):
            found.append(step(rows).loss)
            look()
            with torch.no_grad():
                for parameter in placed.parameters():
                    parameter.clamp_(-0.2, 0.2)
        look()
        tensors = step.state.tensors()
        return [*found, *(float(full(tensors[f"model.{name}"]).sum()) for name in placed.named_parameters())]


class Halves(Halved):
    """The same blocks, as they are, and a layer that is gathered with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


@pytest.mark.parametrize("text", ["fsdp2 / fp64", "fsdp2 zero2 / fp64"])
def test_a_forward_of_the_scripts_own_leaves_no_copies_behind(world: World, text: str) -> None:
    """An optimizer stepped gathered copies, and what was written into them was lost, without a word."""
    expected = world(1, looked_at, "dp1 / fp64")[0]
    assert world(2, looked_at, text) == [pytest.approx(expected, rel=1e-12)] * 2


def drawn_late(text: str) -> tuple[str, dict[str, Tensor]]:
    """What `module.apply` of a function that draws weights says, and all weights after it and other draws."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        rules = {"blocks.*": "column-gather", "last": "row"} if plan.axes.tp > 1 else None
        placed, seen = apply(Halves, plan, mesh, seed=3, rules=rules), []
        assert placed.module.apply(lambda module: seen.append(module)) is placed.module and seen[-1] is placed.module

        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

        said, linear = list[str](), next(m for m in placed.module.modules() if isinstance(m, nn.Linear))
        for draw in (partial(placed.module.apply, init), partial(linear.apply, init), linear.reset_parameters):
            try:
                draw()
            except ModelError as error:
                said.append(str(error))
        with torch.no_grad():
            for name, weight in placed.named_parameters().items():
                if "last" in name:
                    weight.add_(torch.randn_like(weight)).add_(torch.rand_like(weight, dtype=torch.float64))
                    weight.add_(torch.empty_like(weight).exponential_(2.0)).add_(torch.empty_like(weight).bernoulli_())
        return " / ".join(said), {name: full(weight).clone() for name, weight in placed.named_parameters().items()}


@pytest.mark.parametrize("text", ["dp2", "fsdp2", "fsdp3", "tp2", "fsdp2 tp2", "dp2 fsdp2 zero2"])
def test_weights_that_are_drawn_after_apply_are_those_of_one_process(world: World, text: str) -> None:
    """Each rank drew for its own part."""
    (_, expected), *_ = world(1, drawn_late, "dp1")
    for said, found in world(Plan.parse(text).world, drawn_late, text):
        assert not said and expected.keys() == found.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items()), found.keys()


def test_weights_that_are_drawn_after_apply_are_refused_in_a_pipeline(world: World) -> None:
    for said, _ in world(2, drawn_late, "pp2 / mb2"):
        assert said.count("`, which draws weights") == 3, said


def retyped(text: str, when: str) -> str:
    plan = Plan.parse(f"{text} / fp64")
    with open_mesh(plan) as mesh:
        placed = apply(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), plan, mesh, seed=3)
        rows = torch.ones(2, DIM, dtype=torch.float64)
        if when == "before":
            placed.module.float()
        try:
            step = make_step(TrainState(placed, sgd(placed, lr=0.3)), lambda out, x: mean_over((out - x).square()))
            step(rows)
            placed.module.float()
            step(rows)
        except ModelError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("text", ["dp1", "dp2", "fsdp2"])
def test_a_type_that_is_changed_after_apply_is_refused(world: World, text: str, when: str) -> None:
    """It ended in torch's words of two types, or trained in another than the plan's."""
    for said in world(int(text[-1]), retyped, text, when):
        assert "module.half(), .float(), .to(dtype)" in said
