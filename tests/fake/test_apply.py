"""`apply` under every plan of the parity grid and at up to 16,384 ranks: what lies where, and that nothing is missing.

One process plays one rank per pipeline stage, and for some plans every rank. Rewrite the golden tables with
`SHARDWISE_GOLDEN=write pytest tests/fake/test_apply.py -k golden`, and read the difference.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import strided_shard_factor
from shardwise.testing import fake_world
from tests.parity.grid import decoder
from tests.parity.test_grid import PLANS

GOLDEN = Path(__file__).parent / "golden"
LARGE = [
    "pp4 dp4 tp8 / 1f1b mb4",
    "hsdp16x8",
    "pp2 dp8 fsdp4 tp8 / zero-bubble-v mb4 / zero2 / seq",
    "dp512",
    "fsdp512 / zero1",
    "pp16 dp128 fsdp8 / 1f1b mb16",
    "pp8 dp32 fsdp8 tp8 / interleaved mb8 / seq / loss-parallel",
    "dp2048 tp8",
]
EVERY_RANK = [
    "dp8",
    "fsdp8",
    "fsdp8 / zero1",
    "hsdp2x4",
    "tp4 / seq",
    "fsdp4 tp2 / seq / loss-parallel",
    "pp2 fsdp2 tp2 / looped-bfs mb4",
    "pp4 fsdp2 / dualpipe-v mb8 / zero2",
    "fsdp3 tp2",  # sizes that 3 does not divide
    "fsdp12",
]
TABLES = [
    "dp8",
    "hsdp2x4 / zero2 / bf16",
    "tp4 / seq / loss-parallel",
    "pp4 / 1f1b mb4",
    "pp2 fsdp2 tp2 / interleaved mb4 / seq",
    "pp16 dp64 fsdp4 tp4 / 1f1b mb16",
]


def model_for(plan: sw.Plan) -> Callable[[], nn.Module]:
    """A decoder with a block for every stage and a head for every tp rank."""
    stages = plan.axes.pp * plan.schedule.stages if plan.axes.pp > 1 else 1
    heads = max(4, plan.axes.tp)
    return decoder(max(4, stages), num_heads=heads, num_kv_heads=max(2, plan.axes.tp))


@torch.no_grad()
def number(module: nn.Module) -> None:
    """Every element is its own index in its parameter."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))


@contextmanager
def placed_on(plan: sw.Plan, rank: int, model: Callable[[], nn.Module]) -> Iterator[Placed]:
    with fake_world(plan.world, rank), sw.open_mesh(plan, device="cpu") as mesh:
        yield sw.apply(model, plan, mesh, init=number)


