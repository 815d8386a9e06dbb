"""Muon's matrices are shared out: one rank works on each, the update is that of one process, and so is the training."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.plan.updating import newton_schulz_flops
from shardwise.testing import World
from shardwise.train.updates.sharing import bring_together, give_back, lie_of, sharing_of
from shardwise.train.updates.update_rules import local_shard
from tests.parity import grid, moe_models

SHAPES = [(7, 5), (3, 9), (8, 8), (2, 6), (5, 7), (1, 4), (9, 3)]
"""Over 4 ranks in two batches, the second one not full; of some a rank holds nothing."""
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns and rows": ((2, 2), (Shard(1), Shard(0))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
    "columns of columns": ((2, 2), (Shard(1), Shard(1))),
}


def there_and_back(layout: str) -> list[tuple[int, list[int], float]]:
    """Of each batch: matrices that this rank had in full, whether they were right, what is wrong with its parts."""
    sizes, placements = LAYOUTS[layout]
    found = []
    with sw.open_mesh(sw.Plan.parse("fsdp4")):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", sizes)
        whole = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
        laid = [distribute_tensor(matrix, mesh, placements, src_data_rank=None) for matrix in whole]
        sharing = sharing_of(laid[0])
        for start in range(0, len(SHAPES), sharing.team):
            batch = laid[start : start + sharing.team]
            lies = [lie_of(matrix) for matrix in batch]
            mine = bring_together(sharing, [local_shard(matrix).clone() for matrix in batch], lies)
            which = [i for i, matrix in enumerate(whole) for own in mine if torch.equal(own, matrix)]
            count = len(mine)
            parts = give_back(sharing, [2 * matrix for matrix in mine], lies, whole[0])
            wrong = sum(not torch.equal(part, 2 * local_shard(m)) for part, m in zip(parts, batch, strict=True))
            found.append((count, which, wrong))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_is_whole_on_one_rank_and_goes_back(world: World, layout: str) -> None:
    ranks = world(4, there_and_back, layout)
    for batch, size in enumerate((4, 3)):
        counts, whichs, wrongs = zip(*(found[batch] for found in ranks), strict=True)
        assert sorted(counts, reverse=True) == [1] * size + [0] * (4 - size)
        assert sorted(i for which in whichs for i in which) == list(range(4 * batch, 4 * batch + size))
        assert not any(wrongs)


def updated(text: str) -> int:
    """Operations that this rank makes in an update."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        optimizer = sw.muon(sw.apply(grid.MODELS["decoder-flat"], plan, mesh, seed=1), lr=1e-3)
        optimizer.take_grads({name: torch.ones_like(p) for name, p in optimizer.live.items()})
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        return counter.get_total_flops()


CUT = ["dp2", "fsdp4", "dp2 fsdp2", "fsdp4 / zero1", "fsdp2 cp2", "dp2 cp2", "tp2", "fsdp2 tp2", "fsdp2 / bf16-pure"]


@pytest.mark.share(4)
@pytest.mark.parametrize("text", CUT)
def test_ranks_divide_the_operations(world: World, text: str) -> None:
    size = sw.Plan.parse(text).world
    blocks = grid.MODELS["decoder-flat"]().get_submodule("layers").parameters()
    flops = sorted((newton_schulz_flops(*p.shape) for p in blocks if p.dim() == 2), reverse=True)
    found = world(size, updated, text)
    assert sum(found) == sum(flops), "each matrix once"
    assert max(found) == sum(flops[::size]), "in batches of near equals"


def largest_message(text: str) -> int:
    """Elements of the largest tensor that an update sends from here or gets."""
    largest = [0]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "broadcast"):
            send = getattr(torch.distributed, name)

            def seen(*args: Any, send: Any = send, **kwargs: Any) -> Any:
                if sys._getframe(1).f_globals["__name__"] == "shardwise.train.updates.sharing":
                    largest[0] = max(largest[0], *(t.numel() for t in args if isinstance(t, torch.Tensor)))
                return send(*args, **kwargs)

            patch.setattr(torch.distributed, name, seen)
        updated(text)
    return largest[0]


