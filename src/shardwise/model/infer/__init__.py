"""`infer_rules`: tensor-parallel rules of a module nobody wrote any for, from what its forward does.

The forward runs on the meta device, where tensors have shapes and no data. The output of a linear layer is supposed
split and followed: through element-wise operations, reshapes into heads, attention, up to linear layers that take it
split. What nobody knows to work on slices stays whole, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.infer.groups import Model, find_groups
from shardwise.model.infer.styles import Rule, choose
from shardwise.model.nested import put
from shardwise.model.stacks import find_blocks
from shardwise.model.tracer import meta_copy, refuse_parameters, tensors_in


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """Rules with their reasons."""

    rows: tuple[Rule, ...]
    model: str
    """Name of the module's class."""
    tp_divides: int
    """Every degree of `tp` that divides it can split what the rules split."""
    no_sequence: str = ""
    """Why `seq` is refused with these rules; empty: it is not."""

    @property
    def rules(self) -> dict[str, str]:
        """Pattern -> style, for `apply(..., rules=)`."""
        return {row.pattern: row.style for row in self.rows}


def infer_rules(
    module: nn.Module | Callable[[], nn.Module],
    args: torch.Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    degree: int = 2,
) -> Inferred:
    """Tensor-parallel rules from the data flow of a module's forward.

    Args:
        module: a factory, or a module on any device, which is not changed.
        args: of forward; only the shapes and types of tensors matter. A tensor stands for itself, a dict for `kwargs`.
            None: `default_sample`.
        kwargs: likewise.
        degree: of `tp`, the least that is wanted: what it does not divide stays whole.

    Returns:
        A row for every module that owns parameters: pattern, style, reason. They are a proposal: accept them when
        `shardwise verify`, or `shardwise rules --verify`, has compared them with one process.

    Raises:
        ModelError: a constructor or a forward reads the values of tensors, or forward does not take the sample, or
            uses parameters of a submodule that it does not call.

    Cost: some forwards without data: milliseconds per module, no memory.

    >>> infer_rules(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.empty(2, 4)]).rules
    {'0': 'column', '2': 'row'}
    """
    copy = meta_copy(module) if isinstance(module, nn.Module) else _on_meta(module)
    refuse_parameters(copy)
    copy.train()  # the forward that is to be trained: an observer, a loss may be of that alone
    if isinstance(args, Mapping):
        kwargs, args = args, None
    elif args is None and kwargs is None:
        args = default_sample(copy)
    elif isinstance(args, torch.Tensor):
        args = [args]
    given = _typed(copy, (tuple(args or ()), dict(kwargs or {})))
    model = Model(copy, given[0], given[1], degree)
    chosen = choose(model, find_groups(model), _blocks(copy))
    return Inferred(
        rows=tuple(chosen.rules),
        model=type(copy).__name__,
        tp_divides=chosen.limit,
        no_sequence=chosen.no_sequence,
    )


def _on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return factory()
    except RuntimeError as error:  # as torch says it of a tensor that has no values
        if "meta tensor" not in str(error):
            raise
        raise ModelError(
            f"infer_rules: the constructor reads the values of tensors (torch: {str(error).splitlines()[0]}), and "
            "is run without data; needed: a module in place of the factory: "
            "infer_rules(Net(), sample)"
        ) from error


def _typed(module: nn.Module, sample: Any) -> Any:
    """The sample on the meta device, its floating tensors in the type of the parameters."""
    types = [p.dtype for p in module.parameters() if p.is_floating_point()]
    made = {}
    for path, tensor in tensors_in(sample):
        dtype = types[0] if types and tensor.is_floating_point() else tensor.dtype
        made[path] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return put(sample, made)


def default_sample(module: nn.Module) -> tuple[torch.Tensor]:
    """A small input: token numbers where the model has an embedding, else what its first layer takes.

    Raises:
        ModelError: the first layer is none that tells the shape of its input.
    """
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return (torch.zeros(2, 16, dtype=torch.long, device="meta"),)
        if isinstance(child, nn.Linear):
            return (torch.zeros(2, 16, child.in_features, device="meta"),)
        if isinstance(child, nn.Conv2d):
            return (torch.zeros(2, child.in_channels, 32, 32, device="meta"),)
        if isinstance(child, nn.Conv1d):
            return (torch.zeros(2, child.in_channels, 32, device="meta"),)
    raise ModelError(
        f"rules for {type(module).__name__}: found no embedding, linear or convolution that tells the shape of its "
        "input; needed: a sample; give one: --sample 2x16, --sample 2x3x32x32:float32, or infer_rules(module, [tensor])"
    )


def _blocks(module: nn.Module) -> tuple[str, ...]:
    try:
        found = find_blocks(module)
    except ModelError:
        return ()  # a model without repeated blocks has none to shard the sequence between
    uncalled = any(type(module.get_submodule(name)).forward is nn.Module.forward for name in found)
    return () if uncalled else found
