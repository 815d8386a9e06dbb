"""Every optimizer under every layout against one process, whose update is written out here or is torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ModelError, UsageError
from shardwise.parallel.compose import apply
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.optimizers import OPTIMIZERS, adamw, lamb, lion, muon, sgd
from shardwise.train.state import TrainState
from shardwise.train.updates.optim import NamedOptimizer, name_optimizer, stepped_parameters
from shardwise.train.updates.update_rules import Lamb, Muon
from shardwise.train.updates.whole_steps import state_after_step
from tests.parity.placing import LAYOUTS, Net, full, gradients, place, train

STEPS, TOLERANCE = 3, {torch.float64: 1e-11, torch.float32: 1e-6}
DIALS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"lr": 0.01, "weight_decay": 0.3},
    "lamb": {"lr": 0.02},
    "muon": {"lr": 0.01},
    "adafactor": {"lr": 0.05, "weight_decay": 0.1},
}


def lion_reference(name: str, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
    m = s.get("m", torch.zeros_like(p))
    p -= 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.3 * p)
    s["m"] = 0.99 * m + 0.01 * g


def adam_reference(p: Tensor, g: Tensor, s: dict[str, Any], beta2: float, eps: float) -> Tensor:
    s["t"] = t = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", torch.zeros_like(p)) + 0.1 * g
    s["v"] = beta2 * s.get("v", torch.zeros_like(p)) + (1 - beta2) * g * g
    return (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + eps)


def lamb_reference(name: str, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
    r = adam_reference(p, g, s, 0.999, 1e-6) + 0.01 * p
    p -= 0.02 * float(p.norm()) / float(r.norm()) * r


def muon_reference(name: str, p: Tensor, g: Tensor, s: dict[str, Any]) -> None:
    if p.dim() != 2 or "embed" in name:
        p -= 0.01 * adam_reference(p, g, s, 0.95, 1e-8)
        return
    s["m"] = 0.95 * s.get("m", torch.zeros_like(p)) + 0.05 * g
    x = 0.05 * g + 0.95 * s["m"]
    u, sigma, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    p *= 1 - 0.01 * 0.1
    p -= 0.01 * 0.2 * max(p.shape) ** 0.5 * (u * sigma) @ v


REFERENCES: dict[str, Callable[[str, Tensor, Tensor, dict[str, Any]], None]] = {
    "lion": lion_reference,
    "lamb": lamb_reference,
    "muon": muon_reference,
}
TORCH: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


def reference(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters after some steps of one process over whole tensors."""
    parameters = dict(Net(dtype).named_parameters())
    states: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    optimizer = TORCH[kind](parameters.values(), foreach=False, **DIALS[kind]) if kind in TORCH else None
    for step in range(STEPS):
        for name, grad in gradients(dict(parameters), step).items():
            if optimizer is None:
                REFERENCES[kind](name, parameters[name].data, grad, states[name])
            else:
                parameters[name].grad = grad
        if optimizer is not None:
            optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def worst(placed_parameters: dict[str, nn.Parameter], expected: dict[str, Tensor]) -> float:
    """Largest difference of a parameter, relative to its largest element."""
    gaps = []
    for name, parameter in placed_parameters.items():
        want = expected[name]
        gaps.append(float((full(parameter) - want).abs().max() / want.abs().max()))
    return max(gaps)


def compare(layout: str, kind: str) -> dict[str, float]:
    found = {}
    with open_mesh(LAYOUTS[layout]) as mesh:
        for dtype in TOLERANCE:
            placed = place(layout, mesh, dtype)
            train(placed, OPTIMIZERS[kind](placed, **DIALS[kind]), range(STEPS))
            found[str(dtype)] = worst(placed.named_parameters(), reference(kind, dtype))
    return found


@pytest.mark.share(6)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pp2fsdp2"])
def test_every_layout_makes_the_update_of_one_process(world: World, layout: str, kind: str) -> None:
    for result in world(LAYOUTS[layout].world, compare, layout, kind):
        for dtype, tolerance in TOLERANCE.items():
            assert result[str(dtype)] <= tolerance, (dtype, result)