@pytest.mark.parametrize("text", ["dp4", "fsdp4", "dp2 fsdp2"])
def test_no_rank_is_sent_more_than_one_matrix_at_a_time(world: World, text: str) -> None:
    assert max(world(4, largest_message, text)) == 32 * 64


# ---------------------------------------------------------------- training


def trained(text: str, model: str) -> grid.Trace:
    """Two steps with Muon, on this rank."""
    plan, trace = sw.Plan.parse(text), grid.Trace()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply({**grid.MODELS, **moe_models.MODELS}[model], plan, mesh, seed=grid.SEED)
        optimizer = sw.muon(placed, lr=grid.LR)
        batches = sw.loader(grid.Rows(), grid.batch(plan, 16), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, optimizer, batches)
        grid.spy_on_gradients(state, trace)
        loss = moe_models.LOSSES if model in moe_models.MODELS else grid.loss_fn
        for metrics in sw.steps(state, loss, until=grid.STEPS, clip=grid.CLIP):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.params = {name: grid.whole(p) for name, p in placed.named_parameters().items()}
    return trace


FAST = [
    ("dp2", "decoder-flat"),
    ("fsdp4 / zero1 / mb2", "decoder-flat"),
    ("fsdp2 tp2", "decoder-flat"),
    ("dp2 fsdp2 ep2", "softmax"),
    ("pp2 fsdp2 / 1f1b mb2", "decoder-flat"),
]
MORE = [
    ("fsdp4 / zero2 / mb2", "decoder-flat"),
    ("fsdp8", "gpt"),
    ("dp2 fsdp2 / zero1", "gpt"),
    ("dp2 fsdp2 tp2 / seq", "decoder-flat"),
    ("tp4", "decoder-tp4"),
    ("dp2 tp2", "gpt"),
    ("dp2 cp2", "decoder-flat"),
    ("fsdp2 cp2 tp2", "decoder-flat"),
    ("fsdp2 tp2 ep4 / mb2 / seq", "bias"),
    ("fsdp8", "softmax"),
    ("tp2", "softmax"),
    ("pp2 dp2 tp2 / 1f1b mb2", "decoder-flat"),
    ("pp2 fsdp2 / interleaved mb4", "decoder"),
]


def check(world: World, text: str, model: str, precision: str) -> None:
    plan = f"{text} / {precision}"
    truth = grid.alone(world, trained, f"dp1 / {precision}", model)
    worst = grid.differences(world(sw.Plan.parse(plan).world, trained, plan, model, timeout_s=120), truth)
    assert max(worst.values()) <= {"fp64": 1e-11, "fp32": 1e-6}[precision], worst


@pytest.mark.share(4)
@pytest.mark.parametrize(("plan", "model"), [*FAST, *(pytest.param(*cell, marks=pytest.mark.soak) for cell in MORE)])
def test_muon_trains_as_in_one_process(world: World, plan: str, model: str) -> None:
    check(world, plan, model, "fp64")


def mixed_up(text: str) -> grid.Trace:
    """Queries and outputs, which have one shape, get each other's update."""

    def swapped(*args: Any) -> list[torch.Tensor]:
        parts = give_back(*args)
        same = [i for i, part in enumerate(parts) if part.shape == parts[0].shape]
        parts[same[0]], parts[same[-1]] = parts[same[-1]], parts[same[0]]
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.train.updates.update_rules.give_back", swapped)
        return trained(text, "decoder-flat")


def test_the_comparison_sees_updates_that_go_to_the_wrong_matrix(world: World) -> None:
    truth = grid.alone(world, trained, "dp1 / fp64", "decoder-flat")
    assert grid.differences(world(2, mixed_up, "fsdp2 / fp64"), truth)["param"] > 1e-3
