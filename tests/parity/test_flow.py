"""What hooks and rules make of a rank's part, followed into weights: refused, or as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import World

RULES = {"layers.*.up": "column", "layers.*.down": "row"}
Hook = Callable[[torch.optim.Optimizer, sw.Mesh], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, is_small: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) if is_small else Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_the_largest(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    for p in parameters(optimizer):
        p.grad.copy_(p.grad / p.grad.abs().max())


def by_the_largest_anew(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    for p in parameters(optimizer):
        p.grad = p.grad / p.grad.abs().max()


def by_a_mean(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    for p in parameters(optimizer):
        scale = torch.zeros(2, dtype=p.dtype)
        scale[0] = (p.grad * p.grad).flatten().mean()
        p.grad.div_(scale.sum().sqrt() + 1e-3)


def by_all(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    total = sum(p.grad.square().sum() for p in parameters(optimizer)).sqrt()
    torch._foreach_mul_([p.grad for p in parameters(optimizer)], 0.1 / total)


def by_all_summed(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    """The same, of all ranks: the squares of each parameter are summed over those that have parts of it."""
    squares = sum(p.grad.square().sum() for p in parameters(optimizer))
    if mesh.world > 1:
        dist.all_reduce(squares)
    for p in parameters(optimizer):
        p.grad.mul_(0.1 / squares.sqrt())


def by_rows(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    for p in parameters(optimizer):
        if p.dim() > 1:
            p.grad.div_(p.grad.square().sum(1, keepdim=True).sqrt() + 1e-3)
        p.grad.add_(p.detach().sign(), alpha=1e-2)


class Climb(torch.optim.Optimizer):
    """A rule that divides by a norm of all gradients, as SAM does."""

    def __init__(self, params: Any, by: str = "all") -> None:
        super().__init__(params, {"lr": 0.1})
        self.by = by

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = parameters(self)
        if self.by.startswith("flat"):
            return self.flat(params)
        if self.by == "pairs":
            for first, second in zip(params[::2], params[1::2], strict=True):
                size = torch.stack([first.grad.norm(), second.grad.norm()]).norm()
                first.sub_(first.grad / size, alpha=0.1)
                second.sub_(second.grad / size, alpha=0.1)
            return None
        norms = [p.grad.norm() for p in params]
        number = sum(float(norm) ** 2 for norm in norms) ** 0.5 if self.by == "numbers" else 0.0
        for p, norm in zip(params, norms, strict=True):
            divisor = {"all": torch.stack(norms).norm(), "each": norm, "numbers": number}[self.by]
            p.sub_(p.grad / divisor, alpha=0.1)
        return None

    def flat(self, params: list[Any]) -> None:
        """All gradients as one vector, with a momentum, and of each slice its own norm; or one of the whole."""
        flat = torch.cat([p.grad.flatten() for p in params])
        state = self.state[params[0]]
        momentum = state.setdefault("flat", torch.zeros_like(flat)).mul_(0.9).add_(flat)
        moved, start = momentum / (momentum.abs() + 1.0), 0
        if self.by == "flat by all":
            moved = moved / momentum.norm()
        for p in params:
            piece = moved[start : start + p.numel()]
            start += p.numel()
            p.sub_((piece / (1 + piece.norm()) if self.by == "flat by each" else piece).view_as(p), alpha=0.1)


def noise_in_turn(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    generator = torch.Generator().manual_seed(7)
    for p in gradients_of(optimizer):
        p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.01)


def noise_anew(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            noise = 0.01 * torch.empty(p.grad.shape, dtype=p.dtype).normal_()
            p.grad = p.grad + noise


def noise_of_the_whole(optimizer: torch.optim.Optimizer, mesh: sw.Mesh) -> None:
    """Seeded for each, and this rank's rows of it."""
    for number, p in enumerate(gradients_of(optimizer)):
        rows = p.shape[0] * mesh.size("dp_shard")
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(rows, *p.shape[1:], generator=generator, dtype=p.dtype)
        p.add_(noise.tensor_split(mesh.size("dp_shard"))[mesh.rank % mesh.size("dp_shard")], alpha=0.01)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p.grad for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("hook", [noise_in_turn, noise_anew])
def test_noise_of_the_sizes_of_shards_or_of_one_stage_is_refused(world: World, hook: Hook) -> None:
    """Each rank drew what is of its shard, or the same as the other stage, without a word."""
    for text, part in (("fsdp2", "a shard"), ("pp2 / gpipe mb2", "one stage, after those for other weights")):
        for said in world(2, stepped, text, hook):
            assert isinstance(said, str) and f"of which this rank has {part}" in said


