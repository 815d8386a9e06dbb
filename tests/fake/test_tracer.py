from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.model.stacks import find_blocks
from shardwise.model.tracer import AFTER, BEFORE, Chain, meta_copy, trace_chain
from shardwise.parallel.stages.stage import Cut, PassThrough, Wiring

BLOCKS = ("layers.0", "layers.1", "layers.2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x) if extra is None else self.linear(x) + extra


class Model(nn.Module):
    """`course` is its forward between the embedding and the head."""

    def __init__(self, course: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.course = course
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.course(self, self.embed(ids), ids))


def trace(course: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Chain:
    return trace_chain(meta_copy(Model(course)), (torch.zeros(2, 3, dtype=torch.long),), {}, BLOCKS)


def straight(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def test_a_chain() -> None:
    chain = trace(straight)
    assert chain.phases["embed.weight"] == (BEFORE,)
    assert chain.phases["layers.1.linear.bias"] == ("layers.1",)
    assert chain.phases["head.weight"] == (AFTER,)
    assert not chain.shared and not chain.written
    assert [link.inputs for link in chain.links] == [(("args", 0),)] * 2
    assert chain.links[0].shapes == ((2, 3, 4),) and chain.links[0].dtypes == (torch.float32,)
    assert chain.flops["layers.0"] == 2 * 6 * 4 * 4 and chain.flops[AFTER] == 2 * 6 * 4 * 5


def test_tracing_leaves_the_module_as_it_was() -> None:
    model = Model(straight)
    before = {name: p.clone() for name, p in model.named_parameters()}
    copy = meta_copy(model)
    trace_chain(copy, (torch.zeros(2, 3, dtype=torch.long),), {}, BLOCKS)
    assert all(torch.equal(p, before[name]) and not p.is_meta for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in copy.modules())


# ---------------------------------------------------------------- what is allowed


def with_extras(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    extra = torch.arange(4) * torch.ones(4, device=ids.device).cumsum(0) + (ids > 0)[..., None]
    for layer in model.layers:
        if x.shape[-1] == model.head.weight.shape[-1]:  # looks at a shape: no use of the weight
            x = layer(x, extra=extra.to(x.dtype))
    return x


def writing(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    model.seen += 1
    return straight(model, x, ids)


def watching(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    norms = []
    for layer in model.layers:
        x = layer(x)
        norms.append(x.norm())
    return x


def checkpointed(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("course", [with_extras, writing, watching, checkpointed])
def test_chains_with_more_in_them(course: Any) -> None:
    chain = trace(course)
    assert len(chain.links) == 2 and chain.phases["head.weight"] == (AFTER,)
    assert chain.written == ({"seen"} if course is writing else set())


# ---------------------------------------------------------------- what is no chain


def twice(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return straight(model, model.layers[0](model.layers[0](x)), ids)


def backwards(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def one_left_out(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return model.layers[1](model.layers[0](x))


def residual_outside(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x


def in_place_outside(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
        x *= 0.5
    return x


def around_all(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return straight(model, x, ids) + x


def around_one(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](x)
    second = model.layers[1](first)
    return model.layers[2](second, first)


def all_hidden_states(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first = model.layers[0](x)
    second = model.layers[1](first)
    return model.layers[2](second) + first.mean()


def learnt_bias(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    bias = model.between.weight.sum(0)
    for layer in model.layers:
        x = layer(x, bias)
    return x


def looked_at(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As a diffusion transformer's blocks take the time: each as a view that it makes itself."""
    time = model.between(x)
    for layer in model.layers:
        layer.linear.register_forward_pre_hook(lambda m, args: args[0] + time[:, :1])
        x = layer(x, time)
    return x


def parameter_given(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x, model.between.bias)
    return x


def smuggled(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    model.layers[2].linear.register_forward_hook(lambda m, args, out: out + x)
    return straight(model, x, ids)


def values(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return straight(model, x if ids.max() > 3 else -x, ids)


def not_given(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        layer(x)
        x = torch.ones(2, 3, 4)
    return x


def reentrant(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


@pytest.mark.parametrize(
    ("course", "said"),
    [
        (reentrant, "forward calls layers.0 with gradients off"),
        (twice, "layers.0 is called after layers.0, expected layers.1"),
        (backwards, "layers.2 is called first, expected layers.0"),
        (one_left_out, "layers.2 was never called (2 of 3 blocks were)"),
        (residual_outside, "input 0 of layers.1 is not the output of layers.0; it is made "),
        (in_place_outside, "`mul_`, in place, between two blocks uses a tensor made in layers.0"),
        (around_all, "`add` in after the blocks uses a tensor made before the blocks from parameters"),
        (around_one, "input 1 of layers.2 is not the output of layers.1; it is made in layers.0"),
        (all_hidden_states, "`mean` in after the blocks uses a tensor made in layers.0"),
        (
            learnt_bias,
            "input 1 of layers.1 is not the output of layers.0; it is made before the blocks from parameters",
        ),
        (parameter_given, "input 1 of layers.1 is not the output of layers.0; it is a parameter"),
        (smuggled, "`add` in layers.2 uses a tensor made before the blocks"),
        (values, "failed without data (RuntimeError: "),
        (not_given, "no input of layers.1 is the output of layers.0, which returned 1 tensors"),
        (looked_at, "input 1 of layers.1 is not the output of layers.0; it is made before the blocks from parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_chain(course: Any, said: str) -> None:
    with pytest.raises(ModelError) as refused:
        trace(course)
    assert said in str(refused.value)
    assert "pp1" in str(refused.value) or course is values


def test_what_a_stage_received_is_not_given_to_a_forward_with_gradients_off() -> None:
    """Nor where the forward that was traced had them on: the stage before would train without a gradient."""
    names = ("layers.0", "layers.1", "layers.2")
    cut = Cut(stage=1, num_stages=2, first=1, last=2, blocks=names, elsewhere=frozenset())
    received = torch.zeros(2, 3, 4, requires_grad=True)
    stands_in = PassThrough(Block(), 0, cut, Wiring(trace(straight), (received,), is_running=True))
    assert stands_in(received) is received
    with torch.no_grad(), pytest.raises(ModelError, match="layers.0 with gradients off"):
        stands_in(received)


def test_a_shared_parameter_is_named() -> None:
    model = Model(lambda model, x, ids: straight(model, model.between(x), ids) @ model.between.weight)
    chain = trace_chain(meta_copy(model), (torch.zeros(2, 3, dtype=torch.long),), {}, BLOCKS)
    assert chain.shared == {"between.weight": (BEFORE, AFTER)}


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.parametrize(("keep", "refused"), [("last", False), ("first", True)])
def test_outputs_of_any_kind(keep: str, refused: bool) -> None:
    class Structured(Model):
        def forward(self, ids: torch.Tensor) -> Any:
            first = self.layers[0](self.embed(ids))
            last = self.layers[2](self.layers[1](first))
            return {"out": (Output(self.head(last), {"first": first, "last": last}[keep]), None)}

    model = meta_copy(Structured(straight))
    arguments = ((torch.zeros(2, 3, dtype=torch.long),), {}, BLOCKS)
    if refused:
        with pytest.raises(ModelError, match="output out.0.hidden of forward uses a tensor made in layers.0"):
            trace_chain(model, *arguments)
    else:
        assert trace_chain(model, *arguments)


class Returns(nn.Module):
    """A position bias made by the first block and handed on by each, beside a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        bias = self.linear.weight.sum(0) if bias is None else bias
        return self.linear(x) + bias, "constant", [bias]


def test_tuples_between_blocks() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Returns() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = None
            for layer in self.layers:
                x, _, (bias,) = layer(x, bias=bias)
            return x

    chain = trace_chain(meta_copy(Pairs()), (torch.zeros(2, 4),), {}, BLOCKS)
    assert chain.links[0].outputs == ((0,), (2, 0)) and chain.links[0].inputs == (("args", 0), ("kwargs", "bias"))
    assert chain.forms[0] == (None, "constant", [None])


# ---------------------------------------------------------------- find_blocks


def test_unlike_layers_in_turns_are_the_blocks() -> None:
    """Dense and sparse ones, not the experts of one, which not every rank calls; and not heads beside a body."""

    def sparse() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2))

    layers = nn.ModuleList([nn.Linear(8, 8), sparse(), nn.Bilinear(8, 8, 8), sparse()])
    model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "layers": layers, "head": nn.Linear(8, 9)})
    assert find_blocks(model) == tuple(f"layers.{i}" for i in range(4))
    heads = nn.ModuleList([nn.Linear(8, 2), nn.Bilinear(8, 8, 2)])
    with pytest.raises(ModelError, match="no ModuleList of unlike ones"):
        find_blocks(nn.ModuleDict({"body": nn.Linear(99, 99), "heads": heads}))
    with pytest.raises(ModelError, match="no ModuleList of unlike ones"):
        find_blocks(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(9, 9), nn.ReLU(), nn.Bilinear(9, 9, 9)])}))


def test_find_blocks() -> None:
    model = nn.ModuleDict(
        {
            "small": nn.ModuleList(nn.Linear(1, 1) for _ in range(9)),
            "large": nn.Sequential(*(nn.Linear(9, 9) for _ in range(3))),
            "mixed": nn.Sequential(nn.Linear(99, 99), nn.ReLU()),
        }
    )
    assert find_blocks(model) == ("large.0", "large.1", "large.2")
    assert find_blocks(model, "small.*")[-1] == "small.8"
    with pytest.raises(ModelError, match="matches no module of ModuleDict.*did you mean 'large"):
        find_blocks(model, "larg.*")
    with pytest.raises(ModelError, match="matches no module"):
        find_blocks(model, "*.*.weight")
    with pytest.raises(ModelError, match="has no ModuleList, ModuleDict or Sequential of two or more"):
        find_blocks(nn.Linear(2, 2))
