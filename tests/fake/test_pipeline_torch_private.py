"""What `parallel` takes from torch's pipelines is still there, and still means what it meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime
from torch.utils.checkpoint import checkpoint

from shardwise.parallel.engines.unused_torch_private import SUMS_APART, FSDPParam
from shardwise.parallel.module_torch_private import (
    copy_together,
    has_forward_pre_hook,
    hook_first,
    in_transform,
    map_tensors,
    put_parameter,
)
from shardwise.parallel.stages.backward_torch_private import backward_to_inputs, backward_to_weights
from shardwise.parallel.stages.pipeline_torch_private import SCHEDULE_CLASSES, Stage
from shardwise.parallel.torch_private import behind_backward, in_backward, saving_hook
from shardwise.plan.plan import LOOPED, SCHEDULES
from tests.fake.torch_orders import schedule_order


def test_a_transform_of_torch_func_is_seen() -> None:
    seen = list[bool]()

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_transform())
        return x.sum()

    one = torch.ones(2)
    torch.func.grad(function)(one), torch.vmap(function)(one[None]), function(one)
    assert seen == [True, True, False]


def test_every_kind_has_torchs_class() -> None:
    assert set(SCHEDULE_CLASSES) == set(SCHEDULES)
    for kind, schedule in SCHEDULE_CLASSES.items():
        base = _PipelineScheduleRuntime if kind in LOOPED else PipelineScheduleSingle
        assert issubclass(schedule, base)
        assert {"loss_fn", "scale_grads", "n_microbatches"} <= set(inspect.signature(schedule).parameters)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_run_schedule_can_call_it(kind: str) -> None:
    names = list(inspect.signature(SCHEDULE_CLASSES[kind]._step_microbatches).parameters)
    assert names[:6] == ["self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"]


def test_a_stage_has_what_run_schedule_sets() -> None:
    assert isinstance(inspect.getattr_static(PipelineStage, "has_backward"), property)
    assert callable(PipelineStage.clear_runtime_states)
    assert {"input_args", "output_args", "group"} <= set(inspect.signature(PipelineStage).parameters)


def test_a_stage_holds_what_it_sent_for_its_backward() -> None:
    """On torch 2.15, whose own lets go of it; before that nobody asks."""
    theirs = getattr(PipelineStage, "_output_slot_is_releasable", None)
    assert theirs is None or list(inspect.signature(theirs).parameters) == ["self", "output"]
    assert (theirs is None) == (torch.__version__ < "2.15")
    assert Stage._output_slot_is_releasable is not theirs


def test_where_fully_shard_adds_up_micro_batches() -> None:
    assert SUMS_APART == (torch.__version__ < "2.15") == hasattr(FSDPParam, "to_accumulated_grad_if_needed")
    assert SUMS_APART or hasattr(torch.zeros(1), "grad_dtype")


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_order_reads_every_action(kind: str) -> None:
    stages = 2 if kind in LOOPED else 1
    rows = [row for rank in schedule_order(kind, 2, stages, 4) for row in rank]
    assert {work for work, _, _ in rows} in ({"F", "B"}, {"F", "I", "W"}, {"F", "B", "I", "W"})
    assert sum(work == "F" for work, _, _ in rows) == 2 * stages * 4


class Twofold(torch.autograd.Function):
    """Two results of an input and a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight)
        return x @ weight, 3 * (x @ weight)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return (first + 3 * second) @ weight.T, x.T @ (first + 3 * second)


def one_after_the_other(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.linear(torch.tanh(F.linear(x, w, a)), w, b).sin(),)


def two_results(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = Twofold.apply(x + a, w)
    return first.sin() + (second * b).cos(), x.detach() * 2


def on_top(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Twofold.apply((x * a).sin() + b, w.tanh())


def without_input(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ w + a.exp(), (a * b).sin()


@pytest.mark.parametrize("forward", [one_after_the_other, two_results, on_top, without_input])
def test_a_divided_backward_is_the_whole_one(forward: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    torch.manual_seed(0)
    x, w, *biases = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (4, 4), (4,), (4,)))
    weights = [nn.Parameter(t) for t in (*biases, w)]  # a weight after its biases: torch joins their groups wrongly
    x.requires_grad_()
    outputs = forward(x, weights[2], weights[0], weights[1])
    gradients = [torch.randn_like(tensor) for tensor in outputs]
    torch.autograd.backward(
        *zip(*((t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad), strict=True)
    )
    expected = [tensor.grad for tensor in (x, *weights)]
    for tensor in (x, *weights):
        tensor.grad = None
    outputs = forward(x, weights[2], weights[0], weights[1])
    found, groups = backward_to_inputs(outputs, gradients, [torch.ones(1), x, 3], weights)
    assert found[0] is None and found[1] is x.grad and found[2] is None and len(found) == 3
    assert all(weight.grad is None for weight in weights) and not any(tensor.requires_grad for tensor in outputs)
    del outputs
    backward_to_weights(weights, groups)
    for tensor, gradient in zip((x, *weights), expected, strict=True):
        assert torch.allclose(tensor.grad, gradient, rtol=1e-12, atol=0)


def test_a_hook_that_is_put_first_runs_first() -> None:
    linear, seen = nn.Linear(2, 2), []
    second = linear.register_forward_pre_hook(lambda *_: seen.append("second"))
    hook_first(linear, lambda *_: seen.append("first"))
    linear(torch.ones(2))
    second.remove()
    linear(torch.ones(2))
    assert seen == ["first", "second", "first"]
    assert list(linear._forward_pre_hooks) == list(dict.keys(linear._forward_pre_hooks))
    assert has_forward_pre_hook(linear) and not has_forward_pre_hook(nn.Linear(2, 2))


def test_tensors_in_containers_are_mapped_as_fully_shard_does() -> None:
    assert map_tensors(lambda t: t + 1, {"a": [torch.ones(1), None, "b"], "c": (torch.zeros(1),)}) == {
        "a": [torch.full((1,), 2.0), None, "b"],
        "c": (torch.ones(1),),
    }


def test_tensors_are_copied_together_into_another_type() -> None:
    into = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros((), dtype=torch.bfloat16)]
    copy_together(into, [torch.tensor([1.0, 2.0]), torch.tensor(3.0)])
    assert [t.tolist() for t in into] == [[1.0, 2.0], 3.0]


def test_a_tensor_in_the_place_of_a_parameter_is_what_forward_reads() -> None:
    lstm, kept = nn.LSTM(2, 2), {}
    for key, parameter in [*lstm.named_parameters()]:
        kept[key] = parameter
        put_parameter(lstm, key, parameter.detach() * 0)
    assert not lstm(torch.ones(3, 1, 2))[0].any(), "an LSTM of zeros gives zeros"
    for key, parameter in kept.items():
        put_parameter(lstm, key, parameter)
    assert all(held is kept[key] for held, key in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True))
    assert lstm(torch.ones(3, 1, 2))[0].all()


def test_what_saves_tensors_and_where_a_backward_pass_is() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)

    def inside(y: torch.Tensor) -> torch.Tensor:
        seen.append(saving_hook())
        return y * 2

    output = checkpoint(inside, x, use_reentrant=False)
    assert saving_hook() is None and seen[0] is not None and not in_backward()
    output.register_hook(lambda _: behind_backward(lambda: seen.append("behind")) or seen.append(in_backward()))
    output.sum().backward()
    assert seen[1:] in ([True, "behind"], [True, seen[2], "behind"]) and not in_backward()
