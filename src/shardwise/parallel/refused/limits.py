"""What a module asks for that parts of a batch, or of a parameter, would each do in their own way."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import ModelError
from shardwise.parallel.torch_private import has_gradient_hook, moves_at_forward
from shardwise.plan.plan import Plan
from shardwise.plan.ranks.engines import uses_fully_shard

_WRAPPED = (nn.DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


def refuse_limits(root: nn.Module, plan: Plan) -> None:
    """Refuse what would train, and otherwise than in one process.

    Raises:
        ModelError: a module that torch's data parallelism has wrapped; a hook on a parameter's gradient; sparse
            gradients; a lookup or a norm whose effect depends on how rows are divided.
    """
    for name, module in root.named_modules():
        if isinstance(module, _WRAPPED):
            raise ModelError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which would sum gradients beside apply: "
                "give that the module inside (model.module, or the one before fully_shard); the plan says the rest"
            )
    for name, parameter in root.named_parameters():
        refuse_gradient_hook(name, parameter)
        if uses_fully_shard(plan) and not (parameter.numel() and parameter.is_contiguous()):
            what = f"is not contiguous (strides {parameter.stride()})" if parameter.numel() else "has no elements"
            raise ModelError(
                f"parameter {name} of shape {tuple(parameter.shape)} {what}, and `{plan}` shards parameters, or casts "
                "them: leave an empty one out, make others contiguous (nn.Parameter(x.contiguous())), or use a plan of "
                "`dp` alone in their own type",
                row="module.parameter-layout",
            )
    ranks = plan.axes.data * plan.axes.cp
    pieces = ranks * plan.batch.micro_batches
    for name, module in root.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ModelError(
                f"{name or 'the model'} gives sparse gradients (sparse=True), which are not summed over ranks and "
                "micro-batches: make them dense (sparse=False), the same numbers beside zeros",
                row="module.sparse-gradient",
            )
        twice = plan.recompute.mode != "none" and plan.compile
        if moves_at_forward(module) and (plan.batch.micro_batches > 1 or twice):
            raise ModelError(
                f"{name or 'the model'} has a spectral norm, which moves at every forward: `{plan}` makes more of them "
                "in a step than one process; use a plan with one micro-batch, recompute no compiled blocks, or take "
                "torch.nn.utils.parametrizations.weight_norm",
                row="module.moves-at-forward",
            )
        said = _of_table(module, ranks, pieces)
        if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
            said = "track_running_stats=True" if module.track_running_stats and pieces > 1 else ""
        if said:
            raise ModelError(
                f"{name or 'the model'}: found {type(module).__name__}({said}), where rows that are looked at together "
                f"change the result, and `{plan}` divides a batch into {pieces}; leave it out, or use a plan with one "
                "data rank and one micro-batch",
                row="module.rows-together",
            )


def refuse_gradient_hook(name: str, parameter: nn.Parameter) -> None:
    """A parameter's hook sees what this rank has of a gradient, in a micro-batch.

    Raises:
        ModelError: it has one.
    """
    if has_gradient_hook(parameter):
        raise ModelError(
            f"parameter {name} has a hook on its gradient, which would see parts of it, before they are summed "
            "over ranks and micro-batches and divided by the weight of the loss; do it in forward, as a "
            "parametrization (torch.nn.utils.parametrize), or in an optimizer's rule",
            row="module.gradient-hook",
        )


def _of_table(module: nn.Module, ranks: int, pieces: int) -> str:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ""
    if module.max_norm is not None and ranks > 1:  # each rank would shrink the rows that it looks up
        return f"max_norm={module.max_norm:g}"
    return "scale_grad_by_freq=True" if module.scale_grad_by_freq and pieces > 1 else ""
