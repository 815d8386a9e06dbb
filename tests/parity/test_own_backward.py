"""A script's own backward passes between steps: another trainer's loss, a saliency map. They are of no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def drawn(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    noise, real = (torch.randn(8, 4, generator=source, dtype=torch.float64) for _ in range(2))
    return noise, real + 2


def adversarial(text: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and norms of two trainers that go through each other's modules; the weights at first."""
    plan, seen = sw.Plan.parse(text), list[float]()
    with sw.open_mesh(plan) as mesh:
        makes, judges = sw.apply(generator, plan, mesh, seed=1), sw.apply(critic, plan, mesh, seed=2)
        firsts = [{n: t.detach().clone() for n, t in each.module.state_dict().items()} for each in (makes, judges)]
        step_judge = sw.make_step(sw.TrainState(judges, sw.adamw(judges, lr=1e-2)), judging)
        state = sw.TrainState(makes, sw.adamw(makes, lr=1e-2))
        step_make = sw.make_step(state, lambda out, _: sw.mean_over(softplus(-judges.module(out))))
        for step in range(4):
            noise, real = (rows.tensor_split(mesh.batch.size)[mesh.batch.rank] for rows in drawn(step))
            with torch.no_grad():
                made = makes.module(noise)
            for each, batch in ((step_judge, told(real, made)), (step_make, (noise,))):
                metrics = each(batch)
                seen += [metrics.loss, metrics.grad_norm]
        return seen, firsts[0], firsts[1]


def told(real: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([real, made]), torch.cat([torch.ones(len(real), 1), torch.zeros(len(made), 1)])


def judging(out: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over(torch.where(batch[1] > 0, softplus(-out), softplus(out)))


def in_plain_torch(firsts: list[dict[str, torch.Tensor]]) -> list[float]:
    makes, judges, seen = generator().double(), critic().double(), list[float]()
    for module, first in zip((makes, judges), firsts, strict=True):
        module.load_state_dict(first)
    steps = {module: torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01) for module in (makes, judges)}
    for step in range(4):
        noise, real = drawn(step)
        with torch.no_grad():
            made = makes(noise)
        for module in (judges, makes):
            steps[module].zero_grad()
            batch = told(real, made)
            out = judges(batch[0]) if module is judges else softplus(-judges(makes(noise)))
            loss = torch.where(batch[1] > 0, softplus(-out), softplus(out)).mean() if module is judges else out.mean()
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
            seen += [loss.item(), norm.item()]
            steps[module].step()
    return seen


@pytest.mark.parametrize("plan", ["dp1", "dp2", "fsdp2"])
def test_two_trainers_in_one_loop_are_those_of_plain_torch(world: World, plan: str) -> None:
    [(_, *firsts)] = world(1, adversarial, "dp1 / fp64")
    truth = in_plain_torch(firsts)
    for seen, *_ in world(sw.Plan.parse(plan).world, adversarial, f"{plan} / fp64"):
        assert seen == pytest.approx(truth, rel=1e-9)


def test_a_saliency_map_between_steps_changes_nothing() -> None:
    found = []
    for looks in (False, True):
        with sw.open_mesh(sw.Plan()) as mesh:
            placed = sw.apply(critic, sw.Plan(), mesh, seed=1)
            step = sw.make_step(sw.TrainState(placed, sw.adamw(placed, lr=1e-2)), judging, clip=0.1)
            rows = told(torch.ones(4, 4), torch.zeros(4, 4))
            seen = []
            for _ in range(3):
                if looks:
                    placed.module(rows[0]).sum().backward()
                    step.measure(rows)
                metrics = step(rows)
                seen.append((metrics.loss, metrics.grad_norm))
            found.append(seen)
    assert found[0] == found[1]


def stepped_by_hand(text: str) -> list[str]:
    """What steps of optimizers say that nobody has given the gradients of a step: one of torch's, one of ours."""
    plan, said = sw.Plan.parse(text), list[str]()
    with sw.open_mesh(plan) as mesh:
        for build in (lambda placed: torch.optim.SGD(placed.parameters(), lr=0.1), lambda placed: sw.sgd(placed, 0.1)):
            placed = sw.apply(critic, plan, mesh, seed=2)
            optimizer, before = build(placed), [p.detach().clone() for p in placed.parameters()]
            placed.module(torch.ones(4, 4)).sum().backward()
            with pytest.raises(UsageError, match="sw.make_step") as refused:
                optimizer.step()
            said.append(str(refused.value))
            assert all(torch.equal(now, then) for now, then in zip(placed.parameters(), before, strict=True))
            other = torch.nn.Linear(2, 2)
            torch.optim.SGD(other.parameters(), lr=0.1).step()  # not of the model
        return said


@pytest.mark.parametrize("plan", ["dp2", "fsdp2"])
def test_a_step_after_a_backward_of_the_scripts_own_is_refused(world: World, plan: str) -> None:
    """Nobody sums such gradients: replicas drifted apart, shards took sums for means, without a word."""
    for said in world(2, stepped_by_hand, plan):
        assert (
            said[0].startswith("SGD.step()") and f"under `{plan} / fp32`" in said[0] and "no step has given" in said[1]
        )
