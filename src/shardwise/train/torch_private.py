"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import register_pytree_node


def as_tree_node(kind: type, parts: Callable[[Any], Any], joined: Callable[[Any, Any], Any]) -> None:
    """Let `tree_map` go into a list of one's own, as into a list: of a subclass it would make one leaf."""
    register_pytree_node(kind, parts, joined)


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply every tensor by a number, in place: `torch._foreach_mul_`, one kernel for all where there is one."""
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The L2 norm of every tensor, shape () each, accumulated in a dtype or their own: `torch._foreach_norm`."""
    return list(torch._foreach_norm(tensors, dtype=dtype))


def average_into(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """`average += weight * (value - average)` for every pair, in place: `torch._foreach_lerp_`."""
    values = [value.to(average.dtype) for average, value in zip(averages, values, strict=True)]
    torch._foreach_lerp_(averages, values, weight)


def clamp_all(tensors: list[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit], in place: `torch._foreach_clamp_min_` and `_max_`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def shard_like(local: Tensor, like: DTensor) -> DTensor:
    """`local` as the shard of a DTensor with the layout and global shape of `like`, sharing its storage.

    `DTensor.from_local` would do, but it moves the shard to the mesh's device: state that lives in host memory
    on purpose (offload) would land on the accelerator. So: `DTensor(local, spec)`, private in torch 2.13.
    """
    spec = like._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its target, in order; from an accelerator without waiting: `torch._foreach_copy_`."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself; no copy, no autograd.

    `DTensor.to_local` goes through autograd: a hundredth of a millisecond for each of hundreds of tensors.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """A step that no hook of the optimizer's, or of all optimizers, sees: what `Optimizer.profile_hook_step` wraps."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a user called `register_step_pre_hook` or `register_step_post_hook` on an optimizer."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("shardwise.") for hook in hooks)


def is_norm_of_all(function: Any) -> bool:
    """Whether a function is what `clip_grad_norm_` takes the norms of all gradients by: `torch._foreach_norm`."""
    return function is torch._foreach_norm


_NODES = 100
"""Operations that are looked at, the last ones of a loss."""
_MEAN = 1
"""torch's number for `reduction="mean"`."""


def mean_of_labels(loss: Tensor) -> tuple[int, int, bool] | None:
    """Of the first mean that `nll_loss` (in `cross_entropy`, too) takes on the way to a loss, wherever it was taken.

    Labels that it ignores, and all of them, and whether classes have weights; None: there is none. By the attributes
    `_saved_*` of the node of autograd.
    """
    nodes: list[Any] = [loss.grad_fn]
    for place in range(_NODES):
        if place >= len(nodes):
            return None
        node = nodes[place]
        if getattr(node, "_saved_reduction", None) == _MEAN and hasattr(node, "_saved_ignore_index"):
            labels = node._saved_target
            has_values = type(labels) is Tensor and not labels.is_meta  # a traced step has none
            ignored = 0 if not has_values else int((labels == _signed(node._saved_ignore_index)).sum())
            return ignored, labels.numel(), node._saved_weight is not None
        nodes += (
            [following for following, _ in node.next_functions if following is not None] if node is not None else []
        )
    return None


def is_mean(loss: Tensor) -> bool:
    """Whether a loss is a mean, or a sum of means, that nothing has multiplied since: by the nodes of autograd."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        name = type(node).__name__
        if name.startswith(("AddBackward", "ToCopyBackward")) and len(nodes) < _NODES:
            nodes += [following for following, _ in node.next_functions if following is not None]
        elif not name.startswith("MeanBackward") and getattr(node, "_saved_reduction", None) != _MEAN:
            return False
    return True


def _signed(number: int) -> int:
    """Torch shows a negative one as it lies in memory."""
    return number - 2**64 if number >= 2**63 else number


def recorded_collectives() -> list[dict[str, Any]]:
    """The last collectives that this process called, of all groups, oldest first: torch's flight recorder.

    Those between two ranks are left out. Empty where torch does not record: no process group, or a back-end without it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    found = json.loads(dump()) if dump is not None else {}
    return [entry for entry in found.get("entries", ()) if not entry["is_p2p"]]


def group_names() -> dict[str, list[int]]:
    """The ranks of each process group of this process, by the name that the flight recorder gives it."""
    names = dist.distributed_c10d._world.pg_names
    return {name: dist.get_process_group_ranks(group) for group, name in names.items()}


def has_modes() -> bool:
    """Whether a mode that sees every function is on: `torch.overrides._get_current_function_mode`."""
    return _get_current_function_mode() is not None  # type: ignore[no-untyped-call]  # torch has no types here


def is_innermost(mode: object) -> bool:
    """Whether it is the one that was entered last."""
    return _get_current_function_mode() is mode  # type: ignore[no-untyped-call]  # torch has no types here


def is_operation(func: object) -> bool:
    """Whether it is one of aten's kind, with a schema and tags, and not one that takes functions: `torch._ops`."""
    return isinstance(func, torch._ops.OpOverload)
