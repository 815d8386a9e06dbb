"""Half precision: one policy on every mesh, losses near those of fp32, and a scaler that all ranks move alike."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.parity import grid

BATCH = 16
# Rounding to bf16 (8 significant bits) errs by at most 2^-9 = 2e-3 of a number, to either side at random. A gradient
# passes some twenty roundings one after another: sqrt(20) times that, 9e-3, or 3 times it for the worst tensor. The
# whole norm averages over 40,000 elements, the loss over 160 tokens times 64 classes. fp16 has 11 bits: 1/8 of it all.
LOSS, NORM, GRAD = 1e-4, 2e-3, 0.027
PLANS = ["dp1", "dp1 / mb2", "dp2", "fsdp2", "fsdp2 / zero1 / mb2", "tp2", "pp2 / 1f1b mb4"]


@dataclass
class Policy:
    """Types as they were met: stored, in a block's forward, and given to the optimizer."""

    stored: set[torch.dtype] = field(default_factory=set)
    weights: set[torch.dtype] = field(default_factory=set)
    activations: set[torch.dtype] = field(default_factory=set)
    gradients: set[torch.dtype] = field(default_factory=set)
    stepped: set[torch.dtype] = field(default_factory=set)
    wire: set[torch.dtype | None] = field(default_factory=set)


def run(text: str, spied: bool = False) -> tuple[grid.Trace, Policy]:
    """`grid.run_plan` with an eye on types; `spied` looks inside a block."""
    plan, trace, policy = sw.Plan.parse(text), grid.Trace(), Policy()
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(grid.MODELS["decoder"], plan, mesh, seed=grid.SEED)
        data = sw.loader(grid.Rows(), grid.batch(plan, BATCH), mesh, seed=grid.SEED)
        # as in the grid's fp32 runs: AdamW's first steps are signs, and would make noise of noise
        state = sw.TrainState(placed, sw.sgd(placed, lr=grid.LR, momentum=0.9), data)
        grid.spy_on_gradients(state, trace)
        if spied:
            watch(placed, policy)
        for metrics in sw.steps(state, grid.loss_fn, until=grid.STEPS, clip=grid.CLIP):
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        policy.stored = {p.dtype for p in placed.parameters()}
        policy.gradients = {g.dtype for g in trace.grads[-1].values()}
        policy.stepped = {p.dtype for group in state.optimizer.param_groups for p in group["params"]}
        trace.params = {n: grid.whole(p) for n, p in placed.named_parameters().items()}
    return trace, policy


