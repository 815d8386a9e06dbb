"""Whether a forward makes rows of other rows, where no rank can call it alone: its operations followed, by shapes.

A norm over rows by hand, the largest number of a batch, a capacity filled row by row, a balancing loss that is a
product of two means: of a part of the rows each is another. Nothing is computed for it, and no rank meets another.
What no rule knows is followed no further.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.model.infer.flow import Call, EndsSplitError, Split, after
from shardwise.parallel.history import tensors_in
from shardwise.parallel.torch_private import OperationMode


class Of(Enum):
    """What a tensor without rows is, of rows."""

    SUM = "a sum or mean over rows, or what is linear in such: those of parts add up"
    ALL = "of all rows in another way"


_SUMS = {"sum", "mean"}
_NORMS = {"linalg_vector_norm", "norm"}
_ALL = {"amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "logsumexp"} | _NORMS
_ALONG = {"cumsum", "cumprod", "_softmax", "_log_softmax", "sort", "flip", "roll", "topk", "logcumsumexp"}
_LINEAR = {
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand",
    "select", "slice", "cat", "stack", "clone", "alias", "detach", "_to_copy", "t", "transpose", "permute", "copy",
    "native_dropout", "index_select", "unbind", "split",
}  # fmt: skip
_OF_TWO = {"mul", "div", "mm", "addmm", "bmm"}
"""Linear in one of two, where the other is not of rows; of a quotient, the first."""
_EMPTY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
          "new_empty", "new_full", "zero_", "fill_"}  # fmt: skip


_KERNELS = ("_scaled_dot_product", "convolution", "native_group_norm", "native_batch_norm", "_native_batch_norm",
            "cudnn_batch_norm", "max_pool", "avg_pool", "adaptive_", "_adaptive_", "upsample", "_upsample",
            "reflection_pad", "replication_pad")  # fmt: skip
"""Beginnings of names of kernels that take rows along dim 0 and give them so; batch norms are of all, by `apply`."""


class Rows(OperationMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Within it a forward runs; `found` says what has met the rows.

    Cost: some 20 microseconds per operation.
    """

    supports_higher_order_operators = True

    def __init__(self, rows: int, given: Iterable[Tensor]) -> None:
        """`given`: what the forward is called with; those with as many rows have them along dim 0."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.found = ""
        self._marks: Any = WeakIdKeyDictionary()
        self._by: Any = WeakIdKeyDictionary()
        for tensor in given:
            if tensor.dim() and tensor.shape[0] == rows > 1:
                self._marks[tensor] = Split(0, 1, rows, 1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation comes here."""
        result = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, kwargs or {})))
        if self.found or not any(tensor in self._marks for tensor in given):
            return result
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "aten":  # a collective, a kernel of somebody's: what comes of it nobody knows
            for tensor in (*given, *tensors_in(result)):
                self._marks.pop(tensor, None)
            return result
        shape = tuple(next(iter(tensors_in(result)), given[0]).shape)
        call = Call(name.removesuffix("_"), args, kwargs or {}, tuple(given), (), shape)
        mark, by = self._of(func, call, result)
        for tensor in tensors_in(result):
            if mark is None:
                self._marks.pop(tensor, None)
            else:
                self._marks[tensor], self._by[tensor] = mark, by
        return result

    def learned(self, output: Any, does: str = "returns") -> str:
        """What a forward has returned, or left, that is of all rows, and that gradients go through; empty: nothing."""
        for tensor in tensors_in(output):
            if not self.found and self._marks.get(tensor) is Of.ALL and tensor.requires_grad:
                self.found = f"{self._by[tensor]}, in a tensor {tuple(tensor.shape)} that it {does}"
        return self.found

    def _of(self, func: Any, call: Call, result: Any) -> tuple[Split | Of | None, str]:
        """What comes of an operation, and by which."""
        base, given, marks = call.name, call.operands, [self._marks.get(tensor) for tensor in call.operands]
        told = next((self._by[t] for t, mark in zip(given, marks, strict=True) if isinstance(mark, Of)), f"`{base}`")
        pointwise = torch.Tag.pointwise in func.tags
        if func._schema.name.removeprefix("aten::") in _EMPTY:
            return None, told
        if not any(isinstance(mark, Of) for mark in marks):
            return _of_rows(replace(call, splits=tuple(marks)), result, pointwise=pointwise)
        if any(isinstance(mark, Split) for mark in marks):
            return self._met(call, marks, told, pointwise=pointwise), told
        is_one = sum(mark is not None for mark in marks) == 1 and (base != "div" or marks[0] is not None)
        linear = Of.ALL not in marks and (base in _LINEAR or (base in _OF_TWO and is_one))
        known = pointwise or base in _LINEAR | _OF_TWO | _ALL | _ALONG
        known |= any(mark is Of.ALL and t.is_floating_point() for t, mark in zip(given, marks, strict=True))  # no index
        return (Of.SUM if linear else Of.ALL if known else None), told

    def _met(self, call: Call, marks: list[Any], told: str, *, pointwise: bool) -> Split | Of | None:
        """Of all rows, and rows. A mean of one number that is added to each stays a mean; a count is for a mask."""
        base, given = call.name, call.operands
        numbers = [tensor for tensor, mark in zip(given, marks, strict=True) if isinstance(mark, Of)]
        if base in ("add", "sub", "rsub") and Of.ALL not in marks and not any(tensor.dim() for tensor in numbers):
            return next(mark for mark in marks if isinstance(mark, Split))
        if not (pointwise or base in _OF_TWO | {"where"}):
            return None
        if any(t.is_floating_point() for t, mark in zip(given, marks, strict=True) if isinstance(mark, Split)):
            self.found = f"{told}, which meets each row in `{base}`"
        return Of.ALL


