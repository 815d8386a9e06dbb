"""What passes between the blocks of a model under a plan, found without a pipeline.

Under a pipeline a stage is told by the one before it what it will receive. A process alone has nobody to tell it: it
runs the forward under the same plan with `pp1`, and looks at what goes from block to block.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.diagnose.tracing.ledger import axis_names
from shardwise.diagnose.tracing.without_values import Pretending, Training, without_values
from shardwise.model.nested import at
from shardwise.model.tracer import meta_copy, trace_chain
from shardwise.parallel.inputs import Signature, model_inputs, split_rows
from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.placed import Placed
from shardwise.parallel.stages.transport import Boundary
from shardwise.plan.plan import Communication, Plan, Schedule
from shardwise.testing.fake import fake_world


def links_of(training: Training, plan: Plan, rank: int) -> list[Boundary]:
    """Shapes and types of the tensors from each block to the next one, on this rank.

    Raises:
        ModelError: the forward is no chain of blocks.
    """
    # stages hand on whole sequences; between the blocks of one, `seq` divides them
    whole = replace(plan.tensor, sequence=False)
    # nor do shapes depend on how gradients are summed, where without stages DDP would, which takes fewer dials
    flat = replace(
        plan, axes=replace(plan.axes, pp=1), schedule=Schedule(), tensor=whole, communication=Communication()
    )
    found: dict[int, Boundary] = {}
    with ExitStack() as stack:
        stack.enter_context(fake_world(flat.world, rank % flat.world))
        mesh = stack.enter_context(open_mesh(flat, device="cpu"))
        placed = stack.enter_context(without_values(training, flat, mesh, Pretending(axis_names(mesh))))
        root, run = placed.parts[0].root, placed.parts[0].run
        args, kwargs = first_inputs(training, placed, Signature.of(root))
        chain = trace_chain(meta_copy(training.model()), args, kwargs, placed.blocks)
        for i, name in enumerate(placed.blocks[1:]):
            see = partial(_see, found, i, chain.links[i].inputs)
            root.get_submodule(name).register_forward_pre_hook(see, prepend=True, with_kwargs=True)
        with torch.no_grad():
            run(*args, **kwargs)
    return [found[i] for i in range(len(found))]


def tell(training: Training, placed: Placed, links: list[Boundary]) -> None:
    """Let the stages of this rank know what they will receive and send."""
    pipeline = placed.pipeline
    assert isinstance(pipeline, Pipeline)
    boundary = {}
    for stage in pipeline.stages:
        cut = stage.cut
        if cut.stage:
            boundary[cut.stage] = links[cut.first - 1]
        if not cut.is_last:
            boundary[cut.stage + 1] = links[cut.last]
    pipeline.transport.know(first_inputs(training, placed, pipeline.signature), boundary)


def first_inputs(training: Training, placed: Placed, signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is given of the first micro-batch."""
    batch = training.batch(placed.mesh)
    listed = isinstance(batch, list) and not isinstance(batch[0], torch.Tensor)
    micro = batch if listed else split_rows(batch, placed.plan.batch.micro_batches)
    return model_inputs(placed.share(micro[0]), signature)


def _see(
    found: dict[int, Boundary], index: int, inputs: tuple[Any, ...], block: nn.Module, args: Any, kwargs: Any
) -> None:
    tensors = [at({"args": args, "kwargs": kwargs}, path) for path in inputs]
    found[index] = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
