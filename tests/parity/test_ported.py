"""What scripts of other libraries bring along: it trains as in one process, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import World
from shardwise.testing.world import WorldError

WIDTH, ROWS, STEPS = 6, 8, 3


class Activated(nn.BatchNorm1d):
    """A norm with an activation in its own forward, as the convolutional nets of some libraries have it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None and self.momentum is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        own = self.running_mean, self.running_var, self.weight, self.bias
        return torch.relu_(F.batch_norm(x, *own, self.training, self.momentum, self.eps))


class Around(nn.BatchNorm1d):
    """A norm that casts, or scales, around torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(2 * x)


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), Activated(WIDTH), nn.Linear(WIDTH, 2, bias=False), Around(2)
    )


def converted() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.BatchNorm1d(2)))


class Taught(nn.Module):
    """Its teacher's dropout is off whenever `train` was called; a model that was just built is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, 2), nn.Sequential(nn.Linear(WIDTH, 2), nn.Dropout(0.5))

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) + self.teacher(x)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.parts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(2, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(part(torch.tanh(self.up(x))) for part in self.parts)


class Turns(nn.Module):
    """Layers of two classes in turns: they are its blocks, not the equal parts of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Wide(), nn.Linear(WIDTH, WIDTH), Wide()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        prune.custom_from_mask(self.inner, "weight", (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Chain(nn.Module):
    """Blocks with pruned weights, which a hook makes anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Bootstrapped(nn.Module):
    """A target network, copied with its batch norm in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.BatchNorm1d(2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x + 1)
        return self.online(x) - target


class Counting(nn.Module):
    """A block whose norm averages all batches (it divides by their count), and whose gradient a hook halves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), Around(WIDTH)
        self.norm.momentum = None
        self.register_full_backward_hook(lambda module, to_input, to_output: tuple(0.5 * each for each in to_input))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.inner(x)))


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Counting(), Counting()), nn.Linear(WIDTH, 2))


SEEN: list[Tensor] = []


def watched() -> nn.Module:
    model = Chain()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: SEEN.append(output))
    return model


def summed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 2))


