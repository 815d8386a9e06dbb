"""`estimate_module_by_trace`: the step of any module, with all its layers, from a trace without values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.diagnose.brought import as_batch, aside, example_length, example_of, on_meta
from shardwise.diagnose.tracing.estimate import OPTIMIZERS, TracedEstimate, as_traced, check_rows
from shardwise.diagnose.tracing.step import StepTrace, trace_step
from shardwise.diagnose.tracing.without_values import Training
from shardwise.errors import ModelError
from shardwise.model.nested import put
from shardwise.model.seen import added_to_loss, taken_by_loss, why_not
from shardwise.model.tracer import tensors_in
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.placed import Batch
from shardwise.plan.plan import Plan
from shardwise.plan.workload import Workload
from shardwise.train.loss import Loss, mean_over, token_cross_entropy

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a module's own code raises where it cannot be run."""


@aside
def estimate_module_by_trace(
    factory: Callable[[], nn.Module], plan: Plan, workload: Workload, *, rank: int = 0, is_cpu: bool = True
) -> TracedEstimate:
    """Peak bytes of live tensors and collectives of one rank of a plan, from the real step of a module.

    The batch is token ids, or its attribute `example_input_array` with as many rows as the plan gives a rank. The loss
    is the module's own where it returns one (`loss`, or a number), the cross-entropy of logits (rows, tokens,
    vocabulary) against ids of that shape, and of any other output the mean square.

    Args:
        factory: makes the module, on meta.
        plan: any layout that `apply` takes of it; its batch is the workload's.
        workload: sequence length, that of the example where the module has one, global batch in samples, and the
            optimizer, one of `OPTIMIZERS`.
        rank: of `plan.world`.
        is_cpu: whether ranks sum gradients as gloo does, see `trace_step`.

    Raises:
        ModelError: a part of the module needs values; another length than its example's.
        PlanError: the constraints refuse the plan, or the batch is not divided by data ranks and micro-batches.

    Cost: two or three steps on shapes alone: 5 to 10 s for 32 layers. See `estimate_by_trace` for the kernels.

    >>> estimate_module_by_trace(Transformer, Plan.parse("fsdp8 / bf16"), work).peak  # doctest: +SKIP
    """
    check_rows(plan, workload)
    step = _traced(factory, training_of_module(factory, workload), plan, (rank, is_cpu))
    num_params = sum(parameter.numel() for parameter in on_meta(factory).parameters())
    return as_traced(step, rank, num_params)


def _traced(factory: Callable[[], nn.Module], training: Training, plan: Plan, where: tuple[int, bool]) -> StepTrace:
    """`trace_step`, in which what the module's own code raises is told as its own.

    Raises:
        ModelError: it fails.
    """
    try:
        return trace_step(training, plan, rank=where[0], is_cpu=where[1])
    except FAILURES as error:
        if "finished reduction" in str(error):
            raise ModelError(
                "estimate --trace: some parameters have no gradient from the loss, and DDP waits for them; needed a "
                "loss that each of them has a part in: take out those that forward does not use, return a `loss` of "
                "all that it gives, or add find-unused to the plan"
            ) from error
        why = why_not(on_meta(factory), error)
        raise ModelError(
            f"estimate --trace: the step of the module failed without values: {why}; needed a module that trains on a "
            "batch of these shapes: run its forward and backward on one, and correct what fails; if nothing does, "
            "leave out --trace"
        ) from error


def training_of_module(factory: Callable[[], nn.Module], workload: Workload) -> Training:
    """What is traced of a module: its batch, with as many rows as a rank has, and a loss.

    Raises:
        ModelError: another length than its example's.
    """
    example = example_of(factory)
    if example is not None and example_length(example) != workload.seq_len:
        raise ModelError(
            f"estimate --trace: a sample of {workload.seq_len} tokens was asked for, and the module's "
            f"example_input_array has {example_length(example)}; needed the same: give --seq {example_length(example)}"
        )
    batch = partial(_batch, workload, None if example is None else as_batch(factory, example))
    optimizer, sample = OPTIMIZERS[workload.optimizer], rows_of(batch(None), 1)
    return Training(
        model=partial(_without_example, factory), batch=batch, loss=_loss, sample=sample, optimizer=optimizer
    )


def _without_example(factory: Callable[[], nn.Module]) -> nn.Module:
    """The module without the tensors that are no part of its step: a pipeline copies what a module holds."""
    module = factory()
    vars(module).pop("example_input_array", None)
    return module


def _batch(workload: Workload, example: Any, mesh: Mesh | None) -> Batch:
    """One step's rows of a rank, as `make_step` takes them; of no rank one row."""
    rows = workload.global_batch // mesh.batch.size if mesh is not None else 1
    if example is None:
        tokens = torch.zeros(rows, workload.seq_len, dtype=torch.int64)
        return (tokens, tokens)
    return rows_of(example, rows)


def rows_of(batch: Batch, rows: int) -> Batch:
    """The same on a CPU with so many rows, in each tensor that has rows: others a batch has once."""
    given = tensors_in(batch)
    first = next(tensor.shape[0] for _, tensor in given if tensor.dim())
    shapes = {path: (rows, *t.shape[1:]) if t.dim() and t.shape[0] == first else t.shape for path, t in given}
    return put(batch, {path: torch.zeros(shapes[path], dtype=tensor.dtype) for path, tensor in given})


def _loss(output: Any, batch: Batch) -> Loss:
    """See `estimate_module_by_trace`."""
    values = taken_by_loss(output)
    if values is None:
        raise ModelError(
            "estimate --trace: the forward returned no floating tensor, and a step needs a loss; needed one: return "
            "logits, or give trace_step a Training with the loss of your own"
        )
    if not values.dim():
        return mean_over(values)
    loss = _of_values(values, batch)
    return Loss(loss.sum + sum(added_to_loss(output)) * loss.weight, loss.weight)


def _of_values(values: torch.Tensor, batch: Batch) -> Loss:
    ids = (t for _, t in tensors_in(batch) if t.dtype is torch.int64 and t.shape == values.shape[:-1])
    if (labels := next(ids, None)) is not None:
        return token_cross_entropy(values, labels)
    return mean_over(values.float().square())
