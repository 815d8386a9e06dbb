"""Planted differences between ranks, in what collectives and numbers follow from: named before the first step."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwise as sw
from shardwise.errors import ExitCode, ReplicaError
from shardwise.testing import World
from shardwise.train.exchange import digest
from shardwise.train.guards import agreement, replicas
from tests.parity import grid, points

WHERE = {
    "wide": "parameter last.weight",
    "extra": "parameter more.weight",
    "frozen": "parameter last.bias",
    "init": "the initial value of first.weight",
    "buffer": "the value of buffer offset",
    "apply's seed": "the seed of apply",
    "optimizer": "the optimizer",
    "lr": "lr of the optimizer's group 0",
    "betas": "betas of the optimizer's group 0",
    "schedule": "the schedule",
    "a schedule of one's own": "the schedule's factor",
    "ema": "the moving average",
    "loader's seed": "the loader's seed",
    "rows per step": "the loader's rows per step",
    "size": "the loader's size",
    "epochs": "the loader's epochs",
    "clip": "StepOptions.clip_norm",
    "check_replicas": "StepOptions.check_replicas",
    "on_nonfinite": "StepOptions.on_nonfinite",
    "protect": "StepOptions.protect",
    "losses": "the losses",
}
"""What is planted -> what the message must name."""


def net(what: str) -> torch.nn.Module:
    module = points.Net()
    module.register_buffer("offset", torch.full((3,), 2.0 if what == "buffer" else 1.0))
    if what == "wide":
        module.last = torch.nn.Linear(points.WIDTH, 4)
    if what == "extra":
        module.more = torch.nn.Linear(2, 2)
    if what == "init":
        with torch.no_grad():
            module.first.weight.fill_(0.5)
    module.last.bias.requires_grad_(what != "frozen")
    return module


def step_options(what: str) -> sw.StepOptions:
    return {
        "clip": sw.StepOptions(clip_norm=0.5),
        "check_replicas": sw.StepOptions(check_replicas=3),
        "on_nonfinite": sw.StepOptions(on_nonfinite="raise"),
        "protect": sw.StepOptions(protect=sw.Protect()),
    }.get(what, sw.StepOptions(check_replicas=2))


def train(text: str, odd: int, what: str) -> str:
    """Two steps, in which one rank has something else; what this rank was told."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        mine = what if mesh.rank == odd else ""
        placed = sw.apply(lambda: net(mine), plan, mesh, seed=4 if mine == "apply's seed" else 3)
        data = sw.loader(
            points.Points(32 if mine == "size" else 40),
            grid.batch(plan, 16 if mine == "rows per step" else 8),
            mesh,
            seed=2 if mine == "loader's seed" else 1,
            epochs=9 if mine == "epochs" else None,
        )
        betas = (0.8, 0.99) if mine == "betas" else (0.9, 0.99)
        adamw = sw.adamw(placed, lr=0.2 if mine == "lr" else 0.1, betas=betas)
        is_own = what == "a schedule of one's own"
        state = sw.TrainState(
            placed,
            sw.sgd(placed, lr=0.1) if mine == "optimizer" else adamw,
            data,
            schedule=(lambda _: 0.5 if mine else 0.25) if is_own else sw.warmup_cosine(2 + (mine == "schedule"), 9),
            ema=sw.Ema(placed) if mine == "ema" else None,
            seed=7,
        )
        several = sw.Losses(lambda o, b: {"main": points.weighted(o, b)}, weights={"main": lambda b: b[2].sum()})
        loss_fn = several if mine == "losses" else points.weighted
        try:
            for _ in sw.steps(state, loss_fn, until=2, options=step_options(mine)):
                pass
        except ReplicaError as error:
            return str(error)
        return ""