def rows(step: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def squares(output: Tensor, batch: Tensor) -> sw.Loss:
    return sw.mean_over((output - batch[:, :2]).square())


def of_features(output: Tensor, batch: Tensor) -> sw.Loss:
    """A loss that takes what hooks have collected."""
    found = [*SEEN]
    SEEN.clear()
    assert len(found) == 2
    return sw.mean_over((output - batch[:, :2]).square().mean(1) + sum(each.square().mean(1) for each in found))


class Sharpness(torch.optim.Optimizer):
    """Every other step climbs, and the next one goes back by an assignment and descends, as SAM is mostly written."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "climbs": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            if group["climbs"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad, alpha=0.5)
            else:
                p.data = self.state[p]["before"]
                p.data = p.data - group["lr"] * p.grad
        group["climbs"] = not group["climbs"]


def sgd(placed: sw.Placed) -> Any:
    return sw.sgd(placed, lr=0.1, momentum=0.9)


def sharpness(placed: sw.Placed) -> Any:
    return Sharpness(list(placed.parameters()))


def trained(
    text: str, model: Callable[[], nn.Module], loss_fn: Any = squares, count: int = ROWS, make: Any = sgd
) -> dict[str, Any]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(model, plan, mesh, seed=3)
        step, found = (
            sw.make_step(sw.TrainState(placed, make(placed)), loss_fn),
            dict[str, Any](),
        )
        for number in range(STEPS):
            metrics = step(rows(number, count).tensor_split(mesh.batch.size)[mesh.batch.rank])
            found |= {f"loss {number}": metrics.loss, f"norm {number}": metrics.grad_norm}
        named = placed.named_parameters() | placed.named_buffers()
        return found | {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for n, t in named.items()}


@pytest.mark.parametrize(
    ("model", "loss_fn", "plan"),
    [
        (norms, squares, "dp2"),
        (norms, squares, "fsdp2"),
        (converted, squares, "dp2"),
        (Taught, squares, "dp2 / mb2"),
        (Chain, squares, "pp2 / 1f1b mb2"),
        (Turns, squares, "pp2 / 1f1b mb2"),
        (Turns, squares, "fsdp2 / recompute=blocks"),
        (counting, squares, "pp2 / gpipe mb1"),
        (Bootstrapped, squares, "fsdp2"),
        (watched, of_features, "dp2"),
    ],
)
def test_it_trains_as_in_one_process(world: World, model: Any, loss_fn: Any, plan: str) -> None:
    (alone,) = world(1, trained, "dp1", model, loss_fn)
    for rank in world(2, trained, plan, model, loss_fn):
        assert rank.keys() <= alone.keys()
        for name, value in rank.items():
            torch.testing.assert_close(
                value, alone[name], rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
            )


def check_equal(ranks: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    for rank in ranks:
        for name, value in rank.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("plan", ["fsdp2", "dp2"])
def test_an_optimizer_that_assigns_to_parameters(world: World, plan: str) -> None:
    (alone,) = world(1, trained, "dp1", summed, squares, ROWS, sharpness)
    check_equal(world(2, trained, plan, summed, squares, ROWS, sharpness), alone)


@pytest.mark.parametrize("plan", ["dp2", "fsdp2 / mb2"])
def test_a_rank_without_rows_draws_nothing(world: World, plan: str) -> None:
    """It ended in a division by zero, where the model has dropout."""
    (alone,) = world(1, trained, "dp1", summed, squares, 1)
    check_equal(world(2, trained, plan, summed, squares, 1), alone)


class Samples:
    """Rows by number, of which some are bad."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor | None:
        return None if index == 5 else rows(index, 1)[0]


def two_views(samples: list[Tensor]) -> Tensor:
    return torch.stack([view for sample in samples for view in (sample, -sample)])


def good_ones(samples: list[Tensor | None]) -> Tensor:
    return torch.stack([sample for sample in samples if sample is not None])


def collated(text: str, collate: Any) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(summed, plan, mesh, seed=3)
        chosen = [n for n in range(24) if n != 5] if collate is two_views else range(24)
        source: Any = Samples()  # a data set by its methods
        data = sw.loader(
            torch.utils.data.Subset(source, chosen), plan.batch, mesh, global_size=6, shuffle=False, collate=collate
        )
        state = sw.TrainState(placed, sgd(placed), data)
        return [m.loss for m in sw.steps(state, squares, until=2)]


@pytest.mark.parametrize(("ranks", "plan"), [(1, "dp1 / mb2"), (2, "dp2"), (2, "fsdp2 / mb3")])
def test_samples_that_are_several_rows_draw_by_the_sample(world: World, ranks: int, plan: str) -> None:
    (alone,) = world(1, collated, "dp1", two_views)
    for found in world(ranks, collated, plan, two_views):
        assert found == pytest.approx(alone, rel=1e-12)


def test_rows_that_collate_leaves_out_are_refused_where_rows_draw() -> None:
    with pytest.raises(
        ModelError, match="found 5 rows of 6 samples .* let collate keep a bad sample and give it no weight"
    ):
        collated("dp1", good_ones)


def assigned(text: str) -> str:
    """The error of a loop that clips weights after each step; first in place, which is right."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(summed, plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=0.1)), squares)
        for parameter in placed.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        step(rows(0, ROWS).float())
        for parameter in placed.parameters():
            parameter.data = parameter.data.clamp(-0.1, 0.1)
        with pytest.raises(ModelError) as caught:
            step(rows(0, ROWS).float())
        return str(caught.value)


@pytest.mark.parametrize("plan", ["fsdp2", "fsdp2 zero1 / offload=state"])
def test_an_assignment_that_a_shard_ignores_is_refused(world: World, plan: str) -> None:
    for told in world(2, assigned, plan):
        assert told.startswith("parameter 0.weight is sharded, and its `.data` was assigned, which changed nothing")


@pytest.mark.parametrize("plan", ["dp2 / mb3", "fsdp2 / mb3"])
def test_a_last_batch_of_fewer_rows_than_micro_batches(world: World, plan: str) -> None:
    """Two rows on one rank, one on the other, and three micro-batches: those that are left are padding."""
    (alone,) = world(1, trained, "dp1 / mb3", summed, squares, 3)
    check_equal(world(2, trained, plan, summed, squares, 3), alone)


def penalised(text: str, whole: bool, several: bool = False, since: int = 0) -> str:
    """A loss with a penalty on the weights of the blocks, from some step on: the error of it, or nothing."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Plain, plan, mesh)

        def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
            weights = [p for n, p in placed.named_parameters().items() if n.endswith("weight")]
            weights = [p.full_tensor() if whole and hasattr(p, "full_tensor") else p for p in weights]
            return output.square().mean() + sum(weight.abs().sum() for weight in weights if step.state.step >= since)

        with pytest.raises(ModelError) as caught:
            losses = sw.Losses(lambda *of: {"all": sw.Loss(loss_fn(*of), 1)}, weights={"all": lambda batch: 1})
            step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), losses if several else loss_fn)
            for _ in range(since):
                step(rows(0, ROWS)[mesh.batch.rank :: mesh.batch.size])
            step(rows(0, ROWS)[mesh.batch.rank :: mesh.batch.size])
        return str(caught.value)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("whole", "several"), [(False, False), (True, False), (True, True)])
def test_a_penalty_on_weights_that_a_rank_has_parts_of_is_refused(world: World, whole: bool, several: bool) -> None:
    for told in world(2, penalised, "fsdp2", whole, several):
        assert "[module.weights-in-loss] the loss function takes the weight blocks.0.weight itself" in told


