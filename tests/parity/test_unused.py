"""Parameters that only some data ranks use: the gradients, updates and averages are those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ModelError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.train.loss import Loss, mean_over
from shardwise.train.optimizers import adamw
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

DIM, ROWS, STEPS = 6, 8, 5
PLANS = (
    "dp2 / find-unused", "fsdp2", "fsdp2 zero1", "fsdp2 zero2 / mb2", "fsdp2 / mb2", "dp2 fsdp2", "fsdp2 / bf16",
    "fsdp2 / wrap=1000", "dp2 fsdp2 / mb2 / reshard=2", "fsdp2 zero2 / mb2 / bf16",
)  # fmt: skip


class Heads(nn.Module):
    """A head for each of four tasks, of two sizes; every row names its task. Nobody asks for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.narrow, self.alike, self.unasked = nn.Linear(DIM, 1), nn.Linear(DIM, 1), nn.Linear(DIM, 1)
        self.wide = nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        hidden, out = torch.tanh(self.trunk(x)), x.new_zeros(len(x))
        for number, head in enumerate((self.narrow, self.alike, self.wide, self.unasked)):
            rows = (task == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, head(hidden[rows])[:, 0].to(out.dtype))
        return out


def batch(step: int) -> dict[str, Tensor]:
    """Sorted by task, so that ranks see different ones; in the last steps nobody sees the widest."""
    draw = torch.Generator().manual_seed(step)
    tasks = (
        torch.tensor([0] * 4 + [1] * 4)
        if step == 0
        else torch.randint(0, 3 if step < 3 else 2, (ROWS,), generator=draw)
    )
    tasks = tasks.sort().values
    return {"x": torch.randn(ROWS, DIM, generator=draw).double(), "task": tasks}


def loss_fn(output: Tensor, rows: dict[str, Tensor]) -> Loss:
    return mean_over((output - rows["x"].sum(-1)).square())


