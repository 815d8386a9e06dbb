"""The same bits under every plan: what the ranks hold together is what one process makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.init import blueprint_for, init_model, local_slice, materialize
from shardwise.parallel.initial.blueprint import record
from shardwise.parallel.mesh import Mesh, open_mesh
from shardwise.parallel.placed import Part, Placed
from shardwise.plan.plan import Axes, Offload, Plan
from shardwise.testing.world import World

SEED = 11


def build() -> nn.Module:
    model = Decoder(DecoderConfig(vocab_size=30, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=36))
    model.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
    model.odd = nn.Linear(24, 5)  # five rows: uneven over two, three or four ranks
    nn.init.trunc_normal_(model.odd.weight, std=0.02)
    return model


def tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    styles = {f"attn.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")} | {"attn.wo": RowwiseParallel()}
    styles |= {"ffn.w1": ColwiseParallel(), "ffn.w3": ColwiseParallel(), "ffn.w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh.device_mesh["tp"], styles)


def place(axes: Axes, offload: bool, mesh: Mesh) -> Placed:
    blueprint = record(build)
    model = blueprint.module
    if axes.tp > 1:
        tensor_parallel(model, mesh)
    if axes.data > 1:
        data = mesh.device_mesh["dp_replicate", "dp_shard"] if axes.dp_replicate > 1 else mesh.device_mesh["dp_shard"]
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        for layer in model.layers:
            fully_shard(layer, mesh=data, **policy)
        fully_shard(model, mesh=data, **policy)
    plan = Plan(axes=axes, zero=3 if axes.data > 1 else 0, offload=Offload(state=offload))
    return Placed(parts=(Part(root=model, run=model),), plan=plan, mesh=mesh, blueprint=blueprint)


def differing(axes: Axes, offload: bool = False) -> list[str]:
    """Names whose gathered value is not bit for bit that of one process; then one step must run."""
    with open_mesh(Plan(axes=axes, zero=3 if axes.data > 1 else 0), device="cpu") as mesh:
        placed = materialize(place(axes, offload, mesh), None, SEED, mesh.device)
        model = placed.parts[0].root
        full = init_model(build, SEED)
        expected = dict(full.named_parameters()) | dict(full.named_buffers())
        found = dict(model.named_parameters()) | dict(model.named_buffers())
        assert found.keys() == expected.keys()
        wrong = []
        for name, tensor in found.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(whole, expected[name]):
                wrong.append(name)
        tokens = torch.arange(8).view(1, 8)
        output, reference = model(tokens), full(tokens)
        assert torch.allclose(output, reference, atol=1e-5), "the step does not use the values that were filled in"
        output.sum().backward()
        return wrong


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("axes", "offload"),
    [
        (Axes(), False),
        (Axes(dp_shard=2), False),
        (Axes(dp_shard=2), True),
        (Axes(dp_shard=4), False),
        (Axes(dp_replicate=2, dp_shard=2), False),
        (Axes(tp=2), False),
        (Axes(dp_shard=2, tp=2), False),
    ],
    ids=["one", "fsdp2", "fsdp2-offload", "fsdp4", "hsdp", "tp2", "fsdp2-tp2"],
)
def test_same_bits_as_one_process(world: World, axes: Axes, offload: bool) -> None:
    assert world(axes.world, differing, axes, offload) == [[]] * axes.world


def slices_of_a_three_rank_mesh() -> list[bool]:
    with open_mesh(Plan(axes=Axes(dp_shard=3), zero=3), device="cpu") as mesh:
        data = mesh.device_mesh["dp_shard"]
        agree = []
        for shape in ((7, 2), (2, 5), (3, 3), (1, 1)):
            full = torch.arange(float(torch.Size(shape).numel())).view(shape)
            for placement in (Replicate(), Shard(0), Shard(1)):
                placed = distribute_tensor(full, data, [placement])
                agree.append(torch.equal(local_slice(full, placed), placed.to_local()))
        return agree


def test_slices_are_those_that_torch_cuts(world: World) -> None:
    assert all(all(agree) for agree in world(3, slices_of_a_three_rank_mesh))


def wrong_order_is_seen() -> bool:
    """The negative control of the strided shard: rows taken left to right are other rows."""
    with open_mesh(Plan(axes=Axes(dp_shard=2, tp=2), zero=3), device="cpu") as mesh:
        placed = place(Axes(dp_shard=2, tp=2), False, mesh)
        weight = placed.parts[0].root.layers[0].attn.wq.weight
        full = torch.arange(24.0 * 24).view(24, 24)
        ours = local_slice(full, weight)
        naive = full.chunk(2)[mesh.index("dp_shard")].chunk(2)[mesh.index("tp")]
        return torch.equal(ours, naive)


def test_strided_shards_are_not_plain_ones(world: World) -> None:
    assert world(4, wrong_order_is_seen) == [True, False, False, True]


def pruned_stage(stage: int) -> dict[str, torch.Tensor]:
    with open_mesh(Plan(), device="cpu") as mesh:
        blueprint = record(build)
        model = blueprint.module
        for name in ("embed",) if stage else ("norm", "head", "odd"):
            delattr(model, name)
        del model.layers._modules[str(1 - stage)]
        placed = Placed(parts=(Part(root=model, run=model),), plan=Plan(), mesh=mesh, blueprint=blueprint)
        materialize(placed, None, SEED, mesh.device)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_pruned_stage_has_the_bits_of_the_whole(world: World) -> None:
    (first,), (second,) = world(1, pruned_stage, 0), world(1, pruned_stage, 1)
    expected = dict(init_model(build, SEED).named_parameters())
    assert first.keys() | second.keys() == expected.keys() and not first.keys() & second.keys()
    assert all(torch.equal(value, expected[name]) for name, value in (first | second).items())


class Allocations(TorchDispatchMode):
    """Most bytes of real tensors that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and not isinstance(out, DTensor):
            storage = out.untyped_storage()
            if all(ref() is not storage for ref, _ in self.seen):
                self.seen.append((weakref.ref(storage), storage.nbytes()))
        self.seen = [(ref, size) for ref, size in self.seen if ref() is not None]
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.seen))
        return out


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