def stage_ranks(plan: sw.Plan) -> range:
    """The first rank of each pipeline coordinate; pp is the outermost axis."""
    return range(0, plan.world, plan.world // plan.axes.pp)


def ends(ranks: range) -> list[int]:
    """The first, the middle and the last."""
    return list(dict.fromkeys((ranks[0], ranks[len(ranks) // 2], ranks[-1])))


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def num_shards(parameter: torch.Tensor) -> int:
    """Into how many pieces a parameter is cut, by its placements."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(n for p, n in sizes if p.is_shard() or strided_shard_factor(p) is not None)


@pytest.mark.share(6)
@pytest.mark.parametrize("text", [*PLANS, *LARGE])
def test_every_parameter_is_on_one_stage_whole_or_in_equal_shards(text: str) -> None:
    plan = sw.Plan.parse(text)
    model = model_for(plan)
    expected = {name: tuple(p.shape) for name, p in model().named_parameters()}
    seen: list[str] = []
    ranks = stage_ranks(plan)
    for rank in ranks if plan.world < 1024 else ends(ranks):
        with placed_on(plan, rank, model) as placed:
            parameters = placed.named_parameters()
            assert list(placed.placements) == list(parameters)
            seen += parameters
            for name, parameter in parameters.items():
                row, held = placed.placements[name], local(parameter)
                assert row.global_shape == tuple(parameter.shape) == expected[name], name
                assert not held.is_meta and str(parameter.dtype) == row.dtype, name
                shards = num_shards(parameter)
                if all(size % shards == 0 for size in parameter.shape):
                    assert held.numel() * shards == parameter.numel(), (name, row.text)
                assert ("Shard" in row.text) == (shards > 1 or "fsdp" in text), (name, row.text)
    assert len(seen) == len(set(seen)) and set(seen) <= set(expected), "a name is on two stages, or is new"
    assert plan.world >= 1024 or set(seen) == set(expected), "a name is on no stage"


@pytest.mark.share(6)
@pytest.mark.parametrize("text", EVERY_RANK)
def test_every_element_is_held_equally_often(text: str) -> None:
    plan = sw.Plan.parse(text)
    assert coverage(plan, model_for(plan)) == set()


def coverage(plan: sw.Plan, model: Callable[[], nn.Module]) -> set[str]:
    """Parameters with an element that is held by more or fewer ranks than their cut says."""
    counts = {name: torch.zeros(p.numel(), dtype=torch.int64) for name, p in model().named_parameters()}
    cuts: dict[str, int] = {}
    for rank in range(plan.world):
        with placed_on(plan, rank, model) as placed:
            for name, parameter in placed.named_parameters().items():
                held = local(parameter).detach().flatten().long()
                counts[name] += torch.bincount(held, minlength=len(counts[name]))
                cuts[name] = num_shards(parameter)
    copies = {name: plan.world // plan.axes.pp // cut for name, cut in cuts.items()}
    return {name for name, count in counts.items() if not count.eq(copies[name]).all()}


def test_negative_control_a_shard_of_another_rank_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(plan: sw.Plan, rank: int, model: Callable[[], nn.Module]) -> object:
        return right(plan, max(rank, 1), model)  # rank 0 holds what rank 1 holds

    right = placed_on
    monkeypatch.setitem(globals(), "placed_on", shifted)
    plan = sw.Plan.parse("fsdp4 tp2")
    assert "layers.0.attn.wq.weight" in coverage(plan, model_for(plan))


@pytest.mark.parametrize("text", TABLES)
def test_golden_placements(text: str) -> None:
    plan = sw.Plan.parse(text)
    found = table(plan)
    file = GOLDEN / (re.sub(r"\W+", "-", text) + ".txt")
    if os.environ.get("SHARDWISE_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text(), f"placements changed; see the top of {Path(__file__).name}"


def table(plan: sw.Plan) -> str:
    """One line per parameter of the first, middle and last pipeline ranks."""
    lines = []
    for rank in ends(stage_ranks(plan)):
        with placed_on(plan, rank, model_for(plan)) as placed:
            lines.append(f"# {plan}: rank {rank} of {plan.world}")
            for name, row in placed.placements.items():
                shape = tuple(local(placed.named_parameters()[name]).shape)
                whole, part = ("x".join(map(str, s)) for s in (row.global_shape, shape))
                lines.append(f"{name:32} {whole:>7} -> {part:7} {row.dtype:14} {row.pass_name:13} {row.text}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


class Marked(nn.Module):
    """Its parameters have marks of its author's, as weights that are not to decay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for name, parameter in self.named_parameters():
            vars(parameter)["no_decay"] = name.endswith("bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("text", ["dp1", "dp2", "fsdp2", "dp2 fsdp2 / zero2", "dp2 / bf16", "pp2 fsdp2 / mb2", "tp2"])
def test_marks_of_parameters_are_kept(text: str) -> None:
    plan, rules = sw.Plan.parse(text), {"layers.*": "column-gather"} if "tp" in text else None
    for made in (Marked, Marked()):
        with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
            placed = sw.apply(made, plan, mesh, rules=rules)
            marks = {name: vars(parameter)["no_decay"] for name, parameter in placed.named_parameters().items()}
        assert marks and all(mark is name.endswith("bias") for name, mark in marks.items())


def test_blocks_that_are_compiled_already_are_blocks() -> None:
    def compiled() -> nn.Module:
        model = Marked()
        model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.layers)
        return model

    for text in ("fsdp2", "fsdp2 / blocks=layers.*"):
        plan = sw.Plan.parse(text)
        with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
            assert sw.apply(compiled, plan, mesh).blocks == tuple(f"layers.{i}" for i in range(4))
