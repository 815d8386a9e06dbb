"""Pipelines against one process: losses, every gradient, every buffer, evaluation; and proof that it would be seen."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ModelError, PlanError, UsageError
from shardwise.launch.forked import WorldError
from shardwise.parallel.blocks import own_blocks
from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.stages.pipeline_torch_private import CARRIES_INTEGERS
from shardwise.plan.plan import SCHEDULES, ZERO_BUBBLE, Plan
from shardwise.testing.world import World
from tests.parity import grid, points
from tests.parity import pipeline_models as models
from tests.parity.pipeline_models import (
    Case,
    Numbers,
    batches,
    build,
    difference,
    loss_fn,
    on_stages,
    one_process,
    place,
)

FP64, FP32 = 1e-11, 1e-6
RULED = "bf16 precision=first:fp32"
GATHERED_ONCE = [kind for kind in SCHEDULES if kind not in ZERO_BUBBLE]


def check(world: World, case: Case) -> float:
    return difference(case, world(case.world, on_stages, case), one_process(case))


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_two_ranks_fp32(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="tower8", dtype=torch.float32)) < FP32


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_four_ranks_fp64(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="tower8", pp=4, micro_batches=8)) < FP64


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "case",
    [
        Case(mask=True, sample=False),
        Case(kind="zero-bubble-v", mask=True),
        Case(kind="interleaved", model="pair"),
        Case(kind="zero-bubble", model="pair"),
        Case(kind="interleaved", model="pyramid"),
        Case(kind="1f1b", model="tower-awkward"),
        Case(kind="zero-bubble", model="tower-awkward"),
        Case(boundaries=("layers.1",)),
        Case(kind="zero-bubble", stages=4, model="tower8"),
        Case(kind="zero-bubble", model="twice"),
        Case(kind="zero-bubble-v", model="twice"),
        Case(kind="dualpipe-v", model="twice"),
        Case(kind="gpipe", micro_batches=1),
        Case(kind="1f1b", mask=True, steps=2),
        Case(kind="1f1b", model="encoder"),
        Case(kind="zero-bubble", model="encoder"),
    ],
    ids=lambda case: f"{case.kind}-{case.model}",
)
def test_shapes_of_models(world: World, case: Case) -> None:
    assert check(world, case) < FP64


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_no_loss_has(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="aside")) < FP64


def test_whole_numbers_cross_stages_or_are_refused(world: World) -> None:
    if CARRIES_INTEGERS:
        assert check(world, Case(kind="1f1b", model="counted")) < FP64
        return
    with pytest.raises(WorldError, match="a block hands torch.int64 on to stage 1"):
        check(world, Case(kind="1f1b", model="counted"))


def kinds(names: Iterable[str], every_change: set[str]) -> list[Any]:
    """The grid has all of them with sharded parameters too: the others run in `make soak`."""
    return [pytest.param(name, marks=() if name in every_change else pytest.mark.soak) for name in names]


@pytest.mark.parametrize("kind", kinds(SCHEDULES, {"zero-bubble-v"}))
def test_with_sharded_parameters(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="tower8", dp=2, reshard=False)) < FP64


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("pp2 / 1f1b mb2 / bf16", "dp1 / mb2 / bf16"),
        ("pp2 dp2 / interleaved mb2 / fp16", "dp2 / mb2 / fp16"),
        (f"pp2 / 1f1b mb2 / {RULED}", f"dp1 / mb2 / {RULED}"),
    ],
)
def test_a_product_before_the_blocks_in_half_types(world: World, text: str, alone: str) -> None:
    """Later stages run it too, with zeros in place of its weights, on inputs in the type that is computed in."""
    case = points.Case(clip=None)
    found, expected = (world(Plan.parse(each).world, points.run, each, case) for each in (text, alone))
    worst = grid.differences([trace for trace, _ in found], expected[0][0])
    assert max(worst.values()) < FP32


@pytest.mark.parametrize("kind", kinds(GATHERED_ONCE, {"1f1b"}))
def test_with_resharded_parameters(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="tower8", dp=2, reshard=True)) < FP64


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", ZERO_BUBBLE)
def test_torch_is_wrong_where_the_constraints_say_so(world: World, kind: str) -> None:
    # the day that this fails, the constraint pp.zero-bubble-reshard can go
    assert check(world, Case(kind=kind, model="tower8", dp=2, reshard=True)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds(["1f1b", "zero-bubble-v"], set()))
def test_eight_ranks(world: World, kind: str) -> None:
    assert check(world, Case(kind=kind, model="tower8", pp=4, micro_batches=8, dp=2)) < FP64


# ---------------------------------------------------------------- negative controls


def on_stages_with_a_block_skipped(case: Case) -> Numbers:
    def skip(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    def place_and_skip(case: Case, mesh: Any) -> Any:
        placed = original(case, mesh)
        for name, block in own_blocks(placed):
            if name == "layers.2":
                object.__setattr__(block, "forward", skip)
        return placed

    original, models.place = models.place, place_and_skip
    try:
        return on_stages(case)
    finally:
        models.place = original


def test_a_skipped_block_is_seen(world: World) -> None:
    case = Case()
    assert difference(case, world(2, on_stages_with_a_block_skipped, case), one_process(case)) > 1e-3


def test_a_missing_gradient_is_seen(world: World) -> None:
    case = Case()
    ranks = world(2, on_stages, case)
    ranks[0].grads.pop("embed.weight")
    assert difference(case, ranks, one_process(case)) == float("inf")


# ---------------------------------------------------------------- refusals: the same on every rank, in time


class Skip(models.Tower):
    """The last stage would add zeros in place of what the first one embedded."""

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = start = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, angle=torch.zeros(()))
        return self.head(self.norm(x + start))


models.MODELS["skip"] = Skip


def refusal(case: Case, given: Any = None) -> str:
    with open_mesh(case.plan) as mesh:
        try:
            placed = place(case, mesh)
            assert placed.pipeline is not None
            placed.pipeline.run(given or case.batches(), loss_fn, backward=True)
        except (ModelError, PlanError, UsageError) as error:
            return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            Case(model="skip"),
            "ModelError: [module.chain] forward is not a chain: `add` in after the blocks uses a tensor made before",
        ),
        (Case(model="skip", sample=False), "ModelError: [module.chain] forward is not a chain"),
        (Case(model="pair", sample=False), "ModelError: pipeline.run: embed.weight is used before the blocks, that is"),
        (Case(model="pyramid", sample=False), "ModelError: pipeline.run: "),
        (Case(pp=2, kind="interleaved", stages=3), "PlanError: cut_pipeline: `pp2 / interleaved"),
        (Case(boundaries=("layer.1",)), "PlanError: cut_pipeline: boundary layer.1 is no block; name the first block"),
        (
            Case(boundaries=("layers.0",)),
            "PlanError: cut_pipeline: boundaries layers.0 do not cut 4 blocks into 2 stages",
        ),
        (Case(micro_batches=1), "PlanError: pipeline.run: schedule 1f1b over 2 ranks x 1 stages does not take 1"),
    ],
)
def test_refusals(world: World, case: Case, said: str) -> None:
    first, second = world(2, refusal, case)
    assert first.startswith(said), first
    assert first == second


class Broken(models.Tower):
    """Its third layer fails when it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].register_forward_pre_hook(fail)


