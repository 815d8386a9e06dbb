"""One pass of forwards over batches without gradients: what `evaluate` sums and `predict` brings together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shardwise.errors import UsageError
from shardwise.parallel.inputs import Signature, distinct, model_inputs, to_device
from shardwise.parallel.placed import Placed
from shardwise.parallel.together import come_together, how_many
from shardwise.train.data.windows import MicroBatches, Window, micro_batches_of, window_of
from shardwise.train.followed.between import set_aside
from shardwise.train.followed.drawn import compare_draws
from shardwise.train.guards.halving import communicating
from shardwise.train.guards.rows import check_rows

Function = Callable[[Any, Any], Any]
"""Of the model's output and the micro-batch."""


class Place(NamedTuple):
    """Where a micro-batch stands among all of a pass: sorted, their first rows are in order."""

    first: int
    """Position of its first row; of a script's own batches which of them it is a part of."""
    rank: int = 0
    part: int = 0
    stride: int = 1
    """Positions from one of its rows to the next: of a stream those between are other ranks'."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What is called for each micro-batch, and what becomes of its result."""

    doing: str
    """The call, for messages."""
    function: Function
    take: Callable[[Any, Any, bool, Place], None]
    """Of a result, its micro-batch, whether that is padding, and its place among all."""
    number: Callable[[Any, Any], torch.Tensor]
    """A number of a result and its micro-batch, which a pipeline asks for."""


@set_aside()
def go_through(placed: Placed, windows: Iterable[Any], a_pass: Pass) -> None:
    """Forward of every batch in `eval` mode. Every rank calls it.

    Raises:
        UsageError: one batch in place of several; ranks that do not call it, or have fewer batches than others where
            forward communicates.
        ReplicaError: batches of a script's own that differ on ranks which work on the same rows.
    """
    check_several(windows, a_pass.doing)
    device = placed.mesh.device
    signature = Signature.of(placed.parts[0].root)
    come_together(a_pass.doing, placed.mesh)
    compare_draws(placed.mesh, a_pass.doing, stacklevel=5)  # the script's line, which calls `evaluate`
    try:
        with placed.in_mode(False), torch.no_grad(), placed.gathering():
            for i, window in enumerate(_as_many(windows, placed, a_pass.doing)):
                cut, zero = micro_batches_of(window, placed.plan.batch.micro_batches)
                micro = [placed.share(to_device(m, device)) for m in cut]
                places = _places(window, i, placed.mesh.batch.rank, len(micro))
                if placed.pipeline is not None:
                    _pipelined(placed, micro, zero, places, a_pass)
                    continue
                for batch, is_zero, place in zip(micro, zero, places, strict=True):
                    args, kwargs = model_inputs(batch, signature)
                    a_pass.take(a_pass.function(placed.parts[0].run(*args, **kwargs), batch), batch, is_zero, place)
    finally:
        placed.reshard()


def check_several(windows: Iterable[Any], doing: str) -> None:
    """Refuse one batch, whose rows, or the names of a dict, would be taken for batches, and samples that come twice."""
    is_row_of_parts = isinstance(windows, tuple) and any(isinstance(part, torch.Tensor) for part in windows)
    if isinstance(windows, torch.Tensor | Mapping | Window | MicroBatches) or is_row_of_parts:
        raise UsageError(
            f"{doing}: found one batch ({type(windows).__name__}); needed: windows of eval_batches, or several "
            "batches; give a list of it: [batch]"
        )
    sampler = getattr(windows.batch_sampler, "sampler", windows.sampler) if isinstance(windows, DataLoader) else None
    if isinstance(sampler, DistributedSampler) and sampler.total_size > (rows := len(cast(Sized, sampler.dataset))):
        raise UsageError(
            f"{doing}: found a DataLoader with a DistributedSampler over {rows} samples, which gives "
            f"{sampler.num_samples} to each of {sampler.num_replicas} ranks, and so repeats "
            f"{sampler.total_size - rows}, which would count again; needed: each once, as "
            "sw.eval_batches(dataset, plan.batch, mesh) and data.evaluation(dataset) give them"
        )


def _places(window: Any, number: int, rank: int, count: int) -> list[Place]:
    """Of each micro-batch."""
    if not isinstance(window, Window):
        return [Place(number, rank, i) for i in range(count)]
    first, stride = window.positions.start, window.positions.step
    return [Place(first + stride * sum(window.rows[:i]), stride=stride) for i in range(count)]


def _as_many(windows: Iterable[Any], placed: Placed, doing: str) -> Iterator[Any]:
    """Of a script's own batches the first are compared, and ranks without another one do not let the others wait."""
    mesh, iterator = placed.mesh, map(window_of, windows)
    window = next(iterator, None)
    if isinstance(window, Window) or mesh.world == 1:  # right by construction
        yield from () if window is None else (window,)
        yield from iterator
        return
    if (held := how_many(mesh, is_here=window is not None)) == mesh.world:
        check_rows(window, mesh, doing)
    why, number = communicating(placed), 1
    while held if why else window is not None:
        if why and held < mesh.world:
            raise UsageError(
                f"{doing}: found a batch {number} on {held} of {mesh.world} ranks, needed as many batches on each: "
                f"forward communicates by {why}, and waits for all; sw.eval_batches(dataset, plan.batch, mesh) and "
                "data.evaluation(dataset) give as many, and each row once"
            )
        yield window
        window, number = next(iterator, None), number + 1
        if why:
            held = how_many(mesh, is_here=window is not None)


def _pipelined(placed: Placed, micro: list[Any], zero: tuple[bool, ...], places: list[Place], a_pass: Pass) -> None:
    assert placed.pipeline is not None
    results: dict[int, tuple[Any, Any, bool, Place]] = {}
    micro = distinct(micro)
    known = {id(m): (z, place) for m, z, place in zip(micro, zero, places, strict=True)}

    def keep(output: Any, batch: Any) -> torch.Tensor:
        result = a_pass.function(output, batch)
        results[id(batch)] = (result, batch, *known[id(batch)])  # a dict: shapes may be learnt by an extra call
        return a_pass.number(result, batch)

    placed.pipeline.run(micro, keep, backward=False)
    for result in results.values():
        a_pass.take(*result)
