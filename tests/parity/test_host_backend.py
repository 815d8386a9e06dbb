"""`backend="host"`: the messages of ranks that share a device. On CPUs its tensors are on the host already."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import LaunchError
from tests.parity import grid

TOLERANCE = 1e-11
PLANS = [
    "dp2",
    "fsdp2 / zero2 / mb2",
    "fsdp2 tp2 / seq",
    "fsdp2 cp2",
    "pp2 / zero-bubble-v mb4",
    "pp2 fsdp2 / 1f1b mb4",
]


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", PLANS)
def test_the_step_of_one_process(world, plan: str) -> None:
    ranks, text = sw.Plan.parse(plan).world, f"{plan} / fp64"
    truth = world(1, grid.reference, "decoder", "fp64", 8)[0]
    traces = world(ranks, grid.run_plan, text, "decoder", 8, timeout_s=100, SHARDWISE_BACKEND="host")
    assert max(grid.differences(traces, truth).values()) <= TOLERANCE


# named by what they take in torch 2.13, by where they put it before
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def carried() -> dict[str, object]:
    """In a rank: what each kind of message brings."""
    with sw.open_mesh(sw.Plan.parse("dp3"), backend="host", device="cpu") as mesh:
        rank, whole, found = mesh.rank, torch.arange(6.0), {"backend": dist.get_backend()}
        own = whole[2 * rank : 2 * rank + 2] * 10
        gather(gathered := torch.empty(6), own)
        scatter(part := torch.empty(2), whole * (rank + 1))
        dist.all_to_all_single(mixed := torch.empty(3), torch.full((3,), float(rank)))
        dist.broadcast(sent := torch.full((1,), float(rank)), 2)
        dist.reduce(summed := torch.ones(1), 1)
        parts = [torch.empty(2) for _ in range(3)] if rank == 0 else None
        dist.gather(own, parts)
        dist.scatter(share := torch.empty(1), list(torch.arange(3.0).split(1)) if rank == 0 else None)
        works = [
            dist.irecv(came := torch.empty(4), (rank - 1) % 3),
            dist.isend(torch.full((4,), float(rank)), (rank + 1) % 3),
        ]
        for work in works:
            work.wait()
        dist.all_gather_object(objects := [None] * 3, {"rank": rank})
        dist.barrier()
        found |= {"gather": parts and torch.cat(parts).tolist(), "objects": objects, "summed": summed.item()}
        tensors = {"all_gather": gathered, "scatter": share, "reduce_scatter": part, "all_to_all": mixed, "came": came}
        return found | {name: tensor.tolist() for name, tensor in tensors.items()} | {"broadcast": sent.item()}


def test_every_kind_of_message_arrives(world) -> None:
    for rank, found in enumerate(world(3, carried)):
        assert found["backend"] == "host"
        assert found["all_gather"] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        assert found["reduce_scatter"] == [6.0 * 2 * rank, 6.0 * (2 * rank + 1)]
        assert found["all_to_all"] == [0.0, 1.0, 2.0]
        assert found["came"] == [float((rank - 1) % 3)] * 4
        assert (found["broadcast"], found["scatter"]) == (2.0, [float(rank)])
        assert found["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        if rank == 0:
            assert found["gather"] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        if rank == 1:
            assert found["summed"] == 3.0


def test_an_unknown_back_end_is_refused_with_the_nearest() -> None:
    with pytest.raises(LaunchError, match="no back-end 'hots'.*host"), sw.open_mesh(sw.Plan(), backend="hots"):
        pass
