"""One stage of a pipeline: the user's own module with what belongs to other stages taken out.

The module keeps its class, its forward and its names. Blocks of other stages become pass-throughs without
parameters; a parameter that is used before the blocks is on the first stage only, one used after them on the last.
Forward runs on every stage as it is written, so that masks, positions and rotary tables, which each stage needs,
are made where they are used; the pass-through in front of a stage's first block gives what was received, and the
one behind its last block ends the forward there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError, ShardwiseError
from shardwise.model.nested import at, put
from shardwise.model.tracer import Chain, copy_module, tensors_in, without_gradients
from shardwise.parallel.placed import RandomKeys
from shardwise.parallel.torch_private import in_checkpoint


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which part of a model a stage is: its blocks, and the names that it keeps or loses."""

    stage: int
    num_stages: int
    first: int
    """Index of the first block of this stage."""
    last: int
    """Index of the last block of this stage."""
    blocks: tuple[str, ...]
    """Names of all blocks of the model."""
    elsewhere: frozenset[str]
    """Parameters and written buffers outside of the blocks that belong to other stages."""

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.stage == self.num_stages - 1


@dataclass
class Wiring:
    """What a stage's pass-throughs share: the traced chain, and what was received for the running micro-batch."""

    chain: Chain | None = None
    received: tuple[torch.Tensor, ...] = ()
    is_running: bool = False
    """The pipeline runs the stage's forward; a script may call the module by itself."""


@dataclass
class Feed:
    """What the last stage needs beside the model's inputs: the micro-batches of the running call, and the loss."""

    micro_batches: list[Any] = field(default_factory=list)
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    first: int = 0
    """Number in the call of the first micro-batch of the running flush."""
    stride: int = 1

    def number(self, index: int) -> int:
        """Number in the call of micro-batch `index` of the running flush."""
        return self.first + self.stride * index


class StageDone(BaseException):  # no error: it leaves a forward, past any `except Exception` in it
    """Ends the forward of a stage behind its last block, with the tensors that go on to the next stage."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        super().__init__("the stage's blocks are done")
        self.tensors = tensors


def called_alone(what: str) -> ModelError:
    """What is said of a stage, or a block of another one, that the pipeline does not call."""
    return ModelError(
        f"{what} was called by itself: found a call of the module, or of a method, by the script (in a loss function, "
        "or between steps), or a checkpoint around several blocks that runs again; needed: sw.evaluate or sw.generate "
        "between steps, a forward that returns all that the loss takes, what a teacher says as data of the batch, "
        "checkpoints within blocks (recompute=blocks), or a plan with pp1",
        row="module.called-by-parts",
    )


class NotOfStageError(ShardwiseError, AttributeError):
    """What a script, or forward, asks of a layer whose parameters are on another stage."""

    def __init__(self, where: str, name: str) -> None:
        super().__init__(
            f"{where}.{name}: not on this rank, found a layer of another stage of the pipeline, of which there are "
            "its plain attributes alone; needed: what changes layers (prune, weight_norm, parametrizations, hooks) in "
            "the model's constructor, weights by name (`for name, p in placed.named_parameters().items()`, those of "
            "this stage), or a plan without pp"
        )


class _Outline(SimpleNamespace):
    """Of a module that is elsewhere: its plain attributes, and in place of the modules in it theirs."""

    def __init__(self, module: nn.Module, where: str) -> None:
        plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, torch.Tensor)}
        inner = {name: _Outline(child, f"{where}.{name}") for name, child in module.named_children()}
        super().__init__(**{k: v for k, v in plain.items() if k not in ("training", "forward")} | inner)
        self.__dict__["_where"] = where

    def __getattr__(self, name: str) -> Any:
        """What it has not."""
        raise NotOfStageError(self.__dict__.get("_where", "a layer"), name)


class PassThrough(nn.Module):
    """Stands for a block of another stage, with the same plain attributes, its modules' too, and no parameters."""

    def __init__(self, block: nn.Module, index: int, cut: Cut, wiring: Wiring) -> None:
        super().__init__()
        for name, value in vars(_Outline(block, cut.blocks[index])).items():
            setattr(self, name, value)
        self.block_class, self.block_index, self.cut, self.wiring = type(block), index, cut, wiring

    def __getattr__(self, name: str) -> Any:
        """Attributes of the block's class, as a constant that forward looks at."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(block_class := self.__dict__["block_class"], name):
                return getattr(block_class, name)
            raise NotOfStageError(self.__dict__.get("_where", "a block"), name) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Without hooks: those that a script has put on the block since `apply` are for the rank that computes it."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would return, with the received tensors in it; or the end of this stage's forward."""
        chain, index = self.wiring.chain, self.block_index
        if chain is None or not self.wiring.is_running:
            raise called_alone(f"{self.cut.blocks[index]}, which is on another pipeline stage,")
        if index > self.cut.last:
            arguments = {"args": args, "kwargs": kwargs}
            raise StageDone(tuple(at(arguments, path) for path in chain.links[index - 1].inputs))
        received = self.wiring.received
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in received):
            raise without_gradients(self.cut.blocks[index])
        # only the last of them is used; the ones before it may be of other shapes, and nothing looks at them
        paths = chain.links[index].outputs
        return put(chain.forms[index], {path: received[min(i, len(received) - 1)] for i, path in enumerate(paths)})

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"{self.block_class.__name__} of another pipeline stage"