def fail(module: nn.Module, args: Any) -> None:
    if next(module.parameters()).device.type != "meta":
        raise ValueError("planted")


models.MODELS["broken"] = Broken


def raised(case: Case) -> str:
    with open_mesh(case.plan) as mesh:
        pipeline = place(case, mesh).pipeline
        assert pipeline is not None
        try:
            pipeline.run(case.batches(), loss_fn, backward=True)
        except Exception as error:  # of any type: it is what this asks for
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_what_a_stage_raises_arrives_as_it_is(world: World, kind: str) -> None:
    """Torch says that a stage failed, and what it was given: not why, nor that the other rank is gone."""
    first, second = world(2, raised, Case(kind=kind, model="broken"))
    said = {first, second}
    assert "ValueError: planted" in said and "[Stage" not in first + second, said


def test_micro_batches_of_unequal_rows_are_refused(world: World) -> None:
    said = world(2, refusal, Case(), [*batches(3), *batches(1, rows=3)])
    assert said[0] == said[1]
    assert "micro-batch 3 has inputs" in said[0] and "[3, 5]" in said[0] and "[2, 5]" in said[0]


# ---------------------------------------------------------------- what stays, and what goes


class Held:
    """A saved activation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_after_a_step(case: Case) -> tuple[int, int]:
    peak = 0

    def pack(tensor: torch.Tensor) -> Held:
        nonlocal peak
        peak += 1
        return Held(tensor.detach())  # what it saves of its own output would else be a ring

    with open_mesh(case.plan) as mesh:
        placed = place(case, mesh)
        assert placed.pipeline is not None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            losses = placed.pipeline.run(case.batches(), loss_fn, backward=True)
        gc.collect()
        assert not any(loss.requires_grad for loss in losses)
        return peak, sum(type(thing) is Held for thing in gc.get_objects())


@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble", "dualpipe-v"])
def test_activations_are_released(world: World, kind: str) -> None:
    for peak, held in world(2, held_after_a_step, Case(kind=kind)):
        assert peak > 20
        assert held == 0


def names_per_rank(case: Case) -> tuple[list[str], list[str], int]:
    with open_mesh(case.plan) as mesh:
        placed = place(case, mesh)
        numbers = sum(p.numel() for p in placed.parameters())
        return list(placed.named_parameters()), list(placed.named_buffers()), numbers


@pytest.mark.parametrize("model", ["tower", "pair", "pyramid"])
def test_each_parameter_is_on_one_stage_under_its_own_name(world: World, model: str) -> None:
    case = Case(model=model, kind="interleaved")
    whole = build(model)
    ranks = world(2, names_per_rank, case)
    names = [name for rank in ranks for name in rank[0]]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert sum(rank[2] for rank in ranks) == sum(p.numel() for p in whole.parameters())
    if model == "pyramid":  # written buffers are on one stage too, so that a checkpoint has one value for each
        buffers = [name for rank in ranks for name in rank[1]]
        assert sorted(buffers) == sorted(name for name, _ in whole.named_buffers())


def seen_by_the_model(case: Case) -> list[tuple[bool, float]]:
    """(gradients on, loss) of an evaluation between two training calls, and the losses of both."""
    with open_mesh(case.plan) as mesh:
        pipeline = place(case, mesh).pipeline
        assert pipeline is not None
        found = []
        for backward, num in ((True, 4), (False, 5), (True, 4)):
            losses = pipeline.run(batches(num), loss_fn, backward=backward)
            found += [(loss.requires_grad, loss.item()) for loss in losses]
        return found


@pytest.mark.parametrize("kind", ["gpipe", "zero-bubble-v"])
def test_evaluation_between_steps_takes_any_number_of_micro_batches(world: World, kind: str) -> None:
    per_rank = world(2, seen_by_the_model, Case(kind=kind))
    found = next(losses for losses in per_rank if losses)
    assert len(found) == 13
    assert [loss for _, loss in found[:4]] == [loss for _, loss in found[9:]]
    assert [loss for _, loss in found[4:8]] == pytest.approx([loss for _, loss in found[:4]], rel=1e-12)


def test_fp64_reference_is_not_trivial() -> None:
    numbers = one_process(replace(Case(), steps=2))
    assert min(float(grad.abs().max()) for grad in numbers.grads.values()) > 1e-6


def forwards_per_block(case: Case) -> dict[str, int]:
    """How often each block of this rank is computed in a step of four micro-batches."""
    with open_mesh(case.plan) as mesh:
        placed = place(case, mesh)
        assert placed.pipeline is not None
        placed.pipeline.run(batches(4), loss_fn, backward=True)  # it learns shapes by one more
        runs = dict.fromkeys((name for name, _ in own_blocks(placed)), 0)
        for name, block in own_blocks(placed):
            inner = next(module for module in block.modules() if next(module.children(), None) is None)
            inner.register_forward_pre_hook(lambda *_, name=name: runs.update({name: runs[name] + 1}))
        placed.pipeline.run(batches(4), loss_fn, backward=True)
        return runs


@pytest.mark.share(4)
@pytest.mark.parametrize("model", ["tower8", "tower8-repeated"])
@pytest.mark.parametrize("kind", ZERO_BUBBLE)
def test_a_divided_backward_recomputes_a_block_once(world: World, kind: str, model: str) -> None:
    case = Case(kind=kind, model=model, recompute=model == "tower8")
    for runs in world(2, forwards_per_block, case):
        assert runs and set(runs.values()) == {2 * 4}, runs
    assert check(world, case) < FP64
