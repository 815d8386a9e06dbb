"""Which elements a shard holds: read off placements, and as torch itself divides."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.checkpoint.format import Box, whole
from shardwise.checkpoint.layout import held_by, owners
from shardwise.checkpoint.shardfile import Part
from shardwise.checkpoint.torch_private import indices_here, local_of
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Axes, Plan
from shardwise.testing.world import World

SHAPES = ((7, 6), (5, 3), (1, 2), (8, 8), (3, 2, 4), (9,), (2,), (4, 1))


def placements_agree() -> int:
    checked = 0
    with open_mesh(Plan(axes=Axes(dp_shard=2, tp=2), zero=3)) as mesh:
        grid = mesh.device_mesh[("dp_shard", "tp")]
        kinds = [Replicate(), Shard(0), Shard(1)]
        for shape, pair in itertools.product(SHAPES, itertools.product(kinds, kinds)):
            if len(shape) < 2 and Shard(1) in pair:
                continue
            full = torch.arange(torch.Size(shape).numel()).reshape(shape)
            tensor = distribute_tensor(full, grid, list(pair), src_data_rank=None)
            expected = full[torch.meshgrid(*[torch.tensor(list(i), dtype=torch.int64) for i in indices_here(tensor)],
                                           indexing="ij")]  # fmt: skip
            assert torch.equal(local_of(tensor), expected), (shape, pair)
            for held in held_by({"x": tensor}):
                assert torch.equal(held.of(tensor), full[held.part.box.slices(whole(shape))])
            checked += 1
    return checked


def test_indices_are_those_of_distribute_tensor(world: World) -> None:
    assert all(count > 50 for count in world(4, placements_agree))


def fsdp_over_tp(rows: int) -> list[str]:
    """FSDP2 shards what tp has sharded on the same dim: rows that do not divide lie in several runs."""
    with open_mesh(Plan(axes=Axes(dp_shard=2, tp=2), zero=3)) as mesh:
        full = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)
        module = torch.nn.Linear(3, rows, bias=False)
        shard = distribute_tensor(full, mesh.device_mesh["tp"], [Shard(0)], src_data_rank=None)
        module.weight = torch.nn.Parameter(shard)
        fully_shard(module, mesh=mesh.device_mesh["dp_shard"])
        weight = module.weight
        assert isinstance(weight, DTensor) and any(isinstance(p, _StridedShard) for p in weight.placements)
        mine: list[str] = []
        for held in held_by({"w": weight}):
            assert torch.equal(held.of(weight), full[held.part.box.slices(whole((rows, 3)))])
            mine.append(str(held.part.box))
        return mine


@pytest.mark.parametrize("rows", [2, 4, 5, 6, 7, 8, 9])
def test_fsdp_over_tp_holds_each_row_once(world: World, rows: int) -> None:
    boxes = [box for mine in world(4, fsdp_over_tp, rows) for box in mine]
    held = sorted(int(r) for box in boxes for r in range(*map(int, box[1:].split(",")[0].split(":"))))
    assert held == list(range(rows))


def refused() -> str:
    with open_mesh(Plan(axes=Axes(tp=2))) as mesh:
        partial = DTensor.from_local(torch.ones(2), mesh.device_mesh["tp"], [Partial()])
        with pytest.raises(CheckpointError) as caught:
            held_by({"x": partial})
        return str(caught.value)


def test_partial_sums_and_odd_types_are_refused(world: World) -> None:
    assert all("partial sum" in said for said in world(2, refused))
    with pytest.raises(CheckpointError, match="complex128"):
        held_by({"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="found the name"):
        held_by({"a/b": torch.ones(2)})
    with pytest.raises(CheckpointError, match="x: found 17 dims, needed at most 16"):
        held_by({"x": torch.ones([1] * 17)})


def part(name: str, start: int, size: int, dtype: str = "float32") -> Part:
    return Part(name, dtype, (8,), Box((start,), (size,)))


def test_owners_store_each_part_once_and_spread_them() -> None:
    ranks = [[part("a", 0, 8), part("b", 0, 8), part("c", 0, 4)], [part("a", 0, 8), part("b", 0, 8), part("c", 4, 4)]]
    chosen = owners(ranks)
    stored = sorted((ranks[rank][i].name, ranks[rank][i].box) for rank, mine in enumerate(chosen) for i in mine)
    assert stored == [("a", Box((0,), (8,))), ("b", Box((0,), (8,))), ("c", Box((0,), (4,))), ("c", Box((4,), (4,)))]
    assert [sum(ranks[rank][i].num_bytes for i in mine) for rank, mine in enumerate(chosen)] == [48, 48]
    with pytest.raises(CheckpointError, match="float32 on rank 0"):
        owners([[part("a", 0, 8)], [part("a", 0, 8, "float64")]])


def boxes_by_axis() -> list[tuple[int, ...]]:
    """Where rows lie of two tensors of one shape, whole and local, that are cut over different axes."""
    cuts = ([Shard(0), Replicate()], [Replicate(), Shard(0)])
    with open_mesh(Plan(axes=Axes(dp_shard=2, tp=2), zero=3)):
        mesh = init_device_mesh("cpu", (2, 2))
        held = held_by({f"model.{i}": distribute_tensor(torch.zeros(4, 2), mesh, cut) for i, cut in enumerate(cuts)})
        return [item.part.box.offsets for item in held]


def test_tensors_of_one_shape_that_are_cut_over_other_axes_have_their_own_boxes(world: World) -> None:
    assert world(4, boxes_by_axis)[1] == [(0, 0), (2, 0)]


def test_numbers_that_do_not_lie_as_such_are_refused_by_name() -> None:
    for tensor, said in (
        (torch.eye(3).to_sparse(), "the layout torch.sparse_coo"),
        (torch.ones(3, dtype=torch.complex64).conj(), "a conjugate's view"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"model.w: found {said}, needed dense numbers; keep it as .to_dense"
        ):
            held_by({"model.w": tensor})
    with pytest.raises(
        CheckpointError, match=r"model.w: found a tensor without values \(device meta\), needed its values"
    ):
        held_by({"model.w": torch.ones(3, device="meta")})