def trained(text: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of the steps, then parameters and averages: with decay, which moves what has a gradient."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh:
        placed = apply(Heads, plan, mesh, seed=3)
        state = TrainState(placed, adamw(placed, 0.05, weight_decay=0.1))
        step, numbers = make_step(state, loss_fn, clip=0.5), []
        make_step(state, loss_fn)  # another one of the same model takes nothing from it
        for i in range(STEPS):
            share = {name: value.tensor_split(mesh.batch.size)[mesh.batch.rank] for name, value in batch(i).items()}
            metrics = step(share)
            numbers += [metrics.loss, metrics.grad_norm]
        return numbers, {name: whole(tensor) for name, tensor in state.tensors().items()}


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", PLANS)
def test_what_some_ranks_use_trains_as_in_one_process(world: Any, plan: str) -> None:
    precision, near = ("bf16", 1e-2) if "bf16" in plan else ("fp64", 1e-11)
    text = plan if "bf16" in plan else f"{plan} / fp64"
    [(numbers, tensors)] = world(1, trained, f"dp1 / {precision}")
    for found, state in world(Plan.parse(text).world, trained, text):
        assert found == pytest.approx(numbers, rel=near)
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.allclose(state[name].double(), tensor.double(), rtol=near, atol=near), name


def test_zeros_are_in_the_type_of_sums_over_micro_batches(world: Any) -> None:
    """In which bf16 gradients are not: torch ended a step in an assertion where a head had none, or its first one."""
    test_what_some_ranks_use_trains_as_in_one_process(world, "fsdp2 zero1 / mb2 / bf16")


@pytest.mark.parametrize("plan", ["dp2", "dp2 / mb2"])
def test_what_ddp_waits_for_is_named_before_anything_is_updated(world: Any, plan: str) -> None:
    """It had reduced nothing, and the replicas' difference was laid at the optimizer's door."""
    for said in world(2, refused, f"{plan} / fp64"):
        assert said.startswith("[module.unused] ") and "unasked.weight" in said and "add find-unused" in said


def refused(text: str) -> str:
    with pytest.raises(ModelError) as caught:
        trained(text)
    return str(caught.value)


def test_a_group_that_ranks_call_unequally_often_is_named(world: Any) -> None:
    """Where both heads are of one size what is gathered fits, and is another head's."""
    for said in world(2, refused, "fsdp2 / wrap=7 / fp64"):
        assert "narrow was called 0 times in this step by one data rank and 1 times by another" in said


def in_the_loss_of_another(text: str) -> str:
    """A step of a model whose wrapper was called in the loss of another one."""
    plan = Plan.parse(text)
    with open_mesh(plan) as mesh, pytest.raises(ModelError) as caught:
        maker, judge = (apply(lambda: nn.Linear(DIM, DIM), plan, mesh, seed=seed) for seed in (1, 2))
        make = make_step(TrainState(maker, adamw(maker, 0.1)), lambda made, _: mean_over(judge.parts[0].run(made)))
        judged = make_step(TrainState(judge, adamw(judge, 0.1)), lambda says, _: mean_over(says))
        for step in (judged, make, judged):
            step(torch.ones(4, DIM))
    return str(caught.value)


def test_the_wrapper_of_a_second_model_is_not_the_scripts_to_call(world: Any) -> None:
    """Torch spoke of unused parameters; `docs/loss.md` has what works."""
    for said in world(2, in_the_loss_of_another, "dp2"):
        assert "found a call of `placed.parts[0].run` by the script itself" in said


@dataclass
class Answer:
    """Beside what the loss takes a number that it does not."""

    main: Tensor
    beside: Tensor


class Telling(nn.Module):
    """A second head, whose output is in a dataclass, tuple or dict, or an object that nothing looks into."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.trunk = kind, nn.Linear(DIM, DIM)
        self.head, self.second = nn.Linear(DIM, 1), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        main, beside = self.head(hidden)[:, 0], self.second(hidden)[:, 0]
        if self.kind == "object":
            return SimpleNamespace(main=main, beside=beside)
        return (main, beside) if self.kind == "tuple" else Answer(main, beside)


def told(text: str, kind: str, *asked: int) -> tuple[str, list[float], dict[str, Tensor]]:
    """Steps; in those that are `asked` the loss takes the second head, too."""
    plan = Plan.parse(f"{text} / fp64")
    with open_mesh(plan) as mesh:
        placed = apply(lambda: Telling(kind), plan, mesh, seed=3)
        state = TrainState(placed, adamw(placed, 0.05))

        def loss(output: Any, rows: Tensor) -> Loss:
            main, beside = output if kind == "tuple" else (output.main, output.beside)
            both = main + beside if state.step in asked else main
            return mean_over((both - rows.sum(-1)).square())

        step, numbers = make_step(state, loss), []
        try:
            for i in range(3):
                metrics = step(batch(i)["x"].tensor_split(mesh.batch.size)[mesh.batch.rank])
                numbers += [metrics.loss, metrics.grad_norm]
        except ModelError as error:
            return str(error), numbers, {}
        return "", numbers, {name: whole(tensor) for name, tensor in state.tensors().items()}


@pytest.mark.parametrize("kind", ["dataclass", "tuple"])
@pytest.mark.parametrize(
    ("plan", "asked"), [("dp2 / find-unused", ()), ("dp2 / find-unused", (0, 2)), ("dp2 / static-graph", (0, 1, 2))]
)
def test_an_output_that_no_loss_takes_is_found_in_any_container(
    world: Any, plan: str, asked: tuple[int, ...], kind: str
) -> None:
    (_, numbers, tensors), *_ = world(1, told, "dp1", kind, *asked)
    for said, found, theirs in world(2, told, plan, kind, *asked):
        assert not said and found == pytest.approx(numbers, rel=1e-12)
        assert theirs.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(theirs[name], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", ["dataclass", "tuple"])
def test_a_static_graph_whose_loss_leaves_an_output_out_is_refused_before_the_update(world: Any, kind: str) -> None:
    """Its first step looks for the unused, its second one waits for them: torch's error came in the third."""
    for said, found, _ in world(2, told, "dp2 / static-graph", kind):
        assert "[module.unused] second.weight, second.bias" in said and "in place of static-graph" in said
        assert len(found) == 2


def test_an_output_in_which_ddp_finds_nothing_is_refused(world: Any) -> None:
    for said, *_ in world(2, told, "dp2 / find-unused", "object"):
        assert "SimpleNamespace" in said and "drop that word" in said