def peak_while_materializing() -> int:
    with open_mesh(Plan(axes=Axes(dp_shard=4), zero=3), device="cpu") as mesh:
        blueprint = record(deep)
        fully_shard(blueprint.module, mesh=mesh.device_mesh["dp_shard"])
        placed = Placed(
            parts=(Part(root=blueprint.module, run=blueprint.module),),
            plan=Plan(axes=Axes(dp_shard=4), zero=3),
            mesh=mesh,
            blueprint=blueprint,
        )
        meter = Allocations()
        with meter:
            materialize(placed, None, SEED, mesh.device)
        return meter.peak_bytes


def test_no_rank_holds_more_than_its_shard_and_one_parameter(world: World) -> None:
    one = 256 * 256 * 4
    shards = 16 * one // 4
    for peak in world(4, peak_while_materializing):
        assert shards + one <= peak <= shards + one + 4096  # the lower bound shows that the meter sees both


def build_differently() -> str:
    with open_mesh(Plan(axes=Axes(dp_replicate=2)), device="cpu") as mesh:
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if mesh.rank == 1:
            nn.init.zeros_(module[1].bias)
        with pytest.raises(ModelError) as caught:
            blueprint_for(module, None, mesh)
        return str(caught.value)


def test_instances_that_differ_between_ranks_are_refused_by_name(world: World) -> None:
    for message in world(2, build_differently):
        assert "1.bias of Sequential differs between ranks: rank 1 differs from rank 0 (1 tensors differ)" in message


def build_equally() -> bool:
    with open_mesh(Plan(axes=Axes(dp_replicate=2)), device="cpu") as mesh:
        torch.manual_seed(5)
        module = nn.Linear(2, 2)
        blueprint_for(module, None, mesh)
        blueprint_for(build, None, mesh)
        return True


def test_equal_instances_and_factories_pass(world: World) -> None:
    assert world(2, build_equally) == [True, True]


def factory_with_a_rank_in_it() -> str:
    with open_mesh(Plan(axes=Axes(dp_replicate=2)), device="cpu") as mesh:

        def build_with_rank() -> nn.Module:
            model = nn.Linear(2, 2)
            model.register_buffer("offset", torch.tensor([float(mesh.rank)]))
            return model

        with pytest.raises(ModelError) as caught:
            blueprint_for(build_with_rank, None, mesh)
        return str(caught.value)


def test_constants_of_a_factory_that_differ_are_refused(world: World) -> None:
    assert all("offset of build_with_rank differs between ranks" in m for m in world(2, factory_with_a_rank_in_it))


DRAWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "randn": lambda g: torch.randn(4, 4, generator=g),
    "rand": lambda g: torch.rand((4, 4), generator=g),
    "randint": lambda g: torch.randint(0, 9, (4, 4), generator=g).float(),
    "randperm": lambda g: torch.randperm(16, generator=g).view(4, 4).float(),
    "normal": lambda g: torch.normal(0.0, 1.0, (4, 4), generator=g),
    "in place": lambda g: torch.empty(4, 4).normal_(generator=g),
}


class Drawn(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(DRAWS[name](torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_of_its_own_is_not_used(name: str) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        weights = [
            sw.apply(lambda: Drawn(name), sw.Plan(), mesh, seed=seed).module.get_parameter("weight").detach().clone()
            for seed in (1, 1, 2)
        ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
