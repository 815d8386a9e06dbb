"""The backward of a pipeline stage in two parts, to its inputs and later to its weights; and private torch names.

Torch's own two parts add gradients up wrongly where a stage uses a weight twice: 2.11 says nothing, and 2.13 raises
where further weights meet it. 2.11 also loses nodes of autograd functions. The walk over the graph is torch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(eq=False)
class Group:
    """Weights, and the nodes where their paths meet the path of the inputs. No node is in two groups."""

    weights: set[Node]
    nodes: set[Node]
    arrived: dict[Node, Gradients] = field(default_factory=dict)
    """The gradients that came to each node, one for each of its outputs."""
    given: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    """The gradients of outputs that come from weights alone."""
    owners: list[Node] = field(default_factory=list)
    """They keep the nodes alive: before torch 2.13 one of an autograd function dies with the graph above it."""


def backward_to_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[object],
    weights: Iterable[torch.Tensor],
    at_once: Iterable[torch.Tensor] = (),
) -> tuple[Gradients, list[Group]]:
    """Gradients of the inputs, None for those without one; and what `backward_to_weights` needs.

    Takes the outputs off their graph, which frees the part of it that nobody needs any more.

    Args:
        outputs: what the stage returned.
        gradients: theirs; None for a loss.
        inputs: what the stage took. Tensors get their gradients in `.grad` too.
        weights: the stage's parameters.
        at_once: those of them that get their gradients here, not later.
    """
    given = [torch.ones_like(tensor) for tensor in outputs] if gradients is None else gradients
    roots = [(tensor, gradient) for tensor, gradient in zip(outputs, given, strict=True) if tensor.requires_grad]
    taken = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    soon = {id(weight): weight for weight in at_once if weight.requires_grad}
    wanted = [*taken, *soon.values()]
    found: Gradients = (None,) * len(wanted)
    groups = _groups(roots, taken, (weight for weight in weights if id(weight) not in soon))
    if roots and wanted:
        tensors, seeds = zip(*roots, strict=True)
        with _hooks((node, partial(_keep, group, node)) for group in groups for node in group.nodes):
            found = torch.autograd.grad(tensors, wanted, seeds, retain_graph=bool(groups), allow_unused=True)
    for tensor, gradient in zip(wanted, found, strict=True):
        _add(tensor, gradient)
    for tensor in outputs:
        tensor.detach_()
    of_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
    return tuple(of_tensor.get(id(value)) for value in inputs), groups


def backward_to_weights(weights: Iterable[torch.Tensor], groups: list[Group]) -> None:
    """Add the gradients of the weights to their `.grad`, and forget the groups one by one."""
    weight_of = {get_gradient_edge(weight).node: weight for weight in weights if weight.requires_grad}
    while groups:
        group = groups.pop(0)
        entries = group.given + [
            (GradientEdge(node, i), gradient)
            for node, gradients in group.arrived.items()
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not entries:
            continue
        edges, seeds = zip(*entries, strict=True)
        wanted = list(group.weights)
        # nodes may follow one another: what comes to one from another has arrived before
        with _hooks((node, partial(_replace, gradients)) for node, gradients in group.arrived.items()):
            found = torch.autograd.grad(edges, [GradientEdge(node, 0) for node in wanted], seeds, allow_unused=True)
        for node, gradient in zip(wanted, found, strict=True):
            _add(weight_of[node], gradient)


def _groups(
    roots: list[tuple[torch.Tensor, torch.Tensor | None]], taken: list[torch.Tensor], weights: Iterable[torch.Tensor]
) -> list[Group]:
    edges = [get_gradient_edge(tensor) for tensor, _ in roots]
    parents = construct_reverse_graph([edge.node for edge in edges])
    of_inputs, _ = reverse_closure([get_gradient_edge(tensor).node for tensor in taken], set(), parents)
    pairs = [(edge, gradient) for edge, (_, gradient) in zip(edges, roots, strict=True) if gradient is not None]
    alone = [(edge, gradient) for edge, gradient in pairs if edge.node not in of_inputs]
    targets = of_inputs | {edge.node for edge, _ in alone}
    of_node: dict[Node, Group] = {}
    for weight in (get_gradient_edge(weight).node for weight in weights if weight.requires_grad):
        _, nodes = reverse_closure([weight], targets, parents)
        joined = Group({weight}, nodes)
        for other in {of_node[node] for node in nodes & of_node.keys()}:
            joined.weights |= other.weights
            joined.nodes |= other.nodes
        of_node |= dict.fromkeys(joined.nodes, joined)
    groups = list(dict.fromkeys(of_node.values()))
    tokens = {edge.node: edge.ownership_token or edge.node for edge in edges}
    for group in groups:
        group.owners = [_owner(node, parents, tokens) for node in group.nodes]
        group.given = [(edge, gradient) for edge, gradient in alone if edge.node in group.nodes]
    return groups


def _owner(node: Node, parents: Mapping[Node, Sequence[Node]], tokens: dict[Node, Node]) -> Node:
    """The nearest node above whose Python object keeps it alive."""
    waiting = deque([node])
    while True:
        above = waiting.popleft()
        if not issubclass(type(above), BackwardCFunction):  # to mypy no node is one
            return above
        if above in tokens:
            return tokens[above]
        waiting += parents[above]


@contextmanager
def _hooks(hooks: Iterable[tuple[Node, Callable[[Gradients], Gradients | None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for node, hook in hooks:
            stack.callback(node.register_prehook(hook).remove)
        yield


def _keep(group: Group, node: Node, gradients: Gradients) -> None:
    group.arrived[node] = tuple(gradients)


def _replace(arrived: Gradients, _: Gradients) -> Gradients:
    return arrived


def _add(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    if tensor.grad is None:
        tensor.grad = gradient
    else:
        tensor.grad += gradient