def test_noise_of_the_whole_is_as_in_one_process(world: World) -> None:
    (alone, _) = world(1, stepped, "dp1", noise_of_the_whole)[0]
    for weights, said in world(2, stepped, "fsdp2", noise_of_the_whole):
        assert not said
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def stepped(text: str, hook: Hook | None, rule: str = "") -> Any:
    """Parameters after three steps, and what was warned of; or what was said."""
    plan = sw.Plan.parse(f"{text} / fp64")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = sw.apply(lambda: Net(rule == "pairs"), plan, mesh, seed=1, rules=RULES if plan.axes.tp > 1 else None)
        optimizer: Any = Climb(placed.parameters(), rule) if rule else sw.sgd(placed, lr=0.1)
        if hook is not None:
            optimizer.torch.register_step_pre_hook(lambda torchs, *_: hook(torchs, mesh))
        step = sw.make_step(sw.TrainState(placed, optimizer), lambda out, x: sw.mean_over((out - x).square()))
        try:
            for i in range(3):
                rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                step(rows.tensor_split(mesh.batch.size)[mesh.batch.rank])
        except ModelError as error:
            return str(error)
        whole = {
            n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
            for n, p in placed.named_parameters().items()
        }
        return whole, [str(one.message) for one in caught if "pipeline" in str(one.message)]


@pytest.mark.parametrize("text", ["fsdp2", "tp2"])
@pytest.mark.parametrize("hook", [by_the_largest, by_the_largest_anew, by_a_mean, by_all])
def test_a_number_of_a_shard_that_goes_into_gradients_is_refused(world: World, text: str, hook: Hook) -> None:
    """Each rank stepped by another one, without a word: it begins with a product, or a sum."""
    for said in world(2, stepped, text, hook):
        assert isinstance(said, str) and "what is made of elements of layers." in said
        assert "of which this rank has a shard" in said


@pytest.mark.parametrize(
    ("text", "hook"),
    [
        ("fsdp2", by_all_summed),
        ("fsdp2", by_rows),
        ("pp2 / 1f1b mb2", by_all_summed),
        ("pp2 / 1f1b mb2", by_the_largest_anew),
        ("pp2 / 1f1b mb2", by_rows),
        ("dp2", by_all),
    ],
)
def test_what_is_of_the_whole_is_as_in_one_process(world: World, text: str, hook: Hook) -> None:
    (alone, _) = world(1, stepped, "dp1", hook)[0]
    for whole, said in world(2, stepped, text, hook):
        assert not said
        for name, value in whole.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-10, atol=1e-12)


def test_a_number_of_all_parameters_of_a_stage_is_refused(world: World) -> None:
    """A hook's, or a rule's: each stage stepped by its own, without a word."""
    for hook, rule in ((by_all, ""), (None, "all")):
        for said in world(2, stepped, "pp2 / 1f1b mb2", hook, rule):
            assert isinstance(said, str) and "what is made of all parameters of a group" in said


def test_a_number_of_each_parameter_is_its_own_under_a_pipeline(world: World) -> None:
    (alone, _) = world(1, stepped, "dp1", None, "each")[0]
    for whole, said in world(2, stepped, "pp2 / 1f1b mb2", None, "each"):
        assert not said
        assert all(torch.allclose(value, alone[name], rtol=1e-10, atol=1e-12) for name, value in whole.items())


def test_numbers_that_are_read_off_all_parameters_of_a_stage_are_warned_of(world: World) -> None:
    for _, said in world(2, stepped, "pp2 / 1f1b mb2", None, "numbers"):
        assert len(said) == 1 and "found a number that is read" in said[0]


@pytest.mark.parametrize("rule", ["flat", "flat by each"])
def test_a_rule_that_lays_all_gradients_side_by_side_is_as_in_one_process(world: World, rule: str) -> None:
    """It was refused, as if each number were of all of a stage."""
    (alone, _) = world(1, stepped, "dp1", None, rule)[0]
    for whole, said in world(2, stepped, "pp2 / 1f1b mb2", None, rule):
        assert not said
        assert all(torch.allclose(value, alone[name], rtol=1e-10, atol=1e-12) for name, value in whole.items())


def test_a_number_of_the_vector_of_all_gradients_is_refused(world: World) -> None:
    for said in world(2, stepped, "pp2 / 1f1b mb2", None, "flat by all"):
        assert isinstance(said, str) and "what is made of all parameters of a group" in said


def test_two_parameters_that_a_rule_pairs_are_warned_of_where_a_stage_has_no_more(world: World) -> None:
    """It was refused; whether pairs are meant, or all, a stage with two does not show."""
    (alone, _) = world(1, stepped, "dp1", None, "pairs")[0]
    for whole, said in world(2, stepped, "pp2 / 1f1b mb2", None, "pairs"):
        assert len(said) == 1 and "Two that belong together may be meant" in said[0]
        assert all(torch.allclose(value, alone[name], rtol=1e-10, atol=1e-12) for name, value in whole.items())
