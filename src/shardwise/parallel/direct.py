"""Weights that a loss function takes beside the model's output (a penalty on them), where a rank has a part of them.

`fully_shard` sums what comes through forward. What comes to a shard directly is added to that as it is: this rank's
share of the sum alone. And the last stage of a pipeline, whose ranks compute the loss, has no weights of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.model.tracer import tensors_in
from shardwise.parallel.derivatives import first_order, is_first_order
from shardwise.parallel.placed import Placed
from shardwise.parallel.torch_private import wrapper_of
from shardwise.plan.engines import uses_fully_shard


def watched_loss(loss_fn: Callable[..., Any], placed: Placed) -> Callable[..., Any]:
    """The same loss function, whose first call that records gradients is looked at where ranks have parts of weights.

    Raises:
        ModelError: within that call, see `refuse_weights` and `first_order`.
    """
    return first_order(loss_fn, partial(refuse_weights, placed)) if is_first_order(placed) else loss_fn


def refuse_weights(placed: Placed, result: Any, output: Any, _: Any) -> None:
    """Look at how a loss came about.

    Args:
        placed: the model, sharded or in a pipeline.
        result: of the loss function.
        output: what it was given of the model.

    Raises:
        ModelError: it depends on a weight in another way than by the output.

    Cost: a walk over the operations of the loss function.
    """
    ends = {tensor.grad_fn for _, tensor in tensors_in(output)}
    used = {id(leaf): leaf for _, tensor in tensors_in(result) for leaf in _leaves(tensor, ends)}
    for name, parameter in placed.named_parameters().items() if used else ():
        in_block = placed.pipeline is not None and any(name.startswith(f"{block}.") for block in placed.blocks)
        if id(parameter) in used and (in_block or _is_shard(placed, name, parameter)):
            raise ModelError(
                f"the loss function takes the weight {name} itself, beside the model's output, and under "
                f"`{placed.plan}` a rank has parts of the weights: the gradient would not be that of all, and the loss "
                "not that of the model; let the forward of the module that holds a weight return the penalty on it, "
                "or an optimizer's rule add its gradient (for squares: weight_decay); see docs/loss.md",
                row="module.weights-in-loss",
            )


def _is_shard(placed: Placed, name: str, parameter: nn.Parameter) -> bool:
    """Whether `fully_shard` has not gathered it: as `apply` left it. What it has gathered `tp` may still split."""
    is_left = isinstance(parameter, DTensor) and wrapper_of(parameter) == placed.wrappers.get(name)
    return is_left and uses_fully_shard(placed.plan)


def _leaves(tensor: torch.Tensor, ends: set[Any]) -> Iterator[torch.Tensor]:
    """Of the operations that made a tensor, back to those that `ends` names, the tensors that get a gradient."""
    nodes, seen = [tensor.grad_fn], set(ends)
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if isinstance(leaf, torch.Tensor):
            yield leaf
        nodes += [following for following, _ in node.next_functions]