@pytest.mark.share(3)
@pytest.mark.parametrize("what", list(WHERE))
def test_what_differs_on_one_rank_is_named_on_all(world: World, what: str) -> None:
    plan = "dp3" if what in ("lr", "buffer", "init") else "fsdp3" if what == "check_replicas" else "fsdp2"
    told = world(sw.Plan.parse(plan).world, train, f"{plan} / fp64", 1, what)
    assert len(set(told)) == 1
    everybody, others = ("0, 1, 2", "0, 2") if plan.endswith("3") else ("0, 1", "0")
    assert told[0].startswith(f"before step 1: {WHERE[what]} must be equal on ranks {everybody}: found ")
    assert f" on rank {others}; " in told[0] and " on rank 1;" in told[0]  # the majority first
    assert told[0].index(f"on rank {others};") < told[0].index("on rank 1;")


def test_values_are_told(world: World) -> None:
    [told, _] = world(2, train, "dp2 / fp64", 1, "frozen")
    assert (
        "found (3,) torch.float64, replicated on rank 0; (3,) torch.float64, replicated, frozen on rank 1; needed"
        in told
    )
    assert ReplicaError.exit_code is ExitCode.REPLICAS_DIFFER


@pytest.mark.parametrize("plan", ["dp3", "dp2 pp2 / 1f1b mb2"])
def test_negative_control_where_nothing_differs_nothing_is_said(world: World, plan: str) -> None:
    """Stages hold other parameters than one another, and are compared with themselves only."""
    size = sw.Plan.parse(plan).world
    assert world(size, train, f"{plan} / fp64", size, "") == [""] * size
    if "pp" in plan:  # rank 3 is the second replica of the second stage, and rank 2 the first
        told = world(size, train, f"{plan} / fp64", 3, "frozen")
        assert len(set(told)) == 1 and "parameter last.bias must be equal on ranks 2, 3: found" in told[0]


def counted(text: str) -> int:
    """How often ranks were asked in nine steps."""
    calls: list[Any] = []
    ask = replicas.gathered
    with pytest.MonkeyPatch.context() as patch, points.placed_state(text, points.Case(steps=9)) as state:
        patch.setattr(agreement, "gathered", lambda rows, mesh: (calls.append(rows), ask(rows, mesh))[1])
        for _ in sw.steps(state, points.weighted, until=9):
            pass
    return len(calls)


def test_ranks_are_asked_before_the_first_step_and_after_steps_1_4_and_so_on(world: World) -> None:
    assert world(2, counted, "fsdp2 / fp64") == [3, 3]


def reserved(text: str) -> str:
    """A buffer that its constructor leaves without a value has another one in each process."""

    class Cached(points.Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.empty(50, dtype=torch.float64))

    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(Cached, plan, mesh)
        placed.named_buffers()["cache"].fill_(mesh.rank)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1), sw.loader(points.Points(16), 8, mesh))
        return f"{next(sw.steps(state, points.weighted, until=1)).step}"


def test_memory_without_a_value_is_not_compared(world: World) -> None:
    assert world(2, reserved, "dp2 / fp64") == ["1", "1"]


class Counting(points.Net):
    """Writes into a buffer what it saw of its own rows, or of all rows where told so."""

    def __init__(self, mesh: sw.Mesh | None, *, is_state: bool, since: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64), persistent=is_state)
        self.mesh, self.calls, self.since = mesh, 0, since

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        total = output.detach().double().sum() * (self.calls >= self.since)
        self.calls += 1
        self.seen.add_(total if self.mesh is None else self.mesh.all_reduce_sum(total.reshape(1))[0])
        return output


def wrote(text: str, is_summed: bool, is_state: bool) -> str:
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: Counting(mesh if is_summed else None, is_state=is_state), plan, mesh)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1), sw.loader(points.Points(16), 8, mesh))
        try:
            return f"{[metrics.step for metrics in sw.steps(state, points.weighted, until=3)]}"
        except ReplicaError as error:
            return str(error)


def test_what_forward_writes_into_the_state_must_be_of_all_rows(world: World) -> None:
    first, second = world(2, wrote, "dp2 / fp64", False, True)
    assert first == second and first.startswith("the first step: buffer seen must be equal on ranks 0, 1: found ")
    assert "sum over ranks what it is made of" in first
    assert world(2, wrote, "dp2 / fp64", True, True) == ["[1, 2, 3]"] * 2
    assert world(2, wrote, "dp2 / fp64", False, False) == ["[1, 2, 3]"] * 2


