"""Every way to hand `apply` and `open_mesh` the wrong thing ends in its documented error, with what to do.

The errors of rules are told apart in `tests/parity/test_tensor_refusals.py`, those of chains in `test_tracer.py`, of
launchers in `tests/failure/test_launchers.py`; here each is met through `apply`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import LaunchError, ModelError, PlanError, ShardwiseError, UsageError
from shardwise.testing import fake_world
from tests.parity.grid import decoder

DECODER = decoder(4)


def sized(**sizes: Any) -> Callable[[], nn.Module]:
    config = DECODER.args[0]  # type: ignore[attr-defined]
    return functools.partial(sw.Decoder, dataclasses.replace(config, **sizes))


class Skip(nn.Module):
    """Not a chain: what comes before the first block is used after the last one."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x + kept


class Lists(nn.Module):
    """A list of lists: nothing that is called is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))


def alone() -> nn.Module:
    return nn.Linear(4, 4)


def random_size() -> nn.Module:
    return nn.Linear(2, 1 + int(torch.rand(1).item()))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def said(text: str, model: Any = DECODER, *, mesh: str = "", world: int = 0, **options: Any) -> ShardwiseError:
    """What `open_mesh` or `apply` raises on rank 0 of a world of the plan's size."""
    plan = sw.Plan.parse(text)
    opened = sw.Plan.parse(mesh) if mesh else plan
    with (
        pytest.raises(ShardwiseError) as caught,
        fake_world(world or opened.world),
        sw.open_mesh(opened, device="cpu") as live,
    ):
        sw.apply(model, plan, live, **options)
    return caught.value


Row = tuple[str, Any, dict[str, Any], type[ShardwiseError], list[str]]

WORLD: list[Row] = [
    ("pp2 fsdp4 tp2 / mb2", DECODER, {"world": 8}, LaunchError,
     ["needs 16 processes, found 8", "start 16 ranks", "nearest plan that works: `pp2 fsdp2 tp2 / 1f1b mb2 / fp32`"]),
    ("tp4", DECODER, {"world": 6}, LaunchError, ["needs 4 processes, found 6", "nearest plan that works: `dp3 tp2"]),
    ("dp4", DECODER, {"mesh": "dp2"}, PlanError, ["[world.size]", "4 ranks and 2 run", "works: `dp2"]),
    ("fsdp8", DECODER, {"mesh": "dp8"}, PlanError,
     ["other axes", "dp_replicate is 8 and the plan has 1, dp_shard is 1 and the plan has 8", "open_mesh was given"]),
    ("pp2 / gpipe", DECODER, {"mesh": "dp2"}, PlanError, ["pp is 1 and the plan has 2"]),
    ("tp2", DECODER, {"mesh": "dp2"}, PlanError, ["tp is 1 and the plan has 2"]),
    ("pp4", DECODER, {}, PlanError, ["[pp.micro-batches]", "micro-batches=1", "use mb4", "nearest plan that works"]),
    ("cp2 dp2 zero2 / compile", DECODER, {}, PlanError, ["2 constraints do not hold", "[cp.compile]", "[zero.axis]"]),
]  # fmt: skip

TENSOR: list[Row] = [
    ("tp4", DECODER, {}, ModelError, ["tp=4 does not divide the 2 heads", "layers.0.attn.wk", "use tp in {1, 2}"]),
    ("tp2", sized(num_heads=3, num_kv_heads=3, dim=24), {}, ModelError, ["tp=2 does not divide", "heads", "{1, 3}"]),
    ("tp2", sized(vocab_size=63), {}, ModelError, ["num_embeddings=63 of embed", "pad the vocabulary"]),
    ("tp2", sized(ffn_dim=65), {}, ModelError, ["out_features=65 of layers.0.ffn.w1", "column-gather"]),
    ("tp2", DECODER, {"rules": {"layers.*.attn.wqq": "column"}}, ModelError,
     ["'layers.*.attn.wqq' matches no module", "did you mean 'layers.*.attn.wq'"]),
    ("tp2", DECODER, {"rules": {"layers.*.attn.wq": "colum"}}, ModelError, ["style 'colum'", "'column'"]),
    ("tp2", DECODER, {"rules": {"*": "replicate", "layers.*.attn.wq": "column", "layers.0.attn.wq": "column"}},
     ModelError, ["'layers.0.attn.wq' is matched by 2 rules"]),
    ("tp2", DECODER, {"rules": {"embed": "vocab"}}, ModelError, ["no rule covers", "layers.0.attn.wq", '"replicate"']),
    ("tp2", DECODER, {"rules": {}}, ModelError, ["no rule covers embed.weight"]),
    ("tp2", DECODER, {"rules": ["embed"]}, UsageError, ["rules: found ['embed'] of type list", "a mapping"]),
    ("tp2", Lists, {}, ModelError, ["no sharding recipe", "rules="]),
    ("tp2 recipe=gpt", DECODER, {}, ModelError, ["no sharding recipe", "tried gpt", "layers.*.attn.wq"]),
    ("tp2 / seq", alone, {"rules": {"": "column"}}, ModelError,
     ["no repeated blocks were found in Linear", "drop `seq`"]),
]  # fmt: skip