def _of_rows(call: Call, result: Any, *, pointwise: bool) -> tuple[Split | Of | None, str]:
    """What comes of rows, and of tensors that nobody has followed."""
    base, given, marks = call.name, call.operands, call.splits
    if not any(True for _ in tensors_in(result)):
        return None, ""
    if (kept := _kept(call)) is not None:
        return kept, ""
    if base in _NORMS:  # which has its dims where a sum has none
        call = replace(call, name="amax", args=(given[0], call.argument(2, "dim")), kwargs={})
    try:
        return after(call, pointwise=pointwise), ""
    except (EndsSplitError, ValueError, IndexError, TypeError):
        both = base in ("mm", "bmm") and all(mark is not None for mark in marks)
        dims = [mark.dim - tensor.dim() for mark, tensor in zip(marks, given, strict=True) if mark is not None]
        if base in _SUMS or (both and dims == [-1, -2]):
            return Of.SUM, f"`{base}` over rows"
        if base in _ALL | _ALONG or both:
            return Of.ALL, f"`{base}` over rows"
        return (_beside(call) if pointwise else None), ""


def _kept(call: Call) -> Split | None:
    """Where rows are after an operation of which the rules of splits say nothing."""
    base, given, marks = call.name, call.operands, call.splits
    own = next(mark for mark in marks if isinstance(mark, Split))
    if base.startswith(_KERNELS):
        return own if marks[0] == own and own.dim == 0 and own.pre == 1 else None
    if base == "embedding":
        return own if marks[0] is None else None
    if base in ("scatter", "gather", "scatter_add"):  # along a dim beside the rows
        dims = {tensor.dim() for tensor in given if tensor.dim()}
        beside = len(dims) == 1 and call.args[1] % given[0].dim() != own.dim
        return own if beside and all(mark in (None, own) for mark in marks) else None
    return None


def _beside(call: Call) -> Split | None:
    """Element by element with a tensor that nobody has followed, and that has as much along the dim of rows."""
    found = [
        Split(mark.dim + len(call.result) - tensor.dim(), mark.pre, mark.count, mark.post)
        for tensor, mark in zip(call.operands, call.splits, strict=True)
        if mark is not None
    ]
    return found[0] if all(split == found[0] for split in found) else None
