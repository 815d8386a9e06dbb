"""`recompute_blocks` and `compile_blocks`: what happens block by block, names unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.errors import ModelError
from shardwise.model.tracer import keeps_costly
from shardwise.parallel.layers.batchnorm import BatchNorm
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.module_torch_private import in_transform
from shardwise.parallel.placed import Placed, RandomKeys
from shardwise.parallel.reruns import Reruns
from shardwise.parallel.stages.stage import StageModule
from shardwise.plan.plan import Plan, Recompute


def own_blocks(placed: Placed) -> list[tuple[str, nn.Module]]:
    """The blocks that hold parameters on this rank, by their original names, in order."""
    found = []
    for part in placed.parts:
        for name in placed.blocks:
            block = part.root.get_submodule(name)
            if next(block.parameters(), None) is not None:
                found.append((name, block))
    return found


def recomputed(blocks: tuple[str, ...], recompute: Recompute) -> set[str]:
    """Names of the blocks whose activations are recomputed; spread evenly for a ratio.

    >>> sorted(recomputed(("a", "b", "c", "d"), Recompute(mode="ratio", ratio=0.5)))
    ['b', 'd']
    """
    match recompute.mode:
        case "none":
            return set()
        case "every":
            return {name for i, name in enumerate(blocks) if i % recompute.every == 0}
        case "ratio":
            r = recompute.ratio
            return {name for i, name in enumerate(blocks) if int((i + 1) * r + 1e-9) > int(i * r + 1e-9)}
        case _:
            return set(blocks)


def recompute_blocks(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Recompute the chosen blocks in the backward pass, and keep saved activations in host memory if asked.

    Raises:
        ModelError: the plan recomputes blocks, and the model shows none, or they are compiled and one keeps running
            statistics.
    """
    if plan.recompute.mode == "none" and not plan.offload.activations:
        return placed
    if not placed.blocks:
        raise ModelError(
            f"recompute_blocks: the plan `{plan}` recomputes or offloads blocks, and no repeated blocks were found in "
            f"{type(placed.parts[0].root).__name__}; name them with blocks=PATTERN (as `blocks=layers.*`)",
            row="module.no-blocks",
        )
    chosen = recomputed(placed.blocks, plan.recompute)
    for part in placed.parts:
        if isinstance(part.run, StageModule):
            part.run.recomputed = tuple(name for name in placed.blocks if name in chosen)
    for name, block in own_blocks(placed):
        forward: Callable[..., Any] = block.forward
        if name in chosen:
            if plan.compile:
                refuse_running_statistics(name, block)
            # a compiled block does not draw itself; its name in the code would compile each block apart
            if placed.randomness is not None and not plan.compile:
                placed.randomness.inside(name, block)
                forward = block.forward
            options: dict[str, Any] = {"use_reentrant": False}
            if plan.recompute.mode == "ops":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, keeps_costly)
                if "respect_saved_tensors_hooks" in signature(checkpoint).parameters:  # torch 2.14 asks
                    options["respect_saved_tensors_hooks"] = False  # what is kept of a block stays on the device
            reruns = None if plan.compile else Reruns(name, block)  # what looks at values would be compiled
            forward = partial(_recomputed, placed.randomness, reruns, forward, options)
            if not plan.compile:
                forward = partial(_refusing_transforms, name, forward)
        if plan.offload.activations:
            forward = partial(_offloaded, forward, mesh.device.type != "cpu")
        # an attribute of the instance: the class, the names and the state dict stay the user's
        object.__setattr__(block, "forward", forward)
    return placed


def refuse_running_statistics(name: str, block: nn.Module) -> None:
    """Of a compiled block that is recomputed: `Reruns` looks at values, which the compiler cannot.

    Raises:
        ModelError: it has a batch norm with running statistics.
    """
    for inner, module in block.named_modules():
        if isinstance(module, BatchNorm) and module.track_running_stats:
            raise ModelError(
                f"recompute_blocks: {name}.{inner} is a {type(module).__name__} with running statistics, which "
                "computing the compiled block twice would update twice; leave the block out (recompute=everyN or a "
                "ratio), or drop recompute or compile",
                row="module.statistics-twice",
            )


def _refusing_transforms(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch itself ends in one of three errors, two of them in the backward pass."""
    where = "is called within"
    if not in_transform():
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            where = "calls"
    raise ModelError(
        f"recompute: {name} {where} a transform of torch.func (grad, vjp, jvp, vmap, ...), which a second forward "
        "cannot repeat; leave the block out (recompute=everyN or a ratio), or use a plan without recompute",
        row="module.transformed",
    )


def _recomputed(
    randomness: RandomKeys | None,
    reruns: Reruns | None,
    forward: Callable[..., Any],
    options: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Where randomness is keyed the second forward draws the same numbers, and torch's generators need no saving."""
    replayed = randomness.replayed(forward) if randomness is not None else None
    if replayed is not None:
        options = options | {"preserve_rng_state": False}
    run = replayed or forward
    return checkpoint(run if reruns is None else reruns.of(run), *args, **options, **kwargs)


def _offloaded(forward: Callable[..., Any], away: bool, *args: Any, **kwargs: Any) -> Any:
    """`away`: the host's memory is another than the device's.

    Else `save_on_cpu` would keep what an operation gave as it is, which keeps the operation: nobody frees the two where
    no backward pass runs through it for the last time, as in one that is split.
    """
    with save_on_cpu(pin_memory=True) if away else saved_tensors_hooks(Tensor.detach, _as_it_is):
        return forward(*args, **kwargs)


def _as_it_is(kept: Tensor) -> Tensor:
    return kept


def compile_blocks(placed: Placed, plan: Plan, mesh: Mesh) -> Placed:
    """Compile each block by itself (`nn.Module.compile`): equal blocks share one compilation.

    Raises:
        ModelError: the plan compiles blocks, and the model shows none.
    """
    if not plan.compile:
        return placed
    if not placed.blocks:
        raise ModelError(
            f"compile_blocks: no repeated blocks were found in {type(placed.parts[0].root).__name__}; "
            "name them with blocks=PATTERN, or drop `compile` from the plan",
            row="module.no-blocks",
        )
    for _, block in own_blocks(placed):
        block.compile()
    return placed
