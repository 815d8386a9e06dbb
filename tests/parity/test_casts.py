"""Weights that one process casts as it uses them: bit for bit what `fully_shard` computes with on one rank."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import weight_norm as new_weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.plan.ranks.engines import casts_weights, uses_fully_shard
from shardwise.plan.repair import change
from tests.parity import grid, moe_models

ROWS, WIDTH = 4, 16


class Remembering(nn.Module):
    """An LSTM, which keeps its weights in a list of its own too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lstm(x)[0]


class Recurrent(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean((1, 2))


class Vocoder(nn.Module):
    """Blocks whose own hooks, or parametrizations, make their weights."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.ModuleList(weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(3))
        self.new = nn.ModuleList(new_weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.old, *self.new):
            x = x + layer(x).relu()
        return x.mean((1, 2))


class Shared(nn.Module):
    """Parameters of the root, one without dims, one unused; a tied table that others read; batch norms; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))
        self.gate, self.table = nn.Parameter(torch.ones(())), nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((WIDTH,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x.mean(1))
        for layer in self.layers:
            x = x + layer(x) * self.gate
        return (self.tied(x) @ self.table.weight * self.scale.to(x.dtype)).sum(1)


class Repeated(nn.Module):
    """A block that runs its inside again in the backward pass: modules and a parameter of its own, or bare products."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gamma, self.reentrant, self.bare = (
            nn.Parameter(torch.full((WIDTH,), 0.5)),
            how == "reentrant",
            how == "bare",
        )

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        if self.bare:
            return functional.linear(functional.linear(x, self.up.weight).relu(), self.down.weight) * self.gamma
        return self.down(self.up(self.norm(x)).relu()) * self.gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=self.reentrant)


class Repeating(nn.Module):
    """Three such blocks, and a head that is run again too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Repeated(how) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return checkpoint(lambda y: self.head(y).mean((1, 2)), x, use_reentrant=False)


OWN: dict[str, Callable[[], nn.Module]] = {"recurrent": Recurrent, "vocoder": Vocoder, "shared": Shared}
OWN |= {f"repeating-{how}": partial(Repeating, how) for how in ("new", "reentrant", "bare")}
CASES = [
    ("decoder", "bf16"),
    ("decoder", "fp16"),
    ("decoder", "bf16 / mb2"),
    ("decoder", "bf16 / recompute=blocks"),
    ("decoder", "bf16 / recompute=ops / mb2"),
    ("decoder", "bf16 / wrap=500"),
    ("decoder", "bf16 precision=layers.*.attn_norm:fp32,layers.1:fp32"),
    ("decoder", "fp32 precision=layers.0.ffn:bf16"),
    ("gpt", "bf16 / offload=activations"),
    ("moe", "bf16 / recompute=blocks"),
    ("recurrent", "bf16"),
    ("recurrent", "bf16 / recompute=blocks"),
    ("vocoder", "bf16"),
    ("vocoder", "bf16 blocks=old.*"),
    ("vocoder", "bf16 / recompute=blocks blocks=new.*"),
    ("shared", "bf16 / mb2"),
    ("repeating-new", "bf16 / mb2"),
    ("repeating-new", "bf16 / recompute=blocks"),
    ("repeating-reentrant", "bf16"),
    ("repeating-bare", "bf16"),
]


def gradients(model: str, plan: sw.Plan) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of two steps, the gradients of the second, and the units of `fully_shard`."""
    generator = torch.Generator().manual_seed(1)
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # a reentrant checkpoint, while read
        factory = OWN.get(model) or {**grid.MODELS, "moe": moe_models.MODELS["softmax"]}[model]
        placed = sw.apply(factory, plan, mesh, seed=0)
        state = sw.TrainState(placed, sw.sgd(placed, lr=1e-3))
        trace = grid.Trace()
        grid.spy_on_gradients(state, trace)
        if model in OWN:
            batch: Any = torch.randn(ROWS, WIDTH, WIDTH, generator=generator)
            step = sw.make_step(state, lambda output, _: sw.Loss(output.float().square().sum(), ROWS))
        else:
            batch = {"input_ids": torch.randint(60, (ROWS, 9), generator=generator)}
            batch["labels"] = batch["input_ids"]
            step = sw.make_step(state, lambda output, batch: grid.loss_fn(getattr(output, "logits", output), batch))
        losses = [step(batch).loss for _ in range(2)]
        units = sum(isinstance(module, FSDPModule) for module in placed.parts[0].run.modules())
    return losses, trace.grads[-1], units


def both(model: str, text: str) -> None:
    plan = sw.Plan.parse(f"dp1 / {text}")
    held = change(plan, zero=1)
    assert casts_weights(plan)
    assert uses_fully_shard(held)
    losses, ours, units = gradients(model, plan)
    truth, theirs, others = gradients(model, held)
    assert not units
    assert others
    assert losses == truth
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.share(2)
@pytest.mark.parametrize(("model", "text"), CASES)
def test_equal_bits(world, model: str, text: str) -> None:
    world(1, both, model, text)


def failed_backward() -> None:
    """A backward pass that does not come to its end leaves casts in the place of parameters, until the next forward."""
    plan, failing = sw.Plan.parse("dp1 / bf16"), [False]

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        if failing[0]:
            raise ValueError("on purpose")
        return gradient

    def hooked(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    with sw.open_mesh(plan) as mesh:
        placed = sw.apply(OWN["repeating-new"], plan, mesh, seed=0)
        state = sw.TrainState(placed, sw.sgd(placed, lr=1e-3))
        rows = torch.randn(ROWS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))

        def loss_fn(output: torch.Tensor, _: Any) -> sw.Loss:
            return sw.Loss(output.float().square().sum(), ROWS)

        step = sw.make_step(state, loss_fn)
        placed.parts[0].root.first.register_forward_hook(hooked)
        step(rows)
        expected = step.measure(rows)
        failing[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            step(rows)
        failing[0] = False
        assert step.measure(rows) == expected
        assert all(p.dtype == torch.float32 and p.is_leaf for p in placed.parts[0].root.parameters())


def test_a_backward_pass_that_fails_leaves_no_casts(world) -> None:
    world(1, failed_backward)


def compiled_root() -> list[float]:
    plan = sw.Plan.parse("dp1 / bf16 / compile")
    with sw.open_mesh(plan) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own imports
        placed = sw.apply(OWN["repeating-new"], plan, mesh, seed=0)
        state = sw.TrainState(placed, sw.sgd(placed, lr=1e-3))
        rows = torch.randn(ROWS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        step = sw.make_step(state, lambda output, _: sw.Loss(output.float().square().sum(), ROWS))
        return [step(rows).loss for _ in range(2)]


@pytest.mark.soak
def test_the_head_of_a_compiled_model_is_run_again(world) -> None:
    world.preload("torch._inductor.codegen.triton")
    first, second = world(1, compiled_root)[0]
    assert second < first


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Unused(nn.Module):
    """Many small weights, of which forward leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.spare = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(8)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = x + norm(x)
        return x


def test_small_weights_are_cast_together_and_one_that_is_not_used_has_no_gradient() -> None:
    with sw.open_mesh(sw.Plan.parse("bf16")) as mesh:
        placed = sw.apply(Unused, sw.Plan.parse("bf16"), mesh, seed=0)
        with _Counting() as mode:
            placed.module(torch.randn(ROWS, WIDTH)).sum().backward()
        grads = {name: parameter.grad for name, parameter in placed.named_parameters().items()}
        assert grads.pop("spare") is None and all(grad.dtype == torch.float32 and grad.any() for grad in grads.values())
        assert (
            mode.calls["_foreach_copy_"] == 16 and mode.calls["_to_copy"] == 2
        )  # of eight units there and back; input, lone weight