def wrote_late(text: str) -> list[str]:
    """Warnings of a run whose forward writes of its own rows from its third step on."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(lambda: Counting(None, is_state=True, since=2), plan, mesh)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1), sw.loader(points.Points(16), 8, mesh))
        assert len(list(sw.steps(state, points.weighted, until=9))) == 9
        return [str(warning.message) for warning in caught if "buffer" in str(warning.message)]


def test_what_forward_begins_to_write_later_is_a_warning(world: World) -> None:
    first, second = world(2, wrote_late, "dp2 / fp64")
    assert len(first) == 1 and not second
    assert first[0].startswith("step 4 of this process: buffer seen must be equal on ranks 0, 1: found ")


def test_where_an_object_lies_in_memory_is_no_difference() -> None:
    a, b = torch.Generator(), torch.Generator()
    assert repr(a) != repr(b) and digest([a, "x"]) == digest([b, "x"]) != digest([a, "y"])


def given_rows(text: str, by_all_ranks: bool) -> str:
    """Rows that a script divides by data ranks, or, as DistributedSampler does by itself, by all ranks."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        config = sw.GPTConfig(vocab_size=16, dim=8, num_layers=2, num_heads=2, max_seq_len=8)
        placed = sw.apply(lambda: sw.GPT(config), plan, mesh)
        ids = torch.arange(8 * 8).view(8, 8) % 13
        parts, part = (mesh.world, mesh.rank) if by_all_ranks else (mesh.batch.size, mesh.batch.rank)
        rows = ids.tensor_split(parts)[part]
        step = sw.make_step(
            sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda o, b: sw.token_cross_entropy(o, b["labels"])
        )
        try:
            step({"input_ids": rows, "labels": rows})
        except ReplicaError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("plan", ["pp2 / mb2", *(pytest.param(p, marks=pytest.mark.soak) for p in ("tp2", "cp2"))])
def test_ranks_that_work_on_the_same_rows_were_given_the_same(world: World, plan: str) -> None:
    """A sampler that divides by all ranks gave inputs of one sample to one, and labels of another to another."""
    for said in world(2, given_rows, plan, True):
        assert "the batch's input_ids must be equal on ranks 0, 1" in said and "num_replicas=mesh.batch.size" in said
    assert world(2, given_rows, plan, False) == ["", ""]


