"""What tensor parallelism adds around the forward of a module: inputs split or gathered, parameters made local.

Each function changes one module in place, without touching its class, its names or its state dict.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import ModelError
from shardwise.parallel.layers.regions import add_up, enter, gather, own, split
from shardwise.parallel.module_torch_private import hook_first


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Put `wrapper(forward, *args, **kwargs)` in place of the instance's forward; its signature stays visible."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner, *args, **kwargs)

    # an attribute of the instance: the class, the names and the state dict stay the user's
    object.__setattr__(module, "forward", forward)


def with_local_parameters(module: nn.Module, gradient: Placement) -> None:
    """The module's own forward sees this rank's plain tensors in place of its DTensor parameters.

    Args:
        module: Its own parameters are replicated DTensors.
        gradient: `Replicate()` where every rank computes the same gradient, `Partial()` where ranks' gradients add up.
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        local = {
            name: parameter.to_local(grad_placements=(gradient,))
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        # not instance attributes: the compiler of torch 2.12 deletes the parameter where one of its name is deleted
        own = cast(dict[str, Any], module._parameters)
        kept = {name: own[name] for name in local}
        own.update(local)
        try:
            return forward(*args, **kwargs)
        finally:
            own.update(kept)

    wrap_forward(module, run)


class Holder:
    """The input that the column layers of one module share, while that module's forward runs.

    Without it each of wq, wk and wv would gather, and reduce the gradient of, the same tensor.
    """

    def __init__(self, tp_mesh: DeviceMesh, sequence_dim: int | None, name: str) -> None:
        """`sequence_dim`: the dim along which the module's input is split; None: it is whole."""
        self.tp_mesh = tp_mesh
        self.sequence_dim = sequence_dim
        self.name = name
        self.plain: torch.Tensor | None = None
        self.shared: DTensor | None = None
        self.columns: list[nn.Module] = []

    def serve(self, column: nn.Module) -> None:
        """Give `column` the shared form when it is called with the plain one; any other input is left as it is."""
        self.columns.append(column)

        def swap(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if self.plain is not None and args and args[0] is self.plain:
                return (self.shared, *args[1:])
            return None

        hook_first(column, swap)


def hold(module: nn.Module, holder: Holder) -> None:
    """Let `module` gather its first input where that is split, and share it with its column layers."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = First.of(module, args, kwargs)
        if first is None or not first.tensor.is_floating_point() or isinstance(first.tensor, DTensor):
            return forward(*args, **kwargs)
        if holder.sequence_dim is not None and first.tensor.dim() <= 2:
            raise ModelError(
                f"sequence shards: {holder.name} is called with tokens in rows ({first.tensor.dim()} dims), whose "
                "sequence cannot be told from its batch; call it with (batch, seq, features), leave its rules out, or "
                "drop `seq` from the plan",
                row="module.tokens-in-rows",
            )
        if holder.sequence_dim is not None:
            _refuse_second_sequence(module, holder, first, (args, kwargs))
        holder.plain, holder.shared = enter(first.tensor, holder.tp_mesh, holder.sequence_dim)
        try:
            whole = holder.plain  # of attention(x, x, x) all three
            args = tuple(whole if value is first.tensor else value for value in args)
            kwargs = {name: whole if value is first.tensor else value for name, value in kwargs.items()}
            outputs = forward(*args, **kwargs)
        except RuntimeError as error:
            if _SHAPES.search(str(error)) is None:
                raise
            raise _misfit(module, holder, error) from error
        finally:
            holder.plain = holder.shared = None
        if holder.sequence_dim is not None:
            _check_split_again(outputs, first.tensor, holder)
        return outputs

    wrap_forward(module, run)


def _refuse_second_sequence(module: nn.Module, holder: Holder, first: First, given: tuple[Any, ...]) -> None:
    """The first input is gathered; another one with as many tokens is a part too, and would be taken for the whole."""
    dim = cast(int, holder.sequence_dim)
    args, kwargs = given
    names = list(inspect.signature(module.forward).parameters)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if value is not first.tensor and _goes_along(value, first.tensor, dim):
            raise ModelError(
                f"sequence shards: {holder.name} is given {name} {tuple(value.shape)} beside its input, of which each "
                "rank has a part, and only the input is gathered; needed: all of it: give "
                "it to the blocks by keyword, which leaves it whole, or drop `seq` from the plan"
            )


_SHAPES = re.compile(r"^shape '|^split_with_sizes|shapes cannot be multiplied|^The (expanded )?size of (the )?tensor")
"""Torch's errors of a view, a split, a product and a broadcast of tensors that do not fit."""


def _misfit(module: nn.Module, holder: Holder, error: RuntimeError) -> ModelError:
    """What is wrong where a forward pass takes its layers for whole ones, or heads do not divide."""
    size, names = holder.tp_mesh.size(), {id(layer): name for name, layer in module.named_modules()}
    widths = [
        f"{names.get(id(layer)) or type(layer).__name__} {layer.out_features // size} of {layer.out_features}"
        for layer in holder.columns
        if isinstance(layer, nn.Linear)
    ]
    return ModelError(
        f"tp={size}: {holder.name or 'the model'}: {str(error).splitlines()[0]}; on each rank its column layers give "
        f"fewer features: {', '.join(widths) or 'a share'}; needed: heads and key-value heads that tp divides, counted "
        "from the tensors, as view(batch, seq, -1, head_dim); choose a tp that does, or leave this layer's rules out"
    )


def _check_split_again(outputs: Any, local_input: torch.Tensor, holder: Holder) -> None:
    """A module that gathered the sequence must end in a row layer, which splits it again."""
    dim = holder.sequence_dim
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    if not isinstance(output, torch.Tensor) or dim is None or output.dim() <= dim:
        return
    if output.shape[dim] != local_input.shape[dim]:
        raise ModelError(
            f"sequence shards: {holder.name} returned {output.shape[dim]} tokens, needed {local_input.shape[dim]} "
            f"(1/{holder.tp_mesh.size()} of the sequence); its last layer must have the rule 'row'"
        )


def accept_whole_or_split(linear: nn.Linear, tp_mesh: DeviceMesh, name: str) -> None:
    """Let a row layer take the whole input too (after a 'column-gather' layer): the shape tells which it is."""
    whole, part = linear.in_features, linear.in_features // tp_mesh.size()

    def to_split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        tensor = args[0]
        if isinstance(tensor, DTensor) or tensor.shape[-1] == part:
            return None
        if tensor.shape[-1] != whole:
            raise ModelError(
                f"row layer {name}: the input has {tensor.shape[-1]} features, needed {part} (split by the column "
                f"layers before it) or {whole} (whole); give the layers that feed it the rule 'column' or "
                "'column-gather'"
            )
        shared = DTensor.from_local(tensor, tp_mesh, (Replicate(),), run_check=False)
        return (shared.redistribute(placements=(Shard(tensor.dim() - 1),)), *args[1:])

    hook_first(linear, to_split)


def looks_up_alone(table: nn.Embedding) -> bool:
    """Whether a vector depends on its own row alone, and so does its gradient: then `split_table` takes it."""
    plain = type(table).forward is nn.Embedding.forward and "forward" not in vars(table)
    return plain and table.max_norm is None and not table.scale_grad_by_freq and not table.sparse


def split_table(table: nn.Embedding, tp_mesh: DeviceMesh) -> None:
    """Each rank holds some rows, and gives the vectors of these, with zeros for the others; their sum is the whole.

    Torch's own rule makes the gradient of the whole table on every rank, as large as without tensor parallelism. Here
    each rank makes that of its rows (Shoeybi et al., arXiv:1909.08053, section 3).

    Cost: forward one all-reduce of the vectors, backward none.
    """
    whole = table.weight
    shard = distribute_tensor(whole.detach(), tp_mesh, (Shard(0),))
    table.weight = nn.Parameter(shard, requires_grad=whole.requires_grad)
    rows = table.num_embeddings // tp_mesh.size()
    first = rows * tp_mesh.get_local_rank()
    padding = None if table.padding_idx is None else table.padding_idx - first
    if padding is not None and not 0 <= padding < rows:
        padding = None

    def run(_: Callable[..., Any], input: torch.Tensor) -> torch.Tensor:  # the name that nn.Embedding gives it
        elsewhere = (input < first) | (input >= first + rows)
        weight = cast(DTensor, table.weight).to_local()
        found = functional.embedding((input - first).masked_fill(elsewhere, 0), weight, padding)
        return own(add_up(found.masked_fill(elsewhere.unsqueeze(-1), 0), tp_mesh))

    wrap_forward(table, run)


def split_sequence(blocks: Mapping[str, nn.Module], tp_mesh: DeviceMesh, dim: int) -> None:
    """The first block's first input arrives whole and is split along the sequence, and what else has a row per token.

    Of what else the model gives to a later block, too (the embeddings to each one), that block gets the same part.
    """
    name, block = next(iter(blocks.items()))
    divided = WeakTensorKeyDictionary()

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        first = First.of(block, args, kwargs)
        if first is None or first.tensor.dim() <= dim:
            found = "no tensor" if first is None else f"shape {tuple(first.tensor.shape)}"
            raise ModelError(
                f"sequence shards: the first input of the block {name} is {found}, needed (batch, sequence, features); "
                "pass the hidden states first, or drop `seq` from the plan"
            )
        if first.tensor.shape[dim] % tp_mesh.size():
            raise ModelError(
                f"sequence shards: tp={tp_mesh.size()} does not divide the {first.tensor.shape[dim]} tokens of the "
                f"input of {name} (shape {tuple(first.tensor.shape)}); pad sequences to a multiple of "
                f"{tp_mesh.size()}, or drop `seq` from the plan"
            )
        whole = [a for a in args if a is first.tensor or _goes_along(a, first.tensor, dim)]
        if not torch.compiler.is_compiling():
            divided.update((a, True) for a in whole)
        args, kwargs = first.replaced(split(first.tensor, tp_mesh, dim), args, kwargs)
        args = tuple(split(a, tp_mesh, dim) if any(a is w for w in whole) else a for a in args)
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            _explain_beside((*args, *kwargs.values()), first.tensor, dim, name, error)
            raise

    def follow(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        parts = (split(a, tp_mesh, dim) if isinstance(a, torch.Tensor) and a in divided else a for a in args)
        return forward(*parts, **kwargs)

    wrap_forward(block, run)
    for other in list(blocks.values())[1:]:
        wrap_forward(other, follow)


def _goes_along(value: Any, stream: torch.Tensor, dim: int) -> bool:
    """Whether a positional value has, like the hidden states, numbers for each token: what blocks pass on with them."""
    if not isinstance(value, torch.Tensor) or value is stream or not value.is_floating_point():
        return False
    return value.dim() == stream.dim() and value.shape[: dim + 1] == stream.shape[: dim + 1]


def _explain_beside(given: Iterable[Any], stream: torch.Tensor, dim: int, name: str, error: RuntimeError) -> None:
    """Of an error of sizes: what has a number for each token is whole where it meets a part (in attention it may)."""
    shape = stream.shape[: dim + 1]
    beside = [value for value in given if isinstance(value, torch.Tensor) and value.shape[: dim + 1] == shape]
    if beside and _SHAPES.search(str(error)):
        raise ModelError(
            f"sequence shards: the block {name} is given a tensor {tuple(beside[0].shape)} beside its hidden states "
            f"{tuple(stream.shape)}, of which each rank has a part: {str(error).splitlines()[0]}; needed: what blocks "
            "join with the hidden states as floating numbers by position, with a dim for the features "
            "(value.unsqueeze(-1)), which is divided with them, or drop `seq` from the plan"
        ) from error


def _refuse_numbers(value: Any, stream: torch.Tensor, dim: int, name: str) -> None:
    """What may be one number for each token of this rank, or as many numbers for each row, is not told apart."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == stream.shape[: dim + 1]:
        raise ModelError(
            f"sequence shards: the block {name} returned a tensor {tuple(value.shape)} beside its hidden states "
            f"{tuple(stream.shape)}, of which each rank has a part; needed: what has a number for each token with a "
            "dim for the features, as value.unsqueeze(-1), which is gathered with them, or drop `seq` from the plan"
        )


def leave_sequence(block: nn.Module, tp_mesh: DeviceMesh, dim: int, name: str) -> None:
    """The block's output is gathered along the sequence; of a tuple the first, and what else has a row per token."""

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            return gather(outputs, tp_mesh, dim)
        if isinstance(outputs, tuple) and outputs and isinstance(outputs[0], torch.Tensor):
            stream, *rest = outputs
            for value in rest:
                _refuse_numbers(value, stream, dim, name)
            return (
                gather(stream, tp_mesh, dim),
                *(gather(o, tp_mesh, dim) if _goes_along(o, stream, dim) else o for o in rest),
            )
        raise ModelError(
            f"sequence shards: the block {name} returned {type(outputs).__name__}, needed a tensor or a tuple that "
            "starts with one; return the hidden states first, or drop `seq` from the plan"
        )

    wrap_forward(block, run)


def check_same_input(module: nn.Module, tp_mesh: DeviceMesh, rule: str) -> None:
    """At its first call, a module that a rule leaves whole must see the same input on every tp rank.

    Else each rank computes a part of its gradient, and training would go on with a wrong one.
    Cost: one all-reduce of two numbers, once.
    """
    pending = [True]

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # fake and compiled tensors have no values to compare
        if not pending or torch.compiler.is_compiling():
            return
        first = First.of(module, args, kwargs)
        tensor = first.tensor if first else None
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            return
        pending.clear()
        with torch.no_grad():
            flat = tensor.detach().reshape(-1).double()
            print_ = (flat * torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)).sum()
            low_high = torch.stack([-print_, print_])
            dist.all_reduce(low_high, op=dist.ReduceOp.MAX, group=tp_mesh.get_group())
            spread = float(low_high.sum())
        if spread > 1e-3 * float(flat.abs().sum() + 1e-6):
            raise ModelError(
                f"sharding rule {rule}: its input differs between tp ranks (by {spread:.3g}), so its "
                "gradient would be a part of the whole; needed: the same input everywhere; use 'heads' for a norm of "
                "split queries or keys, or 'column-gather' for the layers that feed it"
            )

    module.register_forward_pre_hook(check, with_kwargs=True)


@dataclass(frozen=True)
class First:
    """The first tensor that a module is called with: position 0, or the keyword of forward's first parameter."""

    tensor: torch.Tensor
    keyword: str | None

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> First | None:
        """Of a call; None: there is none."""
        if args:
            return First(args[0], None) if isinstance(args[0], torch.Tensor) else None
        keyword = next(iter(inspect.signature(module.forward).parameters), None)
        value = kwargs.get(keyword) if keyword else None
        return First(value, keyword) if isinstance(value, torch.Tensor) else None

    def replaced(
        self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with the first tensor exchanged."""
        if self.keyword is None:
            return (tensor, *args[1:]), kwargs
        return args, {**kwargs, self.keyword: tensor}