@pytest.mark.parametrize("since", [0, 1])
def test_a_penalty_on_the_weights_of_the_last_stage_is_refused(world: World, since: int) -> None:
    with pytest.raises(WorldError, match=r"\[module.weights-in-loss\] .* the weight blocks.1.weight itself"):
        world(2, penalised_unseen, "pp2 / 1f1b mb2", since)


def penalised_unseen(text: str, since: int) -> None:
    """The ranks of other stages see nothing but a rank that has ended."""
    raise AssertionError(penalised(text, False, since=since))


class Headed(Plain):
    """What its loss multiplies by a weight that is in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.head(x).sum()


def by_head(text: str) -> list[float]:
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        rules = {"blocks.*": "replicate", "head": "replicate"} if plan.axes.tp > 1 else None
        placed = sw.apply(Headed, plan, mesh, rules=rules)

        def loss_fn(output: Tensor, batch: Tensor) -> sw.Loss:
            weight: Any = placed.named_parameters()["head.weight"]
            whole = weight.to_local() if plan.axes.tp > 1 else weight
            return sw.mean_over((output @ whole.T - batch[:, :2]).square())

        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), loss_fn)
        found = [step(rows(i, ROWS).tensor_split(mesh.batch.size)[mesh.batch.rank]) for i in range(STEPS)]
        return [number for metrics in found for number in (metrics.loss, metrics.grad_norm)]


@pytest.mark.parametrize("plan", ["fsdp2", "pp2 / 1f1b mb2"])
def test_a_weight_that_the_last_stage_has_whole_may_be_in_the_loss(world: World, plan: str) -> None:
    (alone,) = world(1, by_head, "dp1")
    for found in world(2, by_head, plan):
        assert found == pytest.approx(alone, rel=1e-11)


def test_a_batch_of_another_kind_is_refused_by_what_it_is() -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(WIDTH, 2), sw.Plan(), mesh)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), squares)
        with pytest.raises(ModelError, match=r"found Sample; in the collate .* arguments of Linear.forward \(input\)"):
            step(Sample(torch.zeros(2, WIDTH)))


class Sample:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def copied(text: str) -> list[str]:
    """What is said of copies of a placed module, and of one in it; empty where each computes with its own weights."""
    plan, said = sw.Plan.parse(text), list[str]()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Chain if "pp" in text else Bootstrapped, plan, mesh)
        inner = placed.module.blocks if "pp" in text else placed.module.online
        for module, copies in ((placed.module, AveragedModel), (inner, copy.deepcopy)):
            try:
                twin: Any = copies(module)
            except ModelError as error:
                said.append(str(error))
                continue
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
                said.append("" if not twin.eval()(torch.ones(2, WIDTH)).any() else "computes with those of the first")
    return said


@pytest.mark.parametrize("plan", ["dp1 / bf16", "dp2", "fsdp2", "pp2 / 1f1b mb2"])
def test_a_copy_that_would_compute_with_the_weights_of_the_first_is_refused(world: World, plan: str) -> None:
    """`AveragedModel` under bf16 and cp evaluated the weights of the last step, without a word."""
    for said in world(sw.Plan.parse(plan).world, copied, plan):
        assert all("[module.copied] copy.deepcopy: found a module to which apply has put" in each for each in said)
    assert copied("dp1") == ["", ""]


class Encoding(Headed):
    def encode(self, x: Tensor) -> Tensor:
        return self.head(super(Headed, self).forward(x))


def encoded(text: str) -> list[Any]:
    """What a method of a model gives after a step; and after it was registered."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Encoding, plan, mesh, seed=3)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1))
        sw.make_step(state, lambda y, _: sw.mean_over(y.square()))(rows(0, ROWS)[mesh.batch.rank :: mesh.batch.size])
        found: list[Any] = []
        for _ in range(2):
            try:
                found.append(placed.module.encode(rows(1, 2)).detach())
            except ModelError as error:
                found.append(str(error))
            register_fsdp_forward_method(placed.module, "encode")
        return found


def test_parts_of_a_module_that_are_called_by_themselves_are_refused(world: World) -> None:
    """It ended in torch's error about mixed tensors, or in one of the pipeline's own."""
    (alone,) = world(1, encoded, "dp1")
    for told, registered in world(2, encoded, "fsdp2"):
        assert told.startswith("[module.called-by-parts] head was called by itself, found its weight sharded")
        torch.testing.assert_close(registered, alone[1], rtol=1e-11, atol=1e-13)
    for rank, (told, _) in enumerate(world(2, encoded, "pp2 / 1f1b mb2")):
        assert told.startswith(f"[module.called-by-parts] blocks.{1 - rank}, which is on another pipeline stage")
    with pytest.raises(WorldError, match="a pipeline's stage was called by itself"):
        world(2, run_alone)


def run_alone() -> None:
    plan = sw.Plan.parse("pp2 / 1f1b mb2")
    with sw.open_mesh(plan) as mesh:
        sw.apply(Headed, plan, mesh).parts[0].run(rows(0, 2))