def shared_rows(divides: bool) -> list[str]:
    """What is said where no sampler divides the rows over data ranks."""
    plan = sw.Plan.parse("dp2")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Linear(3, 2), plan, mesh)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda out, _: sw.mean_over(out.square()))
        rows = torch.arange(12.0).view(4, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step(rows[mesh.rank :: 2] if divides else rows)
        return [str(warning.message) for warning in caught]


def test_rows_that_nobody_divided_are_said_once(world: World) -> None:
    """Each would be trained on as often as there are data ranks, and losses agree."""
    first, other = world(2, shared_rows, False)
    assert len(first) == 1 and other == [] and "all 2 data ranks were given the same rows" in first[0]
    assert world(2, shared_rows, True) == [[], []]


def plateau(text: str, odd: int) -> str:
    """A scheduler that one rank tells another metric; what this rank was told then."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), plan, mesh, seed=1)
        optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        step = sw.make_step(sw.TrainState(placed, optimizer), lambda out, _: sw.mean_over(out.square()))
        rows = torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32
        try:
            for number in range(4):
                step(rows[mesh.batch.rank :: mesh.batch.size])
                scheduler.step(float(number if mesh.rank == odd else -number))
        except ReplicaError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("plan", ["dp2 / fp64", "fsdp3 / mb2 fp64", "pp2 dp2 / 1f1b mb2 fp64"])
def test_rates_that_one_rank_sets_otherwise_are_named_before_they_are_stepped_with(world: World, plan: str) -> None:
    """They trained as two models, and every metric said that all was well."""
    size = sw.Plan.parse(plan).world
    for said in world(size, plateau, plan, 1):
        assert said.startswith("step 3: lr of the optimizer's group 0 must be equal on ranks 0, 1")
        assert "0.1 on rank 0" in said and "on rank 1; needed" in said and "mesh.all_reduce_sum" in said
    assert world(size, plateau, plan, size) == [""] * size


def plain_means(text: str, sizes: tuple[int, ...]) -> list[str]:
    """What is said where each data rank gives the mean of so many rows."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), plan, mesh, seed=1)
        step = sw.make_step(sw.TrainState(placed, sw.sgd(placed, lr=0.1)), lambda out, _: out.square().mean())
        for number in range(2):
            draw = torch.Generator().manual_seed(number * 8 + mesh.batch.rank)
            step(torch.randn(sizes[mesh.batch.rank], 4, generator=draw, dtype=torch.float64))
    return [str(warning.message) for warning in caught if "plain mean" in str(warning.message)]


@pytest.mark.parametrize("plan", ["dp3 / fp64", "fsdp3 / fp64", "pp2 dp3 / 1f1b mb2 fp64"])
def test_plain_means_of_unequal_rows_are_said_once(world: World, plan: str) -> None:
    size = sw.Plan.parse(plan).world
    told = world(size, plain_means, plan, (4, 4, 2))
    assert len(told[0]) == 1 and "ranks hold unequal numbers of rows" in told[0][0] and not any(told[1:])
    assert not any(world(size, plain_means, plan, (4, 4, 4)))


class Drawing(Dataset[Tensor]):
    """An augmentation by a generator of its own, another one on each rank: no sample comes twice."""

    def __init__(self, rank: int) -> None:
        self._draw = torch.Generator().manual_seed(rank)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(4, generator=self._draw, dtype=torch.float64)


def in_an_order_of_its_own(text: str, kind: str, workers: int) -> tuple[str, list[str]]:
    """What is refused, or warned of, where each rank's data set has an order of its own; or is right."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows: Any = [torch.full((4,), i / 40, dtype=torch.float64) for i in range(40)]
        random.Random(mesh.rank if kind == "shuffled" else 0).shuffle(rows)  # as one without a seed
        placed = sw.apply(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), plan, mesh, seed=1)
        given = Drawing(mesh.rank) if kind == "drawing" else rows
        data = sw.loader(given, plan.batch, mesh, global_size=8, workers=workers)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1), data)
        step = sw.make_step(state, lambda out, _: sw.mean_over(out.square()))
        try:
            for _ in range(2):
                step(next(data))
        except ReplicaError as error:
            return str(error), []
    return "", [str(warning.message) for warning in caught if "data sets" in str(warning.message)]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_sets_in_an_order_of_each_ranks_own_are_told(world: World, workers: int) -> None:
    """Half of the samples came twice in an epoch, and others never."""
    (_, first), *others = world(3, in_an_order_of_its_own, "dp3 / fp64", "shuffled", workers)
    assert len(first) == 1 and "the data sets of ranks 0; 1; 2 have other samples in the same places" in first[0]
    assert others == [("", []), ("", [])]
    for kind in ("equal", "drawing"):
        assert world(2, in_an_order_of_its_own, "fsdp2 / fp64", kind, workers) == [("", []), ("", [])]


@pytest.mark.parametrize("plan", ["pp2 / 1f1b mb2 fp64", "pp2 dp2 / 1f1b mb2 fp64"])
def test_ranks_of_the_same_rows_whose_data_sets_differ_are_refused(world: World, plan: str) -> None:
    """Inputs of one sample met labels of another."""
    size = sw.Plan.parse(plan).world
    for said, _ in world(size, in_an_order_of_its_own, plan, "shuffled", 0):
        assert said.startswith("the first step: the batch's 0 must be equal on ranks ") and "one order" in said
    assert world(size, in_an_order_of_its_own, plan, "equal", 0) == [("", [])] * size
