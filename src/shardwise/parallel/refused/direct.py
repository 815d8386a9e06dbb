"""Weights that a loss function takes beside the model's output (a penalty on them), where a rank has a part of them.

`fully_shard` sums what comes through forward. What comes to a shard directly is added to that as it is: this rank's
share of the sum alone. And the last stage of a pipeline, whose ranks compute the loss, has no weights of the others.
Under `cp` a rank has a part of the tokens, too: see `token_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ModelError
from shardwise.model.tracer import tensors_in
from shardwise.parallel.placed import Placed
from shardwise.parallel.refused.derivatives import first_order, is_first_order
from shardwise.parallel.sequence.token_loss import of_each_token
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.engines import uses_fully_shard


def watched_loss(loss_fn: Callable[..., Any], placed: Placed) -> Callable[..., Any]:
    """The same loss function, which is looked at where ranks have parts of the model, or of its tokens.

    Raises:
        ModelError: within a call, see `refuse_weights`, `first_order` and `of_each_token`.
    """
    if not is_first_order(placed):
        return loss_fn
    watched = first_order(loss_fn, partial(refuse_weights, placed.plan, _parts(placed)))
    return watched if placed.context is None else of_each_token(watched, says=placed.mesh.tells)


def refuse_weights(plan: Plan, parts: Mapping[nn.Parameter, str], result: Any, output: Any, _: Any) -> None:
    """Look at how a loss came about.

    Args:
        plan: for the message.
        parts: what no loss function may take, and its name.
        result: of the loss function.
        output: what it was given of the model.

    Raises:
        ModelError: it depends on a weight in another way than by the output.

    Cost: a walk over the operations of the loss function.
    """
    ends = {tensor.grad_fn for _, tensor in tensors_in(output)}
    used = {id(leaf) for _, tensor in tensors_in(result) for leaf in _leaves(tensor, ends)}
    for parameter, name in parts.items() if used else ():
        if id(parameter) in used:
            raise ModelError(
                f"the loss function takes the weight {name} itself, beside the model's output, and under "
                f"`{plan}` a rank has parts of the weights: the gradient would not be that of all, and the loss "
                "not that of the model; let the forward of the module that holds a weight return the penalty on it, "
                "or an optimizer's rule add its gradient (for squares: weight_decay); see docs/loss.md",
                row="module.weights-in-loss",
            )


def _parts(placed: Placed) -> dict[nn.Parameter, str]:
    """Shards of `fully_shard`, and what blocks of a pipeline hold -> name; what a forward gathers is another tensor."""
    sharded, staged = uses_fully_shard(placed.plan), placed.pipeline is not None
    placed.reshard()
    return {
        parameter: name
        for name, parameter in placed.named_parameters().items()
        if (sharded and isinstance(parameter, DTensor))
        or (staged and any(name.startswith(f"{block}.") for block in placed.blocks))
    }


def _leaves(tensor: torch.Tensor, ends: set[Any]) -> Iterator[Any]:
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
