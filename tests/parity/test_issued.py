"""Collectives that differ between ranks and are not refused by the back-end: found by the recorder, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import ReplicaError
from shardwise.testing import World
from shardwise.train import torch_private
from shardwise.train.guards.issued import Issued
from tests.parity import grid, moe_models, points
from tests.parity.points import Case

CASE = Case(steps=5, clip=None)
CHECK = sw.StepOptions(check_replicas=1)


def training(plan: str, wrong: bool, options: sw.StepOptions = CHECK) -> Any:
    """After step 2 a number is added up that is an integer on rank 1; what was said, and the number."""
    number = torch.ones(4)
    with points.placed_state(plan, CASE) as state:
        step = sw.make_step(state, points.weighted, options=options)
        while state.step < CASE.steps:
            if state.step == 2 and wrong:
                number = number.int() if state.mesh.rank == 1 else number
                dist.all_reduce(number)
            try:
                assert not step(next(state.batches)).events
            except ReplicaError as error:
                return str(error), None
    return "", number.tolist()


def test_a_type_that_depends_on_the_rank_is_named(world: World) -> None:
    texts = [text for text, _ in world(2, training, "dp2", True)]
    assert texts[0] == texts[1] and texts[0].startswith("step 3: collective "), texts
    assert (
        "of the group of ranks 0, 1 must be the same on each of its ranks: found all_reduce of (4) float on rank 0; "
        "all_reduce of (4) int on rank 1;" in texts[0]
    )


def test_negative_control_without_the_check_nobody_says_so(world: World) -> None:
    for text, number in world(2, training, "dp2", True, sw.StepOptions()):
        assert not text and number != [2.0] * 4, "gloo has added a float to an integer"


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp2 fsdp2", "fsdp2 tp2", "pp2 fsdp2 / 1f1b mb2", "fsdp2 / zero1"])
def test_nothing_is_said_where_nothing_is_wrong(world: World, plan: str) -> None:
    size = sw.Plan.parse(plan).world
    assert all(told == ("", [1.0] * 4) for told in world(size, training, plan, False))


def of_experts(text: str) -> int:
    """Three steps of a model whose tokens go to experts on other ranks, as many as are sent to each."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(moe_models.MODELS["bias"], plan, mesh, seed=1)
        batches = sw.loader(grid.Rows(), 16, mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-3), batches)
        step = sw.make_step(state, moe_models.LOSSES, options=CHECK)
        for _ in range(3):
            assert not step(next(batches)).events
        return state.step


@pytest.mark.parametrize("plan", ["fsdp2 ep2 / fp64", "cp2 / fp64"])
def test_nor_where_sizes_differ_by_right(world: World, plan: str) -> None:
    assert world(2, of_experts, plan) == [3, 3]


def calling() -> list[str]:
    """Every kind of collective, some uneven; then one of another size; what is said after each."""
    said = []
    with sw.open_mesh(sw.Plan.parse("dp2"), device="cpu") as mesh:
        issued, rank = Issued(mesh), mesh.rank

        def look() -> None:
            try:
                issued.check(7)
                said.append("")
            except ReplicaError as error:
                said.append(str(error))

        parts, whole = [torch.empty(3), torch.empty(3)], torch.empty(6)
        dist.all_gather(parts, torch.ones(3))
        dist.broadcast(whole, 0)
        dist.gather(torch.ones(3), parts if rank == 0 else None)
        dist.scatter(torch.empty(3), parts if rank == 0 else None)
        dist.reduce(torch.ones(3), 1)
        dist.broadcast_object_list(["a" * 9] if rank == 0 else [None], 0)
        dist.gather_object("a" * (rank + 1), [None, None] if rank == 0 else None)
        dist.scatter_object_list([None], ["a", "bcd"] if rank == 0 else None)
        dist.reduce_scatter(torch.empty(3), [torch.ones(3), torch.ones(3)])
        dist.all_gather_object([None, None], "a" * (rank + 1))
        dist.all_to_all_single(torch.empty(2 + 2 * rank), torch.ones(3), [1 + rank] * 2, [1, 2])
        if rank == 0:
            dist.send(whole, 1)
        else:
            dist.recv(whole, 0)
        look()
        dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(3, 2))
        dist.barrier()
        look()
        for _ in range(50):
            dist.all_reduce(torch.ones(2))
        look()
        look()
    return said


@pytest.mark.parametrize("kept", ["2000", "20"])
def test_each_kind_of_collective_and_a_recorder_that_forgets(world: World, kept: str) -> None:
    for said in world(2, calling, TORCH_FR_BUFFER_SIZE=kept):
        assert said[0] == said[2] == said[3] == "", said
        assert "found all_reduce of (3, 2) float on rank 0; all_reduce of (2, 3) float on rank 1;" in said[1]


def test_what_torch_records(world: World) -> None:
    """The private names still mean what they meant."""
    for entries, groups in world(2, recorded):
        assert [entry["profiling_name"] for entry in entries][-2:] == ["gloo:all_reduce", "gloo:barrier"]
        assert entries[-2]["input_sizes"] == [[2, 3]] and entries[-2]["input_dtypes"] == ["Double"]
        assert entries[-1]["collective_seq_id"] == entries[-2]["collective_seq_id"] + 1
        assert groups[entries[-1]["process_group"][0]] == [0, 1]


def recorded() -> Any:
    with sw.open_mesh(sw.Plan.parse("dp2"), device="cpu"):
        dist.all_reduce(torch.ones(2, 3, dtype=torch.float64))
        dist.barrier()
        return torch_private.recorded_collectives(), torch_private.group_names()
