"""`predict`: what a model gives for each row of a data set, brought together in the order of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import UsageError
from shardwise.model.nested import Path, leaves, put
from shardwise.parallel.inputs import num_rows
from shardwise.parallel.placed import Placed, check_placed
from shardwise.parallel.together import group_apart
from shardwise.train.whole_pass import Function, Pass, Place, go_through

_Rows = dict[Path, torch.Tensor]
_NEEDED = "needed tensors (one, or a tuple, list or dict of them) whose first dim is the rows of the micro-batch"


@torch.inference_mode(False)  # as `evaluate`
def predict(placed: Placed, function: Function, windows: Iterable[Any]) -> Any:
    """What a function gives for each row, of all ranks, in the order of the data; each row once, padding left out.

    Args:
        placed: the training mesh's module, as it is.
        function: of the model's output, whole, and the micro-batch: a tensor whose first dim is the rows, or a tuple,
            list or dict of such: `lambda logits, batch: (logits.argmax(1), batch["labels"])`.
        windows: as those of `evaluate`. Rows of `eval_batches` come in the order of the data set; those of batches of
            a script's own batch by batch, and within one rank by rank.

    Returns:
        What the function gives, with all rows, on the CPU: the same on every rank. None where there are no batches.

    Cost: a barrier, forward passes, and one gather of all results, which every rank then holds: return classes or
        scores, not logits of a vocabulary. Each module returns to the mode that it was in.

    Raises:
        UsageError: under `cp`, where a rank has parts of rows; a result that is no tensor of the micro-batch's rows;
            results that differ in shape beside the rows; else as `evaluate`.
        ReplicaError: batches of a script's own that differ on ranks which work on the same rows.

    >>> classes, labels = predict(placed, lambda y, b: (y.argmax(1), b[1]), data.evaluation(rows))  # doctest: +SKIP
    """
    check_placed(placed, "predict")
    mesh = placed.mesh
    if mesh.size("cp") > 1:
        raise UsageError(
            f"predict(): found `{placed.plan}`, where each rank of cp has parts of the rows; needed a plan without cp: "
            "load the checkpoint under one, or evaluate() with a function that gives a sum and a weight"
        )
    chunks: list[tuple[Place, _Rows]] = []
    shapes: list[Any] = []

    def take(result: Any, batch: Any, is_zero: bool, place: Place) -> None:
        rows = _checked(result, num_rows(batch))
        if not is_zero and mesh.index("tp") == 0:
            chunks.append((place, {path: row.detach().cpu() for path, row in rows.items()}))
            shapes[:] = shapes or [put(result, dict.fromkeys(rows))]  # the containers, without what is in them

    def of_whole(output: Any, batch: Any) -> Any:
        parts = {path: leaf.full_tensor() for path, leaf in leaves(output) if isinstance(leaf, DTensor)}
        return function(put(output, parts), batch)

    def number(_result: Any, _batch: Any) -> torch.Tensor:
        return torch.zeros((), device=mesh.device)

    go_through(placed, windows, Pass(doing="predict()", function=of_whole, take=take, number=number))
    everyone: list[Any] = [(chunks, shapes)]
    if mesh.world > 1 and dist.get_backend() != "fake":
        everyone *= mesh.world
        dist.all_gather_object(everyone, (chunks, shapes), group=group_apart(mesh, "calls"))
    ordered = sorted((chunk for mine, _ in everyone for chunk in mine), key=lambda chunk: chunk[0])
    shape = next((shape for _, (shape,) in filter(lambda one: one[1], everyone)), None)
    if not ordered:
        return None
    rows, order = [chunk for _, chunk in ordered], _order(ordered)
    return put(shape, {path: _joined(path, rows)[order] for path in rows[0]})


def _order(chunks: list[tuple[Place, _Rows]]) -> torch.Tensor | slice:
    """Of the rows of sorted micro-batches, the order of the data: each rank reads every n-th row of a stream."""
    if all(place.stride == 1 for place, _ in chunks):
        return slice(None)
    sizes = [len(next(iter(rows.values()))) for _, rows in chunks]
    at = [place.first + place.stride * torch.arange(n) for (place, _), n in zip(chunks, sizes, strict=True)]
    return torch.cat(at).argsort(stable=True)


def _checked(result: Any, rows: int) -> _Rows:
    found = {path: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for path, leaf in leaves(result)}
    for leaf in found.values():
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise UsageError(
                f"predict(): the function gave {what} for a micro-batch of {rows} rows; {_NEEDED}; of a sum and its "
                "weight evaluate() makes one"
            )
    if not found:
        raise UsageError(f"predict(): the function gave an empty {type(result).__name__}; {_NEEDED}")
    return found


def _joined(path: Path, ordered: list[_Rows]) -> torch.Tensor:
    parts = [rows.get(path) for rows in ordered]
    shapes = sorted({tuple(part.shape[1:]) for part in parts if part is not None})
    if len(shapes) > 1 or any(part is None for part in parts) or len({len(rows) for rows in ordered}) > 1:
        where = f" at {'.'.join(map(str, path))}" if path else ""
        raise UsageError(
            f"predict(): the function's results{where} have rows of shapes {', '.join(map(str, shapes[:3]))}, or parts "
            "that some micro-batches have and others have not; needed the same of each: pad them to one length in the "
            "function"
        )
    return torch.cat([part for part in parts if part is not None])
