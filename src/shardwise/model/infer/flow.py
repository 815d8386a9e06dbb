"""What becomes of a split when an operation runs: rules for each operation of ATen, pure functions of shapes.

A tensor is split when every rank of the `tp` axis holds a slice of one dim. A split is right through an operation when
the operation on slices gives the slices of what the operation on the whole gives. What no rule knows ends a split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A dim of size `pre * count * post`, cut into runs of `post`, of which each rank has the same share of `count`.

    Heads in a dim of features: `count` heads of `post` features each. Merged into a batch: `pre` is the batch.
    """

    dim: int
    pre: int
    count: int
    post: int


class EndsSplitError(Exception):
    """An operation that does not act on slices as on the whole; says why."""


@dataclass(frozen=True)
class Call:
    """An operation, its arguments and the splits of its tensors."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[torch.Tensor, ...]
    splits: tuple[Split | None, ...]
    result: Shape
    """Of the first tensor that it gives."""

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def split(self) -> Split:
        """The split of the first operand.

        Raises:
            EndsSplitError: it is whole, and another operand is split.
        """
        first = self.splits[0]
        if first is None:
            raise EndsSplitError(f"`{self.name}` takes it together with a whole tensor")
        return first


def after(call: Call, *, pointwise: bool) -> Split | None:
    """The split of an operation's results; its operands have at least one.

    Raises:
        EndsSplitError: the operation needs the whole.
    """
    rule = _RULES.get(call.name.rstrip("_") if call.name not in _RULES else call.name)
    if rule is not None:
        return rule(call)
    if pointwise or call.name.rstrip("_") in _LIKE:
        return _pointwise(call)
    raise EndsSplitError(f"`{call.name}` is not known to work on slices")


def common(splits: Sequence[Split]) -> Split | None:
    """The split that several tensors of one shape have together; None where they are split differently."""
    first = splits[0]
    for other in splits[1:]:
        if (other.dim, other.pre, other.count * other.post) != (first.dim, first.pre, first.count * first.post):
            return None
        count = math.gcd(first.count, other.count)
        first = Split(first.dim, first.pre, count, first.count * first.post // count)
    return first


def local_shape(shape: Shape, split: Split | None, degree: int) -> Shape:
    """The shape of a rank's slice."""
    if split is None:
        return shape
    return (*shape[: split.dim], shape[split.dim] // degree, *shape[split.dim + 1 :])


def reshaped(split: Split, old: Shape, new: Shape) -> Split:
    """The split after the same elements in the same order take another shape.

    A factor keeps the number of elements behind it; where the new dims cut the factor, its outer part stays split.

    Raises:
        EndsSplitError: the slices are no slices of one dim any more.
    """
    inner = split.post * math.prod(old[split.dim + 1 :])
    count = split.count
    suffix = 1
    for dim in range(len(new) - 1, -1, -1):
        size, before = new[dim], suffix * new[dim]
        if size == 1 or before <= inner:
            suffix = before
            continue
        if inner % suffix:
            # the factor begins inside this dim's run: nothing to cut it by
            raise EndsSplitError(f"a reshape from {list(old)} to {list(new)} cuts across it")
        inside = before // inner  # how many of the factor's steps this dim holds
        if before % inner or (inside % count and count % inside):
            raise EndsSplitError(f"a reshape from {list(old)} to {list(new)} cuts across it")
        if inside >= count:
            return Split(dim, inside // count, count, inner // suffix)
        count //= inside  # the outer part of the factor is in the next dims
        inner, suffix = before, before
    raise EndsSplitError(f"a reshape from {list(old)} to {list(new)} cuts across it")


Rule = Callable[[Call], Split | None]


def _view(call: Call) -> Split:
    return reshaped(call.split, tuple(call.operands[0].shape), call.result)


def _permute(call: Call) -> Split:
    split, ndim = call.split, call.operands[0].dim()
    order = [d % ndim for d in call.args[1]]
    return Split(order.index(split.dim), split.pre, split.count, split.post)


def _transpose(call: Call) -> Split:
    split, ndim = call.split, call.operands[0].dim()
    one, two = (d % ndim for d in (call.argument(1, "dim0", 0), call.argument(2, "dim1", 1)))
    dim = {one: two, two: one}.get(split.dim, split.dim)
    return Split(dim, split.pre, split.count, split.post)


def _expand(call: Call) -> Split:
    split, shape = call.split, call.operands[0].shape
    dim = split.dim + len(call.result) - len(shape)
    if call.result[dim] != shape[split.dim]:
        raise EndsSplitError("`expand` repeats it")
    return Split(dim, split.pre, split.count, split.post)


def _pointwise(call: Call) -> Split:
    """Operands meet element by element, broadcast from the right."""
    found = [
        Split(s.dim + len(call.result) - t.dim(), s.pre, s.count, s.post)
        for t, s in zip(call.operands, call.splits, strict=True)
        if s is not None
    ]
    split = common(found)
    if split is None:
        raise EndsSplitError(f"`{call.name}` joins tensors that are split along different dims")
    for tensor, own in zip(call.operands, call.splits, strict=True):
        dim = split.dim - len(call.result) + tensor.dim()
        if own is None and dim >= 0 and tensor.shape[dim] != 1:
            raise EndsSplitError(f"`{call.name}` joins it with a whole tensor of shape {list(tensor.shape)}")
    return split


def _along(index: int, name: str, default: Any = None) -> Rule:
    """Operations along dims that stay: right where the split is along another."""

    def rule(call: Call) -> Split:
        split, ndim = call.split, call.operands[0].dim()
        if split.dim in _dims(call.argument(index, name, default), ndim):
            raise EndsSplitError(f"`{call.name}` goes along the dim that would be split")
        return split

    return rule


def _dims(given: Any, ndim: int) -> set[int]:
    if given is None or given == []:
        return set(range(ndim))
    return {d % ndim for d in (given if isinstance(given, list | tuple) else [given])}


def _reduce(call: Call) -> Split:
    """Sums and the like over dims, kept with size 1 or dropped."""
    split, ndim = call.split, call.operands[0].dim()
    dims = _dims(call.argument(1, "dim"), ndim)
    if split.dim in dims:
        raise EndsSplitError(f"`{call.name}` runs over the dim that would be split")
    kept = len(call.result) == ndim
    dim = split.dim if kept else split.dim - sum(d < split.dim for d in dims)
    return Split(dim, split.pre, split.count, split.post)


def _select(call: Call) -> Split:
    split, ndim = call.split, call.operands[0].dim()
    (at,) = _dims(call.argument(1, "dim", 0), ndim)
    if at == split.dim:
        raise EndsSplitError(f"`{call.name}` takes a piece of the dim that would be split")
    return Split(split.dim - (at < split.dim), split.pre, split.count, split.post)


def _slice(call: Call) -> Split:
    split, shape = call.split, call.operands[0].shape
    if tuple(shape) == call.result:
        return split
    (at,) = _dims(call.argument(1, "dim", 0), len(shape))
    if at == split.dim:
        raise EndsSplitError("`slice` takes a piece of the dim that would be split")
    return split


def _join(call: Call) -> Split:
    """`cat` along another dim: all parts split alike. `stack` adds a dim."""
    empty = [tuple(t.shape) == (0,) for t in call.operands]  # torch lets `cat` take these, whatever the others are
    if any(split is None and not nothing for split, nothing in zip(call.splits, empty, strict=True)):
        raise EndsSplitError(f"`{call.name}` joins it with a whole tensor")
    split = common([s for s in call.splits if s is not None])
    at = call.argument(1, "dim", 0) % len(call.result)
    if split is None or (call.name == "cat" and at == split.dim):
        raise EndsSplitError(f"`{call.name}` goes along the dim that would be split")
    dim = split.dim + (call.name == "stack" and at <= split.dim)
    return Split(dim, split.pre, split.count, split.post)


def _matmul(call: Call) -> Split:
    """`mm`, `addmm`, `bmm`, `baddbmm`: rows of the first or columns of the second, or the batch of both."""
    operands, splits = call.operands[-2:], call.splits[-2:]
    if len(call.operands) == 3 and call.splits[0] is not None:
        raise EndsSplitError(f"`{call.name}` adds to it")
    batch = operands[0].dim() - 2
    one, two = splits
    if batch and one and two and one.dim == two.dim == 0:
        both = common([one, two])
        if both is None:
            raise EndsSplitError(f"`{call.name}` multiplies batches that are split differently")
        return both
    if one and not two and one.dim == batch:
        return Split(batch, one.pre, one.count, one.post)
    if two and not one and two.dim == batch + 1:
        return Split(batch + 1, two.pre, two.count, two.post)
    raise EndsSplitError(f"`{call.name}` sums over the dim that would be split, or joins it with a whole tensor")


def _norm(call: Call) -> Split:
    """Layer norm and RMS norm: over the last dims."""
    split, ndim = call.split, call.operands[0].dim()
    if split.dim >= ndim - len(call.args[1]):
        raise EndsSplitError("a norm runs over the dim that would be split")
    if any(other is not None for other in call.splits[1:]):
        raise EndsSplitError("a norm has a weight that would be split")
    return split


def _pad(call: Call) -> Split:
    split, ndim = call.split, call.operands[0].dim()
    pads = list(call.args[1])
    if any(pads[2 * i] or pads[2 * i + 1] for i in range(len(pads) // 2) if ndim - 1 - i == split.dim):
        raise EndsSplitError("padding is added to the dim that would be split")
    return split


def _each(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli", "fill", "zero"}
_LIKE |= {"copy", "_to_copy", "clone", "alias", "detach", "native_dropout", "masked_fill", "where", "uniform"}
_RULES: dict[str, Rule] = {
    **_each(_view, "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"),
    **_each(_permute, "permute"),
    **_each(_transpose, "transpose", "t", "transpose_"),
    **_each(_expand, "expand"),
    **_each(_along(1, "dim"), "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "flip", "logcumsumexp"),
    **_each(_along(2, "dim", 0), "split", "split_with_sizes"),
    **_each(_along(2, "dims", None), "roll"),
    **_each(_along(2, "dim", -1), "topk"),
    **_each(_along(1, "dim", -1), "sort", "glu"),
    **_each(_along(1, "dim", 0), "index_select"),
    **_each(_reduce, "sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "max", "min", "any", "all"),
    **_each(_reduce, "argmax", "argmin", "var_mean"),
    **_each(_select, "select", "unbind"),
    **_each(_slice, "slice"),
    **_each(_join, "cat", "stack"),
    **_each(_matmul, "mm", "addmm", "bmm", "baddbmm"),
    **_each(_norm, "native_layer_norm", "_fused_rms_norm"),
    **_each(_pad, "constant_pad_nd"),
}
PIECES = {"split", "split_with_sizes", "slice", "select", "unbind", "glu", "index_select"}
"""Operations that take pieces of a dim: what they end was a fused projection."""