def step_per_shard(kind: str) -> float:
    """The classic fault: norms and matrices of the shard in place of the whole."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh, torch.float64)
        params, live = stepped_parameters(placed, local=True)
        if kind == "lamb":
            faulty = NamedOptimizer(Lamb(params.values(), 0.02), params, live)
        else:
            matrices = [p for p in params.values() if p.dim() == 2]
            faulty = NamedOptimizer(Muon(matrices, 0.01), {n: p for n, p in params.items() if p.dim() == 2}, live)
        for step in range(STEPS):
            grads = gradients(dict(placed.named_parameters()), step)
            faulty.take_grads({name: grads[name] for name in faulty.params})
            faulty.step()
        expected = reference(kind, torch.float64)
        names = ("up.weight", "down.weight")
        return worst({name: placed.named_parameters()[name] for name in names}, expected)


@pytest.mark.parametrize("kind", ["lamb", "muon"])
def test_the_comparison_sees_an_update_made_per_shard(world: World, kind: str) -> None:
    assert min(world(2, step_per_shard, kind)) > 1e-3


def test_muon_is_torchs_but_for_its_rounding_to_bf16(world: World) -> None:
    assert max(world(1, muon_against_torch)) < 5e-3


def muon_against_torch() -> float:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        train(placed, muon(placed, 0.01), range(STEPS))
        matrices = [p for name, p in Net().named_parameters() if name in ("up.weight", "down.weight")]
        torchs = torch.optim.Muon(matrices, lr=0.01, adjust_lr_fn="match_rms_adamw")
        for step in range(STEPS):
            grads = gradients(dict(placed.named_parameters()), step)
            for p, name in zip(matrices, ("up.weight", "down.weight"), strict=True):
                p.grad = grads[name]
            torchs.step()
        ours = placed.named_parameters()
        return worst(
            {name: ours[name] for name in ("up.weight", "down.weight")},
            {name: p.detach() for name, p in zip(("up.weight", "down.weight"), matrices, strict=True)},
        )


def half_precision(layout: str) -> tuple[float, list[str]]:
    """A hundred updates, each too small for bf16 to see, against the same in fp32."""
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh, torch.bfloat16)
        before = {name: full(p).float() for name, p in placed.named_parameters().items()}
        optimizer = sgd(placed, lr=1e-4)
        ones = {name: torch.ones_like(p) for name, p in placed.named_parameters().items()}
        for _ in range(100):
            optimizer.take_grads(ones)
            optimizer.step()
        expected = {name: p - 0.01 for name, p in before.items()}
        gap = worst(placed.named_parameters(), expected)
        return gap, [name for name in optimizer.state_tensors() if name.endswith(".master")]


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_half_precision_parameters_are_stepped_as_fp32(world: World, layout: str) -> None:
    for gap, masters in world(LAYOUTS[layout].world, half_precision, layout):
        assert gap < 2**-8  # one rounding to bf16, not a hundred
        assert len(masters) == 8


TORCH_KINDS = ("NAdam", "RMSprop", "Adagrad", "SGD")


def state_round_trip(kind: str) -> bool:
    """State carried by name into a fresh optimizer: the next steps are equal bit by bit."""
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:

        def build() -> Any:
            placed = place("fsdp2", mesh)
            if kind in OPTIMIZERS:
                return placed, OPTIMIZERS[kind](placed, **DIALS[kind])
            extra = {"momentum": 0.9, "dampening": 0.5} if kind == "SGD" else {}
            return placed, name_optimizer(getattr(torch.optim, kind)(placed.parameters(), lr=0.01, **extra), placed)

        placed, optimizer = build()
        train(placed, optimizer, range(2))
        saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
        again, fresh = build()
        untouched = {name: full(p) for name, p in again.named_parameters().items()}
        begun = {
            name: tensor.clone() for name, tensor in fresh.state_tensors().items()
        }  # Adagrad has state from the start
        template = fresh.state_template(saved.keys())
        assert template.keys() == saved.keys()
        assert {n: t.shape for n, t in template.items()} == {n: t.shape for n, t in saved.items()}
        kept = fresh.state_tensors()
        assert kept.keys() == begun.keys() and all(torch.equal(full(kept[n]), full(begun[n])) for n in begun)
        assert all(torch.equal(full(p), untouched[n]) for n, p in again.named_parameters().items())
        for name, tensor in template.items():
            tensor.copy_(saved[name])
        fresh.load_state_tensors(template)
        for name, parameter in again.named_parameters().items():
            parameter.detach().copy_(placed.named_parameters()[name])
        train(placed, optimizer, range(2, 4))
        train(again, fresh, range(2, 4))
        ours, theirs = placed.named_parameters(), again.named_parameters()
        return all(torch.equal(full(ours[name]), full(theirs[name])) for name in ours)


def shapes_stepped(plan: str) -> list[tuple[int, ...]]:
    """Of the parameters of six layers that are alike, those that a template steps."""
    stepped: list[tuple[int, ...]] = []

    def noted(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
        stepped.append(tuple(parameter.shape))
        return state_after_step(optimizer, parameter)

    with open_mesh(Plan.parse(plan)) as mesh:
        placed = apply(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), Plan.parse(plan), mesh, seed=0)
        names = [f"optim.{name}.exp_avg" for name in placed.named_parameters()]
        with patch("shardwise.train.updates.optim.state_after_step", noted):
            adamw(placed, lr=0.01).state_template(names)
    return stepped


@pytest.mark.parametrize("plan", ["dp2", "fsdp2"])
def test_one_parameter_of_each_kind_is_stepped_for_a_template(world: World, plan: str) -> None:
    assert all(len(stepped) == len(set(stepped)) == 2 for stepped in world(2, shapes_stepped, plan))


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, *TORCH_KINDS])
def test_state_by_name_continues_bit_by_bit(world: World, kind: str) -> None:
    assert all(world(2, state_round_trip, kind))


def refusals() -> list[str]:
    def message(kind: type[Exception], call: Callable[[], Any]) -> str:
        try:
            call()
        except kind as error:
            return str(error)
        return "not refused"

    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        partial = torch.optim.AdamW(list(placed.parameters())[1:])
        foreign = torch.optim.AdamW([*placed.parameters(), nn.Parameter(torch.ones(3, 9))])
        return [
            message(ModelError, lambda: name_optimizer(partial, placed)),
            message(ModelError, lambda: name_optimizer(foreign, placed)),
            message(ModelError, lambda: name_optimizer(torch.optim.LBFGS(placed.parameters()), placed)),
            message(ModelError, lambda: adamw(placed, 1e-3, no_decay=("*.biass",))),
            message(ModelError, lambda: adamw(placed, 1e-3).take_grads({"up.wieght": torch.ones(7, 6)})),
            message(UsageError, lambda: adamw(placed, -1.0)),
            message(UsageError, lambda: lion(placed, 1e-4, betas=(0.9, 1.0))),
            message(UsageError, lambda: lamb(placed, float("nan"))),
            message(UsageError, lambda: sgd(placed, 0.1, nesterov=True)),
            message(UsageError, lambda: TrainState(placed, sgd(placed, 0.1), ema=cast(Any, 0.9))),
        ]


def test_what_cannot_work_is_refused_by_name(world: World) -> None:
    wanted = [
        "lacks 'cube'",
        "(3, 9)",
        "LBFGS",
        "*.biass",
        "up.weight",
        "lr=-1.0",
        "beta2=1.0",
        "lr=nan",
        "nest",
        "ema: found 0.9",
    ]
    [messages] = world(1, refusals)
    for text, message in zip(wanted, messages, strict=True):
        assert text in message


def decayed() -> list[str]:
    with open_mesh(LAYOUTS["one"]) as mesh:
        placed = place("one", mesh)
        optimizer = adamw(placed, 0.1, weight_decay=0.5, no_decay=("*.bias", "norm.*"))
        before = {name: p.detach().clone() for name, p in placed.named_parameters().items()}
        optimizer.take_grads({name: torch.zeros_like(p) for name, p in placed.named_parameters().items()})
        optimizer.scale_lr(0.5)
        optimizer.step()
        return [n for n, p in placed.named_parameters().items() if torch.allclose(p, before[n] * (1 - 0.1 * 0.5 * 0.5))]


def test_no_decay_and_the_schedules_factor(world: World) -> None:
    assert sorted(world(1, decayed)[0]) == ["cube", "down.weight", "embed.weight", "up.weight"]


def refused_on_shards() -> None:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        for kind, advice in ((torch.optim.Rprop, "adamw, sgd"), (torch.optim.Adafactor, "shardwise.adafactor")):
            with pytest.raises(ModelError, match=f"{kind.__name__} cannot step sharded parameters; use {advice}"):
                name_optimizer(kind(placed.parameters()), placed)


def test_torchs_rules_that_need_whole_tensors_are_refused_on_shards(world: World) -> None:
    world(2, refused_on_shards)


def group_added_later() -> str:
    with sw.open_mesh(plan := sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 2), plan, mesh)
        optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
        state = sw.TrainState(placed, optimizer, schedule=sw.warmup_linear(2, 10))
        step = sw.make_step(state, lambda out, _: sw.mean_over(out.square()))
        step(torch.ones(2, 4))
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.01})
        with pytest.raises(UsageError) as caught:
            step(torch.ones(2, 4))
    return str(caught.value)


def test_a_group_that_comes_later_has_no_base_for_a_schedule(world: World) -> None:
    [said] = world(1, group_added_later)
    assert "schedule: found 2 groups of the optimizer, needed the 1 that it began with" in said
