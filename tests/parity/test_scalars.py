"""Parameters without dims: whole on every rank, cast as all others, and trained as in one process."""

from __future__ import annotations

import functools
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import shardwise as sw
from shardwise.model.recipes import recipe_for
from shardwise.parallel import compose
from shardwise.train.guards import agreement
from tests.parity import grid


class Gated(nn.Module):
    """A block with a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(16, 16), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate.expand(x.shape[-1])  # with dims: of another type than the stream it would change that
        return x + torch.tanh(self.fc(x)) * gate


class Scaled(nn.Module):
    """Gates, and a scale before and behind the blocks: two stages of a pipeline have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(grid.VOCAB, 16), nn.Linear(16, grid.VOCAB, bias=False)
        self.layers = nn.ModuleList(Gated() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.scale.exp() * self.head(x)


class Decoder(sw.Decoder):
    """The reference decoder with a scale of its logits."""

    def __init__(self) -> None:
        super().__init__(grid.MODELS["decoder"].args[0])
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, positions) * self.scale


grid.MODELS |= {"scaled": Scaled, "scaled-decoder": Decoder}
grid.SAMPLES["scaled"] = {"input_ids": torch.zeros(2, grid.SEQ, dtype=torch.int64)}


def run_plan(*arguments: object) -> grid.Trace:  # of this file: a worker that imports it knows its models
    rules = recipe_for(name for name, _ in Decoder().named_modules()) | {"": "replicate"}
    with patch.object(sw, "apply", functools.partial(sw.apply, rules=rules if "tp" in str(arguments[0]) else None)):
        return grid.run_plan(*arguments)


def reference(*arguments: object) -> grid.Trace:
    return grid.reference(*arguments)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("scaled", "dp2"),
        ("scaled", "fsdp2 / mb2"),
        ("scaled", "fsdp4 / zero1 / mb2"),
        ("scaled", "dp2 fsdp2 / zero2 / mb2"),
        ("scaled", "fsdp2 / recompute=blocks"),
        ("scaled", "pp2 / 1f1b mb4"),
        ("scaled", "pp2 dp2 / 1f1b mb2"),
        ("scaled", "pp2 fsdp2 / zero2 / zero-bubble-v mb4"),
        ("scaled-decoder", "cp2"),
        ("scaled-decoder", "fsdp2 cp2 / zero1"),
        ("scaled-decoder", "dp2 tp2"),
        ("scaled-decoder", "fsdp2 tp2 / seq / mb2"),
    ],
)
def test_trained_as_in_one_process(world, model: str, plan: str) -> None:
    ranks = world(sw.Plan.parse(plan).world, run_plan, f"{plan} / fp64", model, 16)
    worst = grid.differences(ranks, grid.alone(world, reference, model, "fp64", 16))
    assert max(worst.values()) <= 1e-11, worst


def run_unsummed(*arguments: object) -> grid.Trace:
    unseen = patch.object(agreement._FirstUpdate, "__call__", lambda *_: None)  # it would name the parameter
    with patch.object(compose, "bind_scalars", lambda placed: placed), unseen:
        return run_plan(*arguments)


@pytest.mark.parametrize("plan", ["fsdp2 / fp64", "pp2 dp2 / 1f1b mb2 / bf16"])
def test_negative_control_ranks_that_keep_their_own_gradients_are_seen(world, plan: str) -> None:
    ranks = world(sw.Plan.parse(plan).world, run_unsummed, plan, "scaled", 16)
    with pytest.raises(AssertionError, match="ranks disagree"):  # they step to numbers of their own
        grid.differences(ranks, grid.alone(world, reference, "scaled", "fp64", 16))


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2 / bf16", "fsdp2 / bf16 / recompute=blocks", "pp2 dp2 / 1f1b mb2 / bf16"])
def test_cast_as_all_others(world, plan: str) -> None:
    """As far from one process in fp32 as one process in bf16 is."""
    plain = grid.alone(world, reference, "scaled", "fp32", 16)
    alone = grid.differences(world(1, run_plan, "dp1 / bf16", "scaled", 16), plain)
    ranks = grid.differences(world(sw.Plan.parse(plan).world, run_plan, plan, "scaled", 16), plain)
    assert all(ranks[key] <= 2 * alone[key] + 1e-3 for key in alone), (ranks, alone)


def compiled() -> tuple[int, str]:
    """In a rank: graphs that the blocks of a step become, and the type of the gate's gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo and inductor trip over warnings of torch's own
        plan = sw.Plan.parse("dp1 / bf16 / compile")
        with sw.open_mesh(plan, device="cpu") as mesh:
            placed = sw.apply(Scaled, plan, mesh, seed=0)
            step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-3)), grid.loss_fn)
            before = placed.named_parameters()["layers.0.gate"].item()
            ids = torch.arange(16).view(1, 16)
            for _ in range(2):
                step({"input_ids": ids, "labels": ids, "another": ids})  # of which forward takes one
            gate = placed.named_parameters()["layers.0.gate"]
            assert type(gate) is nn.Parameter and gate.item() != before
    return int(counters["stats"]["unique_graphs"]), str(gate.dtype)


@pytest.mark.soak  # in every run: tests/parity/test_compile_shared.py
def test_compiled_blocks_are_one_compilation(world) -> None:
    assert world(1, compiled, timeout_s=100) == [(1, "torch.float32")]


class Unused(Scaled):
    """With a number that forward leaves alone, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.tensor(0.3))
        self.layers[1].gate.requires_grad_(False)


def stepped(plan: str, folder: str, steps: int) -> dict[str, torch.Tensor]:
    parsed = sw.Plan.parse(f"{plan} / fp64")
    with sw.open_mesh(parsed) as mesh:
        placed = sw.apply(Unused, parsed, mesh, seed=grid.SEED)
        data = sw.loader(grid.Rows(), grid.batch(parsed, 16), mesh, seed=1)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-2, weight_decay=0.1), data)
        store = sw.Store(folder)
        store.load_latest(state)
        for _ in sw.steps(state, grid.loss_fn, until=steps):
            pass
        if placed.mesh.num_gradient_ranks > 1:
            assert placed.placements["scale"].text == "whole on every data rank"
        store.save(state)
        return {name: grid.whole(p) for name, p in placed.named_parameters().items()}


def test_saved_by_one_plan_and_read_by_another(world, tmp_path) -> None:
    there = world(1, stepped, "dp1", str(tmp_path / "one"), 3)[0]
    world(2, stepped, "fsdp2", str(tmp_path / "two"), 1)
    world(4, stepped, "dp2 fsdp2 / mb2", str(tmp_path / "two"), 2)
    here = world(2, stepped, "fsdp2 / zero1", str(tmp_path / "two"), 3)
    for name, tensor in there.items():
        assert all(torch.allclose(rank[name], tensor, rtol=1e-11, atol=0) for rank in here), name
    assert there["unused"] == torch.tensor(0.3).double() and there["layers.1.gate"] == 0.5  # no gradient: no decay
