"""How a micro-batch becomes the arguments of the model's forward."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.arguments import is_loss_key, required_by
from shardwise.model.nested import leaves


@dataclass(frozen=True)
class Signature:
    """Which keys of a dict batch a module's forward takes; None: any (`**kwargs`)."""

    names: tuple[str, ...] | None
    module: str
    required: frozenset[str] = frozenset()
    """Those without a default."""

    @classmethod
    def of(cls, module: nn.Module) -> Signature:
        """Read it from the module's forward."""
        parameters, required = inspect.signature(module.forward).parameters.values(), required_by(module.forward)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return cls(None, type(module).__name__, required)
        names = tuple(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)
        return cls(names, type(module).__name__, required)


def model_inputs(batch: Any, signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that a micro-batch gives to the model.

    A dict gives the keys that forward names, all but those of `labels` and `weight` that it does without; a tuple or
    list gives its first item; a tensor gives itself.

    Raises:
        ModelError: a dict of which forward takes no key, or whose first tensor has other rows than those of its keys;
            an object of another kind.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        takes = {
            key: value
            for key, value in batch.items()
            if not is_loss_key(key, signature.required) and (signature.names is None or key in signature.names)
        }
        if not takes:
            raise ModelError(
                f"{signature.module}.forward takes {', '.join(signature.names or ())}, and none of them is in the "
                f"batch, which has {', '.join(map(str, batch))}; rename the keys in the collate function or the "
                "arguments of forward, or give batches as tuples (inputs, targets)"
            )
        _check_rows(batch, takes)
        return (), takes
    if not isinstance(batch, tuple | list):
        raise ModelError(
            f"a batch is a tensor, a dict, a tuple or a list: found {type(batch).__name__}; in the collate function "
            f"make it a dict whose keys are arguments of {signature.module}.forward "
            f"({', '.join(signature.names or ())}), or a tuple whose first item the model gets"
        )
    return (batch[0],), {}


def _check_rows(batch: Mapping[Any, Any], takes: Mapping[Any, Any]) -> None:
    """A batch has as many rows as its first tensor: a table that stands before what the model gets would tell them."""
    if (first := _first(batch)) is not None and first is _first(takes):
        return
    given = [leaf.shape[0] for _, leaf in leaves(takes) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = num_rows(batch) if given else 0
    if given and rows not in given and _list_of_samples(batch) is None:
        raise ModelError(
            f"the first tensor of a batch tells how many rows it has: found {rows}, and {given[0]} in what the model "
            f"gets ({', '.join(map(str, takes))}); put that first"
        )


def as_dict(batch: Any) -> Any:
    """A batch that is a mapping of another class, as those of `transformers` are, as a dict; anything else as it is."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def num_rows(batch: Any) -> int:
    """Samples in a micro-batch: the first dim of the first tensor in it that has dims.

    If that stands in a list of tensors (sequences, pictures, clouds of points), and what is beside the list has as many
    rows as the list has items, and not as the tensor has, the items are the samples.

    Raises:
        ModelError: it has none.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch.shape[0]
    if (first := _first(batch)) is not None:
        return first.shape[0]
    if (items := _list_of_samples(batch)) is not None:
        return len(items)
    found = next((leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    if found is None:
        raise ModelError(
            f"a batch of type {type(batch).__name__} holds no tensor with rows; needed a tensor, or a tuple, list or "
            "dict with one whose first dim is the rows; give one in the collate function"
        )
    return found.shape[0]


def _first(batch: Any) -> torch.Tensor | None:
    """The tensor with rows that a batch begins with: most do, and it tells how many without a look at the rest."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    first = next(iter(values), None)
    return first if isinstance(first, torch.Tensor) and first.dim() else None


def _list_of_samples(batch: Any) -> list[torch.Tensor] | None:
    """The list of tensors with a batch's first tensor, where its items are the batch's rows."""
    if not isinstance(batch, Mapping | tuple | list):
        return None
    values = list(batch.values() if isinstance(batch, Mapping) else batch)
    place = next((i for i, value in enumerate(values) if _tensors_in(value)), None)
    items = values[place] if place is not None else None
    if not isinstance(items, list) or not all(isinstance(item, torch.Tensor) and item.dim() for item in items):
        return None
    beside, lengths = set(), {item.shape[0] for item in items}
    for value in values:
        if value is not items and (isinstance(value, list) or _tensors_in(value)):
            beside.add(len(value) if isinstance(value, list) else _tensors_in(value)[0].shape[0])
    fits = len(items) in beside and items[0].shape[0] not in beside
    return items if fits or (not beside and len(lengths) > 1) else None


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()]


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device; the same object where they are there already (CPU)."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return _like(batch, [to_device(value, device) for value in batch])
    return batch


def _like(batch: Any, values: list[Any]) -> Any:
    """The values in the type of the batch: list, tuple or named tuple."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def split_rows(batch: Any, num_parts: int) -> list[Any]:
    """A batch cut into micro-batches along its rows, as evenly as possible, the larger ones first.

    Tensors whose first dim is the rows are cut, and lists within it that have an item for each row.

    Raises:
        ModelError: fewer rows than micro-batches, or a list of which nobody knows how it is divided.
    """
    if num_parts == 1:
        return [batch]
    rows = num_rows(batch)
    if rows < num_parts:
        raise ModelError(f"a batch of {rows} rows cannot be cut into {num_parts} micro-batches; use mb{rows} or fewer")
    share, extra = divmod(rows, num_parts)
    sizes = [share + (i < extra) for i in range(num_parts)]
    starts = [sum(sizes[:i]) for i in range(num_parts)]
    return [_rows(batch, start, size, rows) for start, size in zip(starts, sizes, strict=True)]


def take_rows(batch: Any, start: int, size: int) -> Any:
    """Some rows of a batch, in its form, as `split_rows` cuts them."""
    return _rows(batch, start, size, num_rows(batch))


def divide_rows(batch: Any, num_parts: int) -> tuple[list[Any], tuple[bool, ...]]:
    """A batch as that many micro-batches, and which of them are padding: copies of a row, where there are too few.

    So an uneven last batch has as many on each rank. Without any row all are the batch itself.

    Raises:
        ModelError: see `split_rows`.
    """
    rows = num_rows(batch) if num_parts > 1 else num_parts
    if rows == 0:
        return [batch] * num_parts, (False,) * num_parts
    parts = split_rows(batch, min(rows, num_parts))
    missing = num_parts - len(parts)
    return parts + parts[:1] * missing, (False,) * len(parts) + (True,) * missing


def _rows(batch: Any, start: int, size: int, rows: int, *, inside: bool = False) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start : start + size] if batch.dim() and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return {key: _rows(value, start, size, rows, inside=True) for key, value in batch.items()}
    if inside and isinstance(batch, tuple | list) and _is_per_row(batch, rows):
        return batch[start : start + size]
    if isinstance(batch, tuple | list):
        return _like(batch, [_rows(value, start, size, rows, inside=True) for value in batch])
    return batch


def _is_per_row(values: tuple[Any, ...] | list[Any], rows: int) -> bool:
    """Whether a list has an item for each row, as boxes and captions have; else its items may have the rows."""
    if len(values) != rows or hasattr(values, "_fields"):
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    have = [tensor.shape[0] == rows for tensor in tensors]
    is_ragged = len(tensors) == rows and len({tensor.shape[1:] for tensor in tensors}) == 1
    if rows > 1 and len(have) == rows and all(have):
        raise ModelError(
            f"a list of {rows} tensors with {rows} rows each is in a batch of {rows} rows, so that each may be of "
            "one row or of all; stack it, name its parts in a dict, or give a list of micro-batches"
        )
    return is_ragged or not any(have)  # boxes of one row may be as many as the rows


def distinct(micro: list[Any]) -> list[Any]:
    """Micro-batches as different objects: padding may be the same object as the rows that it copies."""
    seen: set[int] = set()
    result = []
    for batch in micro:
        result.append(copy.copy(batch) if id(batch) in seen else batch)
        seen.add(id(batch))
    return result
