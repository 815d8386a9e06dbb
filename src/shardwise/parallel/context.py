"""`shard_context`: the sequence of each sample divided over the ranks of the `cp` axis.

Every rank of the axis holds all parameters that it would hold without it, and some tokens of each sequence. What works
on each token alone runs unchanged; attention sees the whole sequence (`ring.py`). Losses and gradients are sums over
the axis, as over the data axes.

    micro-batch --share--> this rank's tokens, with their positions --model--> logits of these tokens --loss--> a sum

A forward whose inputs did not come through `share`, as when text is drawn, runs on the whole sequence on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import ModelError
from shardwise.model.tracer import tensors_in
from shardwise.parallel.blocks import own_blocks
from shardwise.parallel.inputs import Signature, model_inputs
from shardwise.parallel.layers.tensor_hooks import wrap_forward
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.placed import Batch, Placed
from shardwise.parallel.sequence.intercept import Divided, Shapes, Watch
from shardwise.parallel.sequence.mixing import mixing_module
from shardwise.parallel.sequence.positions import counted_by, positions_name
from shardwise.parallel.sequence.ring import Ranks
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.sequence import Layout, divide, num_pieces

AXIS = "cp"
WHOLE = ("attention_mask", "document_ids", "segment_ids")
"""Inputs that describe a mask of the whole sequence, and are given whole."""


class ContextSplit:
    """What `shard_context` leaves in `placed.context`: divides micro-batches, and carries attention over the axis."""

    _layouts: ClassVar[MutableMapping[torch.Tensor, tuple[Layout, torch.Tensor]]] = WeakIdKeyDictionary()
    """A rank's part of a micro-batch's main input -> the layout of the whole, and its ids: of all models, as a teacher,
    which counts positions in its own way, is given the part of the one that it teaches."""

    def __init__(self, plan: Plan, mesh: Mesh, root: nn.Module) -> None:
        """`root` is the model with all of its modules."""
        self.balance, self.cp = plan.context.balance, mesh.size(AXIS)
        self.group, self.rank = mesh.group(AXIS), mesh.index(AXIS)
        self.model, self.signature = type(root).__name__, Signature.of(root)
        self.positions, self.count = positions_name(root), counted_by(root)
        self.divided = Divided(plan.context.kind)

    def share(self, batch: Batch) -> Batch:
        """This rank's tokens of every sequence of a micro-batch, and their positions.

        Divided are the tensors whose dim 1 is as long as that of the model's main input (its first one): tokens,
        labels, weights. `attention_mask`, `document_ids`, `segment_ids` and 4-dim masks stay whole. A dict gains the
        positions under the name that forward takes, unless it has them; with a tuple or a tensor they are given to
        forward directly.

        Raises:
            ModelError: the main input has no sequence dim, or one with fewer tokens than pieces.

        Cost: a copy of what stays here; no communication, no wait for the device.
        """
        main = self._main(batch)
        layout = self._layout(main)
        if isinstance(batch, torch.Tensor):
            part: Batch = self._part("", batch, layout)
        elif isinstance(batch, Mapping):
            part = {key: self._part(key, value, layout) for key, value in batch.items()}
            if self.positions not in part:
                part[self.positions] = self._numbers(layout, main)
        else:
            values = [self._part("", value, layout) for value in batch]
            part = type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
        is_ids = not main.is_floating_point()
        # of embeddings the shape alone is asked for, and they are many numbers
        self._layouts[self._main(part)] = layout, main if is_ids else main.new_empty((*main.shape[:2], 0))
        return part

    def _main(self, batch: Batch) -> torch.Tensor:
        """The model's first input that is a tensor of tokens."""
        args, kwargs = model_inputs(batch, self.signature)
        names = self.signature.names or tuple(kwargs)
        given = [*args, *(kwargs[name] for name in names if name in kwargs and name not in (*WHOLE, self.positions))]
        main = next((value for value in given if isinstance(value, torch.Tensor)), None)
        if main is None or main.dim() < 2:
            found = f"one of shape {tuple(main.shape)}" if main is not None else "none"
            raise ModelError(
                f"context parallelism: the first tensor that {self.model} takes of a micro-batch: found {found}, "
                "needed (batch, sequence, ...), whose sequence can be divided; change the batch, or use a plan with cp1"
            )
        return main

    def _layout(self, main: torch.Tensor) -> Layout:
        length, least = main.shape[1], num_pieces(self.cp, self.balance)
        if length < least:
            raise ModelError(
                f"context parallelism: a micro-batch with sequences of {length} tokens for {self.model}, needed at "
                f"least {least} (cp={self.cp}, balance={self.balance}); give longer sequences, or use a smaller cp"
            )
        return divide(length, self.cp, self.balance)

    def _part(self, key: str, value: Any, layout: Layout) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != layout.length or key in WHOLE:
            return value
        if value.dim() == 4 and value.shape[-2:] == (layout.length, layout.length):  # a mask, one per head
            return value
        return torch.cat([value[:, start:end] for start, end in layout.ranges[self.rank]], dim=1)

    def _numbers(self, layout: Layout, main: torch.Tensor) -> torch.Tensor:
        """Positions of this rank's tokens in the whole sequence: (batch, tokens) int64."""
        if self.count is not None:
            return cast(torch.Tensor, self._part("", self.count(main), layout))
        ranges = layout.ranges[self.rank]
        numbers = torch.cat([torch.arange(start, end, device=main.device) for start, end in ranges])
        return numbers.expand(main.shape[0], -1)

    def run_model(self, root: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of the whole model, or of a stage: in place of its own."""
        divided = self.divided
        main = self._shared(args, kwargs)
        if main is None:
            self._check_whole(root, args, kwargs)
            divided.ranks = None
            return forward(*args, **kwargs)
        layout, whole = self._layouts[main]
        divided.ranks, divided.rows = Ranks(self.group, self.rank, layout), main.shape[0]
        if self.positions not in kwargs:
            kwargs = {**kwargs, self.positions: self._numbers(layout, whole)}
        calls = divided.calls
        with Watch(divided):
            output = forward(*args, **kwargs)
        divided.check_calls(calls)
        tokens = (main.shape[0], layout.sizes[self.rank])
        if not any(tensor.shape[:2] == tokens for _, tensor in tensors_in(output)):
            shapes = [tuple(tensor.shape) for _, tensor in tensors_in(output)]
            raise divided.refusal(
                f"output of shape {', '.join(map(str, shapes)) or 'none'}",
                f"one value per token, {tokens} + ...: what is pooled over the sequence would be pooled over a part",
                row="module.mixes-tokens",
            )
        return output

    def _shared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return next((value for value in given if value in self._layouts), None)

    def _check_whole(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward on whole sequences is right where nothing is learnt: each rank would give the whole gradient."""
        shapes = {tensor.shape for tensor in self._layouts}
        copied = any(isinstance(value, torch.Tensor) and value.shape in shapes for value in (*args, *kwargs.values()))
        if copied or (root.training and torch.is_grad_enabled()):
            raise ModelError(
                f"context parallelism: {self.model} was called on a micro-batch that did not come through "
                f"placed.share (or was copied after it), needed: this rank's tokens (cp={self.cp}); call "
                "`batch = placed.share(batch)` before the model and the loss, as make_step does"
            )

    def run_block(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a block, in the forward pass and where backward computes it again."""
        divided = self.divided
        if divided.ranks is None:
            return forward(*args, **kwargs)
        outside, calls, divided.block = divided.block, divided.calls, name
        try:
            with nullcontext() if divided.watching else Watch(divided):
                output = forward(*args, **kwargs)
            divided.check_calls(calls)
        finally:
            divided.block = outside
        return output


def shard_context(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Divide sequences over the `cp` axis; no parameter is placed or changed.

    Raises:
        ModelError: the model's forward takes no positions, or a module of it mixes tokens in a way that has no parts.

    Cost: none here. Each attention: see `ring.py`; everything else works on 1/cp of the tokens.

    >>> placed = apply(GPT, Plan.parse("cp4 context=ulysses"), mesh)  # doctest: +SKIP
    """
    if plan.axes.cp == 1:
        return placed
    for part in placed.parts:
        mixing = mixing_module(part.root)
        if mixing is not None:
            name, module = mixing
            raise ModelError(
                f"context parallelism: {name or 'the model'} is a {type(module).__name__}, which mixes tokens of the "
                "sequence and cannot be split; needed: modules that work on each token alone, and attention by "
                "torch.nn.functional.scaled_dot_product_attention; change the model, or use a plan with cp1",
                row="module.mixes-tokens",
            )
    pipeline = placed.pipeline
    whole = pipeline.blueprint if isinstance(pipeline, Pipeline) else placed.parts[0].root
    context = ContextSplit(plan, mesh, whole)
    for part in placed.parts:
        wrap_forward(part.root, partial(context.run_model, part.root))
    for name, block in own_blocks(placed):
        wrap_forward(block, partial(context.run_block, name))
    if isinstance(pipeline, Pipeline):
        wrap_forward(pipeline.blueprint, _traced)
    return placed.with_(context=context)


def _traced(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Shapes():
        return forward(*args, **kwargs)
