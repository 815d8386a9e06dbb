"""The pretended world: who this process is, that nothing is left behind, and torch's private names for it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.parallel.mesh import BatchRank
from shardwise.testing import World, fake, fake_world, torch_private


def test_every_rank_is_where_the_plan_puts_it() -> None:
    plan = sw.Plan.parse("pp2 dp2 fsdp2 tp2 / mb2")
    seen = set()
    for rank in range(plan.world):
        with fake_world(plan.world, rank), sw.open_mesh(plan, device="cpu") as mesh:
            assert (mesh.rank, mesh.world, mesh.is_first) == (rank, 16, rank == 0)
            assert mesh.batch == BatchRank(rank=mesh.index("dp_replicate") * 2 + mesh.index("dp_shard"), size=4)
            assert rank in dist.get_process_group_ranks(mesh.group("dp_replicate", "dp_shard"))
            mesh.barrier()
            seen.add(tuple(mesh.index(axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")))
    assert len(seen) == plan.world


def test_sixteen_thousand_ranks() -> None:
    plan = sw.Plan.parse("pp16 dp128 fsdp8 / mb16")
    with fake_world(plan.world, 9999), sw.open_mesh(plan, device="cpu") as mesh:
        assert (mesh.world, mesh.rank, mesh.index("pp"), mesh.batch.size) == (16_384, 9999, 9, 1024)
        assert dist.get_world_size(mesh.group("dp_replicate", "dp_shard")) == 1024


def test_launchers_variables_are_about_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "64")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with fake_world(8, 3), sw.open_mesh(sw.Plan.parse("dp8"), device="cpu") as mesh:
        assert mesh.rank == 3


def test_nothing_is_left_behind() -> None:
    hook = sys.excepthook
    with pytest.raises(ZeroDivisionError), fake_world(4):
        assert dist.is_initialized() and sys.excepthook is not hook
        _ = 1 / 0
    assert not dist.is_initialized() and sys.excepthook is hook
    with fake_world(4):
        dist.destroy_process_group()  # the user may have been tidy
    with sw.open_mesh(sw.Plan(), device="cpu") as mesh:
        assert dist.get_backend() == "gloo" and mesh.world == 1


@pytest.mark.parametrize(("num_ranks", "rank"), [(0, 0), (4, 4), (4, -1), (16_385, 0)])
def test_a_rank_outside_of_the_world_is_refused(num_ranks: int, rank: int) -> None:
    said = rf"found rank {rank} of {num_ranks}; needed 1 to 16384 ranks"
    with pytest.raises(UsageError, match=said), fake_world(num_ranks, rank):
        pass


def test_a_second_world_inside_is_refused() -> None:
    with fake_world(4, 2):
        with pytest.raises(UsageError, match="rank 2 of a fake process group of 4 already"), fake_world(4):
            pass
        assert dist.get_rank() == 2


def coordinates() -> list[int]:
    """Of the product of a split and a whole DTensor, as rank 3 and then as rank 5: DTensor caches by mesh."""
    found = []
    for rank in (3, 5):
        with fake_world(8, rank), sw.open_mesh(sw.Plan.parse("fsdp8"), device="cpu") as mesh:
            axis = mesh.device_mesh["dp_shard"]
            split = DTensor.from_local(torch.ones(2), axis, (Shard(0),))
            whole = DTensor.from_local(torch.arange(16.0), axis, (Replicate(),))
            product = split * whole
            assert product.to_local().tolist() == [2 * rank, 2 * rank + 1]
            found += product.device_mesh.get_coordinate()
    return found


def test_worlds_in_a_row_do_not_share_meshes() -> None:
    assert coordinates() == [3, 5]


def test_negative_control_without_forgetting_the_second_world_has_the_first_ones_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fake, "forget_meshes", lambda: None)
        assert coordinates() == [3, 3]
    torch_private.forget_meshes()


def test_private_names() -> None:
    torch_private.join_fake_group(1000, 7)
    try:
        assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("fake", 7, 1000)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1], "it communicates nothing"
    finally:
        dist.destroy_process_group()


def test_the_pool_is_not_disturbed(world: World) -> None:
    with fake_world(8, 3):
        assert world(2, rank_of, "dp2") == [0, 1]


def rank_of(text: str) -> int:
    with sw.open_mesh(sw.Plan.parse(text), device="cpu") as mesh:
        mesh.barrier()
        return mesh.rank