BLOCKS: list[Row] = [
    ("fsdp2 / blocks=layer.*", DECODER, {}, ModelError,
     ["blocks=layer.* matches no module of Decoder", "did you mean 'layers.*'"]),
    ("fsdp2 / blocks=layers", DECODER, {}, ModelError, ["a ModuleList that is never called", "write blocks=layers.*"]),
    ("recompute=blocks", alone, {}, ModelError, ["recompute_blocks", "no repeated blocks", "Linear", "blocks=PATTERN"]),
    ("recompute=ops", Lists, {}, ModelError, ["recompute_blocks", "no repeated blocks", "Lists"]),
    ("offload=activations", alone, {}, ModelError, ["offloads blocks", "blocks=PATTERN"]),
    ("compile", alone, {}, ModelError, ["compile_blocks: no repeated blocks", "drop `compile`"]),
]  # fmt: skip

PIPELINE: list[Row] = [
    ("pp2 / gpipe", alone, {}, ModelError, ["Linear has no ModuleList", "blocks=PATTERN"]),
    ("pp8 / mb8", DECODER, {}, PlanError, ["8 stages (pp 8 x 1 per rank)", "4 blocks", "fewer stages"]),
    ("pp2 / mb2 split=layers.9", DECODER, {}, PlanError, ["layers.9 is no block", "did you mean 'layers.3'"]),
    ("pp2 / mb2 split=layers.0", DECODER, {}, PlanError, ["needed 1 names", "none of them layers.0"]),
    ("pp2 / mb2", Skip, {"sample": torch.zeros(2, 4)}, ModelError, ["not a chain", "after the blocks"]),
    ("pp2 / mb2", DECODER, {"sample": {"x": torch.zeros(2, 4)}}, ModelError,
     ["forward takes input_ids", "the batch, which has x", "rename"]),
]  # fmt: skip

MODEL: list[Row] = [
    ("dp2", lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), {}, ModelError,
     ["0 is wrapped in DataParallel, which would sum gradients beside apply:", "the module inside (model.module"]),
    ("dp2", lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), {}, ModelError,
     ["wraps the model in data parallelism of torch's (DDP, FSDP)", "return the module inside"]),
    ("dp2", 3, {}, UsageError, ["found 3 of type int", "a module or a factory"]),
    ("dp2", sw.Decoder, {}, UsageError, ["Decoder needs arguments (config)", "functools.partial(Decoder, ...)"]),
    ("dp2", lambda: 3, {}, ModelError, ["returned int", "torch.nn.Module"]),
    ("dp2", random_size, {}, ModelError,
     ["reads a random value: `item` at test_misuse.py", "instance instead of a factory"]),
    ("dp2", on_meta(), {}, ModelError, ["weight of the given Linear is on the meta device", "pass the factory"]),
    ("dp2", alone(), {"init": "reset_parameters"}, ModelError, ["values exist already", "leave init= out"]),
    ("dp2", DECODER, {"init": "reset"}, UsageError, ["init: found 'reset'", "'reset_parameters'"]),
    ("dp2", DECODER, {"seed": "7"}, UsageError, ["seed: found '7' of type str", "an integer"]),
]  # fmt: skip