def watch(placed: sw.Placed, policy: Policy) -> None:
    """Note the types that the first feed-forward of this rank computes with, and of gradients on the wire."""

    def look(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        policy.activations.add(args[0].dtype)
        policy.weights |= {p.dtype for p in module.parameters()}

    for part in placed.parts:
        for name, module in part.root.named_modules():
            if name.endswith("ffn") and any(True for _ in module.parameters()):
                module.register_forward_pre_hook(look)
        for module in part.run.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group  # what fully_shard was really told
                policy.wire |= {group.mp_policy.reduce_dtype} if group else set()


@functools.cache
def fp32(world: Any) -> grid.Trace:
    return world(1, grid.reference, "decoder", "fp32", BATCH)[0]


@functools.cache
def on_mesh(world: Any, plan: str) -> grid.Trace:
    return grid.merged([trace for trace, _ in world(sw.Plan.parse(plan).world, run, plan)])


def assert_close(trace: grid.Trace, truth: grid.Trace, scale: float = 1.0) -> None:
    worst = grid.differences([trace], truth)
    limits = {"loss": LOSS * scale, "norm": NORM * scale, "grad": GRAD * scale}
    assert all(worst[kind] <= limit for kind, limit in limits.items()), worst


@pytest.mark.share(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-pure"])
def test_near_fp32_on_every_mesh(world, plan: str, precision: str) -> None:
    trace = on_mesh(world, f"{plan} / {precision}")
    assert_close(trace, fp32(world), {"bf16": 1.0, "fp16": 1 / 8, "bf16-pure": 1.0}[precision])
    assert grid.differences([trace], fp32(world))["grad"] > 1e-3  # it did compute in half precision


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", PLANS[1:])
def test_meshes_differ_by_rounding_only(world, plan: str) -> None:
    assert_close(on_mesh(world, f"{plan} / bf16"), on_mesh(world, "dp1 / bf16"))


def test_the_tolerance_would_see_a_fault(world) -> None:
    trace, truth = on_mesh(world, "dp2 / bf16"), on_mesh(world, "dp1 / bf16")
    halved = grid.Trace(
        truth.losses, truth.norms, [{n: g / 2 for n, g in t.items()} for t in truth.grads], truth.params
    )
    with pytest.raises(AssertionError, match="grad"):
        assert_close(trace, halved)


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.share(4)
@pytest.mark.parametrize("plan", ["dp1", "dp2", "fsdp2", "tp2", "pp2 dp2 / 1f1b mb4"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_policy_is_that_of_every_mesh(world, plan: str, precision: str) -> None:
    text = f"{plan} / {precision}"
    for _, policy in world(sw.Plan.parse(text).world, run, text, True):
        assert policy.stored == policy.stepped == policy.gradients == {torch.float32}
        assert policy.weights == policy.activations == {HALF[precision]}
        # gloo has no sum in bf16 that is worth having; one process sends nothing
        assert policy.wire == ({torch.float32} if sw.Plan.parse(text).world > 1 else set())


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp1", "fsdp2", "tp2"])
def test_pure_bf16_keeps_fp32_masters(world, plan: str) -> None:
    text = f"{plan} / bf16-pure"
    for _, policy in world(sw.Plan.parse(text).world, run, text, True):
        assert policy.stored == policy.weights == policy.activations == {torch.bfloat16}
        assert policy.stepped == {torch.float32}


def small_steps(text: str) -> float:
    """How far a weight near 1 comes in 20 steps of 1e-4: bf16 alone would round each of them away."""
    plan = sw.Plan.parse(text)
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(grid.MODELS["decoder"], plan, mesh, seed=grid.SEED)
        data = sw.loader(grid.Rows(), grid.batch(plan, BATCH), mesh, seed=grid.SEED)
        state = sw.TrainState(placed, sw.adamw(placed, lr=1e-4, weight_decay=0.0), data)
        for _ in sw.steps(state, grid.loss_fn, until=20):
            pass
        norm = placed.named_parameters()["norm.weight"]  # starts at 1, where bf16 numbers are 2^-7 = 8e-3 apart
        master = state.tensors()["optim.norm.weight.master"]
        assert isinstance(master, DTensor) == isinstance(norm, DTensor)
        whole = grid.whole(master)
        assert whole.dtype == torch.float32 and torch.equal(whole.bfloat16(), grid.whole(norm))
        return float((whole - 1).abs().max())


@pytest.mark.share(2)
@pytest.mark.parametrize("plan", ["dp1", "fsdp2"])
def test_masters_gather_steps_that_bf16_would_lose(world, plan: str) -> None:
    for moved in world(sw.Plan.parse(plan).world, small_steps, f"{plan} / bf16-pure"):
        assert 1e-4 < moved < 3e-3


# the fp16 scaler


def overflowing(logits: Tensor, batch: dict[str, Tensor]) -> sw.Loss:
    """The gradient overflows fp16 where the window holds the token row 5; the loss is finite."""
    total, weight = grid.loss_fn(logits, batch)
    marked = (batch["input_ids"] == grid.Rows().ids[5, :-1]).all(dim=1).any()
    return sw.Loss(total * (1e6 if marked else 1.0), weight)


def scaled(text: str) -> list[tuple[bool, float, bool]]:
    """Per step: was it skipped, the scale after it, is the loss finite."""
    plan, seen = sw.Plan.parse(text), []
    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(grid.MODELS["decoder"], plan, mesh, seed=grid.SEED)
        data = sw.loader(grid.Rows(), grid.batch(plan, 8), mesh, shuffle=False)
        state = sw.TrainState(placed, sw.adamw(placed, lr=grid.LR), data)
        state.loss_scale.period = 2
        options = sw.StepOptions(on_nonfinite="raise")  # an overflow is not an error: it is what the scale is for
        for metrics in sw.steps(state, overflowing, until=6, options=options):
            seen.append((metrics.skipped, state.loss_scale.scale, math.isfinite(metrics.loss)))
        assert state.skipped == 2 and state.step == 6
        assert all(grid.whole(p).isfinite().all() for p in placed.parameters())
    return seen


@pytest.mark.share(6)
@pytest.mark.parametrize("plan", ["dp1", "dp1 / mb4", "dp2", "fsdp2", "fsdp2 / zero1 / mb2", "tp2", "pp2 / 1f1b mb4"])
def test_overflow_moves_the_scale_alike_on_all_ranks_and_meshes(world, plan: str) -> None:
    # row 5 is in the first of five windows, so in steps 1 and 6; two good steps double the scale
    scales, skipped = [8.0, 8.0, 16.0, 16.0, 32.0, 16.0], [True, False, False, False, False, True]
    for rank in world(sw.Plan.parse(plan).world, scaled, f"{plan} / fp16"):
        assert rank == [(skip, scale, True) for skip, scale in zip(skipped, scales, strict=True)]


class Rooted(torch.nn.Linear):
    """A loss that is finite, and a gradient that is none under any scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + (y * 0).abs().sqrt()


def never_finite() -> tuple[int, float, str]:
    with sw.open_mesh(plan := sw.Plan.parse("dp1 / fp16")) as mesh:
        placed = sw.apply(lambda: Rooted(4, 2), plan, mesh)
        state = sw.TrainState(placed, sw.sgd(placed, lr=0.1))
        step = sw.make_step(state, lambda y, _: sw.mean_over(y.square()), options=sw.StepOptions(max_skips=3))
        for _ in range(100):
            if (m := step(torch.ones(2, 4))).stopping is not None:
                break
        return m.step, state.loss_scale.scale, m.stopping or ""


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(world) -> None:
    """After as many halvings as fp16 has powers of two: it was skipped for ever, until the scale was zero."""
    [(steps, scale, said)] = world(1, never_finite)
    assert steps == 40 + 4 and scale == 2.0**-36 and "gradient norm nan" in said and "4 in a row" in said