class StageModule(nn.Module):
    """What a pipeline's schedule calls: received tensors in, tensors for the next stage or the loss out."""

    def __init__(self, root: nn.Module, cut: Cut, wiring: Wiring, randomness: RandomKeys | None = None) -> None:
        super().__init__()
        self.root, self.randomness = root, randomness
        self.cut, self.wiring, self.feed = cut, wiring, Feed()
        self.recomputed: tuple[str, ...] = ()
        """Names of the blocks whose activations are recomputed."""
        self._repeated: dict[nn.Module, None] = {}

    def watch_repeats(self) -> None:
        """Learn, when modules run, which of them run inside of a checkpoint of the user's own."""
        for module in self.root.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._watch)

    def _watch(self, module: nn.Module, args: object) -> None:
        if in_checkpoint():
            self._repeated[module] = None

    def weights_at_once(self) -> list[nn.Parameter]:
        """Those of what is recomputed: a backward in two parts would recompute it anew for each of its weights."""
        found = [weight for name in self.recomputed for weight in self.root.get_submodule(name).parameters()]
        return found + [weight for module in self._repeated for weight in module.parameters(recurse=False)]

    def forward(
        self, *received: torch.Tensor, index: int = 0, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> Any:
        """Run the user's forward on micro-batch `index`, as far as this stage goes.

        Args:
            received: what the stage before gave; on the first stage nothing that matters.
            index: number of the micro-batch in the running flush.
            inputs: positional and keyword arguments of the user's forward, the same on every stage.

        Returns:
            A tuple of contiguous tensors for the next stage; on the last stage the 0-dim loss.
        """
        if inputs is None:
            raise called_alone("a pipeline's stage")
        if self.cut.stage:
            self.wiring.received = tuple(_own(tensor) for tensor in received)
        self.wiring.is_running = True
        try:
            randomness = self.randomness if self.training else None
            with randomness.at(self.feed.number(index)) if randomness is not None else nullcontext():
                output = self.root(*inputs[0], **inputs[1])
        except StageDone as done:
            return tuple(self._sendable(tensor) for tensor in done.tensors)
        finally:
            self.wiring.received, self.wiring.is_running = (), False
        if not self.cut.is_last:
            raise ModelError(
                f"pipeline stage {self.cut.stage}: forward returned without calling "
                f"{self.cut.blocks[self.cut.last + 1]}, which the traced forward did call; forward must call its "
                "blocks in every micro-batch"
            )
        assert self.feed.loss_fn is not None
        return _own(self.feed.loss_fn(output, self.feed.micro_batches[self.feed.number(index)]))

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            raise ModelError(
                f"pipeline stage {self.cut.stage}: {self.cut.blocks[self.cut.last]} returns a DTensor "
                f"({tensor.placements}); blocks at a stage boundary must return plain tensors: let the last layer of "
                "the block give its local output (use_local_output=True)"
            )
        return _own(tensor.contiguous())  # contiguous: what the transport needs


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same data as a tensor that is neither a leaf nor a view, with a contiguous gradient.

    Blocks may write to a received tensor in place, which a leaf forbids; torch detaches what a stage sent in
    place, which a view forbids; a gradient is sent as it is.
    """
    return cast(torch.Tensor, _Own.apply(tensor))  # type: ignore[no-untyped-call]  # torch has no types here


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()


def prune(
    root: nn.Module, cut: Cut, wiring: Wiring, device: torch.device, types: Mapping[str, torch.dtype] | None = None
) -> nn.Module:
    """A copy of a module with only one stage's parameters: the same objects, under the same names.

    Args:
        root: the whole module, meta or real; it is not changed.
        cut: what stays.
        wiring: shared by the pass-throughs.
        device: where the zeros live that stand for parameters of other stages (one number each).
        types: of such zeros, by name, where mixed precision computes in another type than a parameter has; nothing
            casts them later, as they are no parameters.

    Raises:
        ModelError: the module's structure cannot be copied.
    """
    stage = copy_module(root, {id(t): t for t in (*root.parameters(), *root.buffers())})
    for index, name in enumerate(cut.blocks):
        if not cut.first <= index <= cut.last:
            _replace(stage, name, PassThrough(stage.get_submodule(name), index, cut, wiring))
    for name in sorted(cut.elsewhere):
        path, _, last = name.rpartition(".")
        owner = stage.get_submodule(path)
        tensor = cast(torch.Tensor, getattr(owner, last))
        delattr(owner, last)
        zeros = torch.zeros((), dtype=(types or {}).get(name, tensor.dtype), device=device).expand(tensor.shape)
        setattr(owner, last, zeros.clone() if not isinstance(tensor, nn.Parameter) else zeros)
    return stage


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, new)


def signature_of(inputs: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """Paths, shapes and types of the tensors in each micro-batch's inputs: equal ones can share buffers."""
    return tuple(tuple((path, tuple(t.shape), t.dtype) for path, t in tensors_in(x)) for x in inputs)