@pytest.mark.parametrize("row", [*WORLD, *TENSOR, *BLOCKS, *PIPELINE, *MODEL], ids=lambda row: row[0])
def test_refused(row: Row) -> None:
    text, model, options, kind, words = row
    error = said(text, model, **options)
    assert type(error) is kind, error
    assert [word for word in words if word not in str(error)] == [], str(error)


def test_a_shorthand_in_place_of_a_plan_or_nothing_in_place_of_a_mesh() -> None:
    with fake_world(2), sw.open_mesh(sw.Plan.parse("dp2"), device="cpu") as mesh:
        with pytest.raises(UsageError, match=r"plan: found 'dp2' of type str; give Plan.parse"):
            sw.apply(DECODER, "dp2", mesh)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="mesh: found None"):
            sw.apply(DECODER, sw.Plan.parse("dp2"), None)  # type: ignore[arg-type]


def test_the_module_of_a_rank_with_two_stages() -> None:
    plan = sw.Plan.parse("pp2 / interleaved mb2")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
        placed = sw.apply(DECODER, plan, mesh)
        with pytest.raises(ModelError, match=r"rank 0 holds 2 pipeline stages \(interleaved\).*placed\.parts"):
            _ = placed.module


def test_an_unknown_axis() -> None:
    said = r"mesh.group\('data'\): unknown axis; the axes are pp, dp_replicate"
    with (
        fake_world(2),
        sw.open_mesh(sw.Plan.parse("dp2"), device="cpu") as mesh,
        pytest.raises(LaunchError, match=said),
    ):
        mesh.group("data")


@pytest.mark.parametrize("text", ["dp2", "fsdp2", "tp2", "pp2 / gpipe", "recompute=blocks", "fsdp2 / blocks=layers.*"])
def test_negative_control_the_model_itself_is_accepted(text: str) -> None:
    plan = sw.Plan.parse(text)
    with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
        assert sw.apply(DECODER, plan, mesh, seed=7).placements


def test_lists_of_lists_are_accepted_where_no_blocks_are_needed() -> None:
    plan = sw.Plan.parse("fsdp2")
    with fake_world(2), sw.open_mesh(plan, device="cpu") as mesh:
        assert sw.apply(Lists, plan, mesh).blocks == ()


Call = Callable[[sw.Mesh, sw.Placed, sw.TrainState], Any]


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (output - batch).square().mean()


GIVEN: list[tuple[Call, list[str]]] = [
    (lambda mesh, placed, state: sw.TrainState(placed.module, state.optimizer),
     ["TrainState: found Linear;", "needed placed = shardwise.apply(model, plan, mesh)"]),
    (lambda mesh, placed, state: sw.TrainState(placed, torch.optim.SGD), ["found SGD;", "needed one that is made"]),
    (lambda mesh, placed, state: sw.TrainState(placed, None), ["optimizer: found NoneType;", "adamw(placed, lr=...)"]),
    (lambda mesh, placed, state: sw.make_step(placed, mean), ["found Placed;", "TrainState(placed, optimizer)"]),
    (lambda mesh, placed, state: next(sw.steps(placed, mean, until=1)), ["found Placed;", "TrainState("]),
    (lambda mesh, placed, state: sw.evaluate(placed.module, mean, [torch.ones(2, 2)]), ["evaluate: found Linear;"]),
    (lambda mesh, placed, state: sw.evaluate(state, mean, [torch.ones(2, 2)]),
     ["evaluate: found TrainState;", "state.placed is it"]),
    (lambda mesh, placed, state: sw.loader([torch.ones(2)], placed.plan, mesh, global_size=1),
     ["loader: found Plan;", "needed the batch of a plan, plan.batch"]),
]  # fmt: skip


@pytest.mark.parametrize("row", GIVEN, ids=lambda row: row[1][0])
def test_one_thing_in_place_of_another_is_told(row: tuple[Call, list[str]]) -> None:
    """It was an AttributeError of something inside."""
    plan = sw.Plan.parse("dp1")
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(alone, plan, mesh)
        with pytest.raises(UsageError) as caught:
            row[0](mesh, placed, sw.TrainState(placed, sw.sgd(placed, lr=0.1)))
        assert all(part in str(caught.value) for part in row[1])
