"""Negative controls: each classic fault of distributed training is planted, and the grid's comparison must see it.

A fault is planted inside the processes of the world by replacing one name there; the package has no switch for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import shardwise as sw
from shardwise.parallel import data, tensor
from shardwise.parallel.pipeline import Layout
from shardwise.parallel.stages.stage import Cut, StageModule
from shardwise.testing.world import WorldError
from shardwise.train import step as step_module
from shardwise.train.guards import agreement
from shardwise.train.sums import WorldSums
from tests.parity import grid

BATCH, TOLERANCE = 16, 1e-11


def nothing() -> None:
    """The control of the controls."""


def mean_of_means() -> None:
    """Every rank and micro-batch divides by its own number of tokens."""
    right = grid.loss_fn

    def wrong(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> sw.Loss:
        total, weight = right(logits, batch)
        return sw.Loss(total / weight, 1)

    grid.loss_fn = wrong


def doubled_gradients() -> None:
    """As where one rank too many is summed, or an average is undone twice."""
    right = step_module.gradient_divisor
    step_module.gradient_divisor = lambda placed: 2 * right(placed)


def doubled_without_clipping() -> None:
    grid.CLIP = 1e9
    doubled_gradients()


def unreduced_parameter() -> None:
    """One parameter that data parallelism forgot: each rank steps it on its own rows' gradient."""
    shard = data.fully_shard

    def wrong(module: nn.Module, **options: Any) -> Any:
        forgotten = {p for n, p in module.named_parameters() if n.endswith("ffn_norm.weight")}
        return shard(module, **options | {"ignored_params": forgotten})

    data.fully_shard = wrong


def unsummed_tensor_gradient() -> None:
    """Norms between sequence shards as if every tp rank saw all tokens: a summand is taken for the whole gradient."""
    right = tensor.with_local_parameters
    tensor.with_local_parameters = lambda module, gradient: right(module, Replicate())


def clipping_per_shard() -> None:
    """Each rank clips by the norm of what it holds."""
    right = WorldSums.finish
    WorldSums.finish = lambda self, squares: right(self, squares)._replace(squares=float(squares))


def norm_counted_twice() -> None:
    """Replicas and tensor shards that hold the same elements all add them to the norm."""
    step_module.is_counted_here = lambda parameter, mesh: True


def block_on_no_stage() -> None:
    """A boundary that is off by one: the second stage begins a block too late."""
    right = Layout.cut

    def wrong(self: Layout, stage: int) -> Cut:
        cut = right(self, stage)
        return replace(cut, first=cut.first + 1) if stage == 1 else cut

    Layout.cut = wrong  # type: ignore[method-assign]


def block_skipped() -> None:
    """All parameters are there, and the first block of the second stage is not run."""
    right = StageModule.forward

    def wrong(self: StageModule, *received: torch.Tensor, **rest: Any) -> Any:
        if self.cut.stage == 1:
            block = self.root.get_submodule(self.cut.blocks[self.cut.first])
            object.__setattr__(block, "forward", lambda x, *_, **__: x + 0 * sum(p.sum() for p in block.parameters()))
        return right(self, *received, **rest)

    StageModule.forward = wrong  # type: ignore[method-assign]


def run_with(fault: Callable[[], None], plan: str) -> grid.Trace:
    fault()
    agreement._FirstUpdate.__call__ = lambda *_: None  # it would name some of the faults; the grid is what is tried
    return grid.run_plan(f"{plan} / fp64", "decoder", BATCH)


def reference_with(fault: Callable[[], None]) -> grid.Trace:
    if fault is doubled_without_clipping:
        grid.CLIP = 1e9
    return grid.reference("decoder", "fp64", BATCH)


@functools.cache
def truth(world: Any, fault: Callable[[], None]) -> grid.Trace:
    return world(1, reference_with, fault)[0]


def seen(world: Any, fault: Callable[[], None], plan: str) -> dict[str, float] | str:
    """Differences above the grid's tolerance; or what `grid.differences` said where it refused to compare."""
    ranks = world(sw.Plan.parse(plan).world, run_with, fault, plan)
    try:
        worst = grid.differences(ranks, truth(world, fault if fault is doubled_without_clipping else nothing))
    except AssertionError as error:
        return str(error).splitlines()[0]
    return {kind: value for kind, value in worst.items() if not value <= TOLERANCE}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "tp2 / seq", "pp2 / 1f1b mb4"])
def test_no_fault_is_not_caught(world, plan: str) -> None:
    assert seen(world, nothing, plan) == {}


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2", "dp1 / mb3"])
def test_mean_of_means(world, plan: str) -> None:
    assert seen(world, mean_of_means, plan).keys() >= {"loss", "norm", "grad"}


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2", "fsdp2 tp2"])
def test_doubled_gradients(world, plan: str) -> None:
    clipped, unclipped = seen(world, doubled_gradients, plan), seen(world, doubled_without_clipping, plan)
    assert isinstance(clipped, dict) and isinstance(unclipped, dict)
    twice = pytest.approx(1, rel=0.01)  # the second step's gradient is taken at other parameters
    assert [clipped["norm"], unclipped["norm"], unclipped["grad"]] == [twice, twice, twice], (clipped, unclipped)
    # why a grid of losses alone would not do: AdamW divides the factor out again, clipping does as well
    assert unclipped.get("loss", 0) < 1e-5 and clipped.get("loss", 0) < 1e-5


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["fsdp2", "fsdp2 / zero1", "dp2 fsdp2"])
def test_parameter_that_is_not_sharded(world, plan: str) -> None:
    assert "disagree about layers.0.ffn_norm.weight" in seen(world, unreduced_parameter, plan)


def run_as_users_do(fault: Callable[[], None], plan: str) -> grid.Trace:
    fault()
    return grid.run_plan(f"{plan} / fp64", "decoder", BATCH)


def test_a_parameter_that_is_not_sharded_is_named_by_the_step_itself(world) -> None:
    with pytest.raises(WorldError, match=r"ffn_norm.weight[\s\S]*after the first update"):
        world(2, run_as_users_do, unreduced_parameter, "fsdp2")


def test_tensor_parallel_gradient_that_is_not_summed(world) -> None:
    assert "disagree" in seen(world, unsummed_tensor_gradient, "tp2 / seq")


@pytest.mark.share(3)
@pytest.mark.parametrize("plan", ["fsdp2", "tp2", "pp2 / 1f1b mb4"])
def test_clipping_per_shard(world, plan: str) -> None:
    assert seen(world, clipping_per_shard, plan) == "ranks disagree about loss or norm"


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp2 tp2", "tp2"])
def test_norm_that_counts_copies(world, plan: str) -> None:
    assert seen(world, norm_counted_twice, plan).keys() >= {"norm", "grad", "param"}


def test_block_on_no_stage(world) -> None:
    assert "names differ: ['layers.2." in seen(world, block_on_no_stage, "pp2 / 1f1b mb4")


def test_block_that_is_not_run(world) -> None:
    assert seen(world, block_skipped, "pp2 / 1f1b mb4").keys() == {"loss", "norm", "grad", "param"}
