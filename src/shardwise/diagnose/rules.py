"""`check_rules`: a model under tensor-parallel rules against plain PyTorch in one process, step by step, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.launch.forked import World, WorldError
from shardwise.model.tracer import tensors_in
from shardwise.parallel.compose import apply
from shardwise.parallel.init import init_model
from shardwise.parallel.mesh import open_mesh
from shardwise.plan.plan import Plan
from shardwise.train.loss import Loss
from shardwise.train.optimizers import sgd
from shardwise.train.state import TrainState
from shardwise.train.step import make_step

TOLERANCE = 1e-11
"""Relative, in fp64: rounding is 1e-16 and grows with the length of sums; any fault is far above."""
SEED, LR, CLIP = 7, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is run: it goes to other processes, so the factory is a function at the top level of a module."""

    factory: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of the input."""
    dtype: str = "int64"
    """Of the input: `int64` for token numbers, else a floating type; the trial runs in fp64."""
    steps: int = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What some steps did: losses, gradient norms, and how far each parameter moved."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    moves: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest relative differences, and the parameter that moved most differently."""

    loss: float
    norm: float
    move: float
    parameter: str = ""

    @property
    def equal(self) -> bool:
        """Whether all are within rounding."""
        return max(self.loss, self.norm, self.move) <= TOLERANCE


def check_rules(trial: Trial, rules: Mapping[str, str], plan: Plan, world: World) -> Worst:
    """Compare a model under rules with itself in one process.

    Args:
        trial: the model and its input.
        rules: pattern -> style.
        plan: with `tp` ranks, and `seq` to prove sequence shards.
        world: processes to run in.

    Raises:
        ModelError: the plan cannot be applied with these rules; the message is that of `apply`.

    Cost: the steps on `plan.world` processes and on one, in fp64.
    """
    alone = world(1, plain_run, trial)[0]
    try:
        ranks = world(plan.world, rules_run, trial, dict(rules), str(plan))
    except WorldError as error:
        lines = [line for line in str(error).splitlines() if "Error:" in line]
        raise ModelError(f"rules under `{plan}`: a rank failed: {lines[-1] if lines else error}") from None
    return worst_of(ranks, alone)


def plain_run(trial: Trial) -> Run:
    """Plain PyTorch: nothing of Shardwise but the initial weights."""
    module = init_model(trial.factory, seed=SEED, dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    run = Run()
    for step in range(trial.steps):
        output = first_tensor(module(trial_input(trial, module, step)))
        loss = (output - target(output, step)).square().sum() / output.numel()
        torch.autograd.backward(loss)
        run.losses.append(loss.item())
        run.norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    run.moves.update({name: p.detach() - before[name] for name, p in module.named_parameters()})
    return run


def rules_run(trial: Trial, rules: Mapping[str, str], plan_text: str) -> Run:
    """The same under a plan, on this rank."""
    plan = Plan.parse(plan_text)
    run = Run()
    with open_mesh(plan) as mesh:
        placed = apply(trial.factory, plan, mesh, seed=SEED, rules=dict(rules))
        whole = init_model(trial.factory, seed=SEED, dtype=torch.float64)
        step = make_step(TrainState(placed, sgd(placed, lr=LR)), _loss, clip=CLIP)
        for index in range(trial.steps):
            metrics = step((trial_input(trial, whole, index), index))
            run.losses.append(metrics.loss)
            run.norms.append(metrics.grad_norm)
        before = dict(whole.named_parameters())
        for name, parameter in placed.named_parameters().items():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            run.moves[name] = full.detach() - before[name].detach()
    return run


def _loss(output: Any, batch: tuple[torch.Tensor, int]) -> Loss:
    tensor = first_tensor(output)
    return Loss((tensor - target(tensor, batch[1])).square().sum(), tensor.numel())


def first_tensor(output: Any) -> torch.Tensor:
    """The first floating tensor of a model's output."""
    found = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point()]
    if not found:
        raise ModelError(f"rules: the model returned {type(output).__name__} without a floating tensor; needed one")
    return found[0]


def trial_input(trial: Trial, module: nn.Module, step: int) -> torch.Tensor:
    """The input of a step: random numbers, or random token numbers below the size of the first embedding."""
    draw = torch.Generator().manual_seed(step)
    if trial.dtype != "int64":
        return torch.randn(trial.shape, generator=draw, dtype=torch.float64)
    sizes = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    return torch.randint(0, sizes[0] if sizes else 2, trial.shape, generator=draw)


def target(output: torch.Tensor, step: int) -> torch.Tensor:
    """What the output is compared with."""
    draw = torch.Generator().manual_seed(1000 + step)
    return torch.randn(output.shape, generator=draw, dtype=torch.float64).to(output)


def worst_of(ranks: list[Run], alone: Run) -> Worst:
    """The largest relative differences of any rank."""
    moves: dict[str, float] = {}
    usual = sorted(float(move.norm()) for move in alone.moves.values())[len(alone.moves) // 2]
    for rank in ranks:
        for name, move in rank.moves.items():
            scale = max(float(alone.moves[name].norm()), 1e-3 * usual)
            error = float((move - alone.moves[name]).norm()) / scale if scale else 0.0
            moves[name] = max(moves.get(name, 0.0), error if math.isfinite(error) else math.inf)
        for name in alone.moves.keys() - rank.moves.keys():
            moves[name] = math.inf
    at = max(moves, key=lambda name: moves[name])
    return Worst(
        loss=max(_relative(rank.losses, alone.losses) for rank in ranks),
        norm=max(_relative(rank.norms, alone.norms) for rank in ranks),
        move=moves[at],
        parameter=at,
    )


def _relative(mine: list[float], truth: list[float]) -> float:
    found = [abs(a - b) / abs(b) if math.isfinite(a) and b else math.inf for a, b in zip(mine, truth, strict=True)]
    return max(found)
