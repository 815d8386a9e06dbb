"""`module_step`: a step of a user's module on one process, without values, as `model.module_step` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.diagnose.brought import aside, on_meta
from shardwise.diagnose.tracing.module import FAILURES, rows_of, training_of_module
from shardwise.errors import ModelError
from shardwise.model.copies import cpu_copy
from shardwise.model.module_step import BEFORE, EVERYWHERE, Event, Held, ModuleStep, Norm, Passed
from shardwise.model.nested import at, put
from shardwise.model.seen import (
    Draws,
    added_to_loss,
    as_with_values,
    cast_inputs,
    taken_by_loss,
    why_not,
    without_tracebacks,
)
from shardwise.model.standin import LossOf
from shardwise.model.torch_private import fake_tensors
from shardwise.model.tracer import AFTER, BETWEEN, Chain, meta_copy, tensors_in, trace_chain
from shardwise.model.tracer import BEFORE as AHEAD
from shardwise.parallel.compose import blocks_of_plan
from shardwise.parallel.engines.units import modules_by_size
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.layers.batchnorm import BatchNorm, prepare_sync_norms
from shardwise.parallel.placed import Batch
from shardwise.parallel.precision import compute_type
from shardwise.parallel.randomness.sites import find_sites
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload


@aside
def module_step(factory: Callable[[], nn.Module], plan: Plan, workload: Workload) -> ModuleStep:
    """What one micro-batch of a rank does in a module.

    Args:
        factory: makes it.
        plan: how many rows a micro-batch has, the type, and the blocks; with stages, where they are cut.
        workload: length and global batch of samples.

    Raises:
        ModelError: its step does not run without values, or is none whose messages follow from its blocks.

    Cost: one step on shapes; with stages a forward on meta too.
    """
    module = on_meta(factory)
    training = training_of_module(factory, workload)
    try:
        return _Recorder(module, plan).step(training.sample, workload)
    except FAILURES as error:
        raise ModelError(f"no step of the module runs without values: {why_not(module, error)}") from error


class _Recorder:
    """Sees one step."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.plan, self.dtype = plan, compute_type(plan, "", {})
        self.source, self.blocks = module, blocks_of_plan(module, plan)
        self.units = self.blocks
        if plan.wrap_min_params:
            paths = {inner: name for name, inner in module.named_modules()}
            self.units = tuple(paths[inner] for inner in modules_by_size(module, plan.wrap_min_params)[0])
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        self.norms: list[list[int]] = []
        """Place, channels, passes forward and backward."""
        self.norms_ahead = -1
        """How many there were when the last block returned; below 0: none has."""
        self.ready: list[nn.Parameter] = []
        self.passed: dict[int, tuple[Passed, ...]] = {}
        self.inside: list[int] = []
        self.goes_back = False
        """The forward pass is over."""
        self.chain: Chain | None = None

    def step(self, sample: Batch, workload: Workload) -> ModuleStep:
        """Run it.

        Raises:
            ModelError: the forward is no chain of blocks where stages need one, or calls blocks in its backward pass.
        """
        plan, signature = self.plan, Signature.of(self.source)
        if plan.axes.pp > 1:
            self.chain = trace_chain(meta_copy(self.source), *model_inputs(sample, signature), self.blocks)
        rows = workload.global_batch // (plan.axes.data * plan.batch.micro_batches)
        with torch.device("meta"):
            batch = model_inputs(rows_of(sample, rows), signature)
        draws = bool(find_sites(meta_copy(self.source), batch, rows).modules)
        with ExitStack() as stack:
            for each in (without_tracebacks(), fake_tensors(), as_with_values(), torch.device("cpu")):
                stack.enter_context(each)
            module = cpu_copy(self.source, self.dtype)
            prepare_sync_norms(module)
            for hook in self._hooks(module):
                stack.callback(hook.remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(Draws())
            stack.enter_context(_Ungrouped())
            args, kwargs = self._cast(model_inputs(rows_of(sample, rows), signature))
            output = module(*args, **kwargs)
            values, self.goes_back = taken_by_loss(output), True
            if values is None or not values.requires_grad:
                raise ModelError("the forward of the module returned no floating tensor that a loss could take")
            loss_of: Any = LossOf.apply  # torch does not annotate it
            torch.autograd.backward([loss_of(values), *added_to_loss(output)])
            return replace(self._found(module), draws=draws)

    def _cast(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        floating = {path: t.to(self.dtype) for path, t in tensors_in(inputs) if t.is_floating_point()}
        cast: tuple[tuple[Any, ...], dict[str, Any]] = put(inputs, floating)
        return cast

    # ------------------------------------------------------------ hooks

    def _hooks(self, module: nn.Module) -> Iterator[Any]:
        for number, name in enumerate(self.blocks):
            block = module.get_submodule(name)
            yield block.register_forward_pre_hook(partial(self._given, number), with_kwargs=True)
            yield block.register_forward_hook(self._left)
        for number, name in enumerate(self.units):
            unit = module.get_submodule(name)
            if self.plan.mixed:
                yield unit.register_forward_pre_hook(partial(cast_inputs, self.dtype), with_kwargs=True)
            yield unit.register_forward_pre_hook(partial(self._called, number), with_kwargs=True)
            yield unit.register_forward_hook(partial(self._returned, number))
        for inner in module.modules():
            if isinstance(inner, BatchNorm):
                yield inner.register_forward_hook(self._normed)
        for parameter in module.parameters():
            if parameter.requires_grad:
                add: Any = parameter.register_post_accumulate_grad_hook  # torch does not annotate it
                yield add(self._has_gradient)

    def _given(self, number: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Where the forward is, and what a stage would be sent, as it is before it is cast."""
        self.inside.append(number)
        if self.chain is not None and number:
            given = {"args": args, "kwargs": kwargs}
            tensors = [at(given, path) for path in self.chain.links[number - 1].inputs]
            self.passed[number - 1] = tuple(Passed(t.nbytes, t.is_floating_point()) for t in tensors)

    def _left(self, block: nn.Module, given: object, output: object) -> None:
        self.inside.pop()
        self.norms_ahead = len(self.norms)

    def _called(self, number: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.goes_back:
            raise ModelError(f"the forward of the module recomputes {self.units[number]} by itself")
        self.forward.append(Event("call", number))
        asked = {path: t for path, t in tensors_in((args, kwargs)) if t.requires_grad}
        if not asked:
            return None
        mark: Any = _Done.apply  # torch does not annotate it
        marked = mark(partial(self.backward.append, Event("done", number)), *asked.values())
        return put((args, kwargs), dict(zip(asked, marked, strict=True)))

    def _returned(self, number: int, unit: nn.Module, given: object, output: object) -> None:
        self.forward.append(Event("return", number))
        for _, tensor in tensors_in(output):
            if tensor.requires_grad:
                hook: Any = tensor.register_hook  # torch does not annotate it
                hook(partial(self._back, number))

    def _back(self, number: int, gradient: object) -> None:
        self.backward.append(Event("back", number))

    def _normed(self, norm: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not (norm.training or norm.running_mean is None):
            return
        outside = BEFORE if self.norms_ahead < 0 else EVERYWHERE
        called = [self.inside[-1] if self.inside else outside, given[0].shape[1], 1, 0]
        self.norms.append(called)
        if output.requires_grad:
            hook: Any = output.register_hook  # torch does not annotate it
            hook(partial(self._norm_back, called))

    def _norm_back(self, called: list[int], gradient: object) -> None:
        called[3] += 1

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ModelError(why_not(self.source, RuntimeError("a gradient is sparse")))
        self.ready.append(parameter)

    # ------------------------------------------------------------ the answer

    def _found(self, module: nn.Module) -> ModuleStep:
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        number = {id(parameter): i for i, parameter in enumerate(names)}
        for norm in self.norms[self.norms_ahead :] if self.norms_ahead >= 0 else ():
            norm[0] = len(self.blocks)  # behind the last one
        return ModuleStep(
            blocks=self.blocks,
            units=self.units,
            held=tuple(
                Held(tuple(own), tuple(p.shape), p.requires_grad, self._places(own)) for p, own in names.items()
            ),
            ready=tuple(dict.fromkeys(number[id(parameter)] for parameter in self.ready)),
            forward=tuple(self.forward),
            backward=tuple(self.backward),
            norms=tuple(Norm(*norm) for norm in self.norms),
            costs=self._costs(),
            passed=tuple(self.passed[i] for i in range(len(self.passed))),
        )

    def _places(self, names: list[str]) -> tuple[int, ...]:
        """Blocks that use a parameter; without stages, nobody asks."""
        if self.chain is None:
            return (BEFORE,)
        found = {place for name in names for place in self._places_of(name)}
        return tuple(sorted(found))

    def _places_of(self, name: str) -> list[int]:
        assert self.chain is not None
        number = {block: i for i, block in enumerate(self.blocks)}
        own = next((i for block, i in number.items() if name.startswith(f"{block}.")), None)
        known = number | {AHEAD: BEFORE, AFTER: len(self.blocks), BETWEEN: EVERYWHERE}
        used = [known[phase] for phase in self.chain.phases.get(name, ())]
        return used or [own if own is not None else self._by_registration(name)]

    def _by_registration(self, name: str) -> int:
        """The place of what no forward uses: before the blocks if it is registered before them."""
        order = [each for each, _ in self.source.named_parameters(remove_duplicate=False)]
        ahead = order[: order.index(name)]
        has_block = any(each.startswith(f"{block}.") for each in ahead for block in self.blocks)
        return len(self.blocks) if has_block else BEFORE

    def _costs(self) -> tuple[int, ...]:
        """As a pipeline is cut by them: the ends count on the first and the last block."""
        if self.chain is None:
            return ()
        flops = self.chain.flops
        own = [flops.get(block, 0) for block in self.blocks]
        own[0] += flops.get(AHEAD, 0)
        own[-1] += flops.get(AFTER, 0)
        return tuple(own)


class _Ungrouped(TorchFunctionMode):
    """Rows that experts share out meet one of them all: on shapes torch knows products by group in bf16 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").strip("_") == "grouped_mm" and (args[0].dim(), args[1].dim()) == (2, 3):
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


class _Done(torch.autograd.Function):
    """Says when all gradients of a block's inputs are there, as `fully_shard` sees it."""

    @staticmethod
    def forward(ctx: Any, say: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.say = say
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.say()
        return None, *grads
