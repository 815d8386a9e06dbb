"""Whether a loss is what a step takes it for, a mean over rows or a sum over them with its weight: told by parts.

Each micro-batch of each rank has a loss of its own. A sum that is returned as a mean, a mean over tokens that count, a
root of a mean, a loss that compares rows (in-batch negatives, a statistic of the batch): of parts each is another
number than of the whole, without a word.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.model.nested import leaves, put
from shardwise.parallel.inputs import num_rows, take_rows
from shardwise.parallel.module_torch_private import global_hooks
from shardwise.parallel.named import named_by
from shardwise.parallel.randomness.generators import restore, states
from shardwise.train.look import Look, quietly
from shardwise.train.loss import as_loss

ENOUGH, MOST = 2**22, 2**26
"""Numbers of an output that are looked at, and above which two rows are too many."""
PARTS = 4
"""So many that those of a mean over what counts hardly have equal numbers of it."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of a sum; of half types a tenth."""
LossFn = Callable[[Any, Any], Any]
_OfPart = Callable[[int, int], Any]


class _DrawsError(Exception):
    """What is called draws, other numbers for a part than for the whole."""


def unlike_parts(loss_fn: LossFn, output: Any, batch: Any, *, later: bool = False) -> str:
    """How the loss of some rows differs from what the losses of their parts make; empty: it does not.

    Or nobody can tell: of outputs of which no tensor has these rows, of one row, of a loss that draws or fails on
    parts. What it leaves in lists, dicts, attributes, names and buffers is put back, and generators are. A tensor
    without rows (a number, weights of tasks) may be a mean, or none of the batch's, or a sum: one of these must add up.

    Args:
        loss_fn: of which `Repeatable` holds.
        output: of the model.
        batch: the micro-batch that it is of.
        later: of the second call for the same rows, which reads what the first has kept of them.

    Cost: three times the loss function, twice that where some have no rows, on `ENOUGH` numbers of the output or two
    rows, without gradients; six times, `later`.
    """
    tensors = {path: leaf for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)}
    is_plain = all(type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta for t in tensors.values())
    if not is_plain or (rows := _num_rows(batch)) < 2:
        return ""
    sums = {path: tensor for path, tensor in tensors.items() if not tensor.dim() or tensor.shape[0] % rows}
    of_rows = {path: tensor for path, tensor in tensors.items() if path not in sums}
    if not of_rows or any(tensor.shape[0] != rows for tensor in of_rows.values()):
        return ""
    per_row = sum(tensor.numel() for tensor in of_rows.values()) // rows
    count = min(rows, max(2, ENOUGH // max(1, per_row)))
    if count * per_row > MOST:
        return ""

    def loss(start: int, stop: int, share: float) -> Any:
        part = {path: tensor[start:stop].clone() for path, tensor in of_rows.items()}
        part |= {path: tensor * share for path, tensor in sums.items()}
        return loss_fn(put(output, part), _own_rows(batch, start, stop))

    tolerance = max(_TOLERANCE.get(t.dtype, 0.1) for t in of_rows.values())
    device = next(iter(of_rows.values())).device
    look = Look(device, loss_fn, output, batch)
    asked = partial(_second, look, device) if later else _once

    as_it_is = _of_pieces(asked(lambda start, stop: loss(start, stop, 1)), look, count, tolerance)
    if not (as_it_is and sums):
        return as_it_is
    as_sum = _of_pieces(asked(lambda start, stop: loss(start, stop, (stop - start) / count)), look, count, tolerance)
    return as_sum and as_it_is


def _once(loss: _OfPart) -> _OfPart:
    return loss


def _second(look: Look, device: torch.device, loss: _OfPart) -> _OfPart:
    """The loss of a part when it is asked for it again, from one state of what it keeps: that of no other part."""

    def again(start: int, stop: int) -> Any:
        before = states(device)
        with look.kept():
            loss(start, stop)
            result = loss(start, stop)
            if states(device) != before:
                raise _DrawsError
        return result

    return again


def remembers(loss_fn: LossFn, output: Any, batch: Any, before: Mapping[str, bytes], given: Any) -> str:
    """How a loss differs when it is asked for the same rows once more; empty: it does not, or nobody can tell.

    It keeps something of one call for the next: a hidden state, a mean of what it has seen, a count.

    Args:
        loss_fn: of which `Repeatable` holds, and which writes into none of what it is given.
        output: of the model.
        batch: the micro-batch that it is of.
        before: where generators were at its first call.
        given: what that returned.

    Cost: twice the loss function, without gradients.
    """
    tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    rows = _num_rows(batch)
    if not tensors or not rows or sum(tensor.numel() for tensor in tensors) > MOST:
        return ""
    device, found = tensors[0].device, list[float]()
    look = Look(device, loss_fn, output, batch)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), quietly():
        for _ in range(2):  # from one state of what it keeps: what differs then is no memory
            with look.kept():
                restore(before, device)
                found.append(_numbers(loss_fn(output, batch), rows)[2])
    if len(found) < 2:
        return ""
    first = _numbers(given, rows)[2]
    tolerance = max(_TOLERANCE.get(tensor.dtype, 0.1) for tensor in tensors)
    if found[0] != found[1] or not math.isfinite(first) or abs(first - found[0]) <= tolerance * max(1e-30, abs(first)):
        return ""
    if rows > 1 and _is_of_each_row(
        lambda start, stop: loss_fn(_rows(output, rows, start, stop), take_rows(batch, start, stop - start)),
        look,
        partial(restore, before, device),
        rows // 2,
    ):
        return ""
    return f"it gives {first:.5g} for {rows} rows, and for the same ones {found[0]:.5g} when it is called again"


def _is_of_each_row(loss: Callable[[int, int], Any], look: Look, draw_alike: Callable[[], None], half: int) -> bool:
    """Whether what is kept of some rows is nothing to others: a weight, a target, the last loss of each sample."""
    found = []
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), quietly():
        for starts in ((half,), (0, half)):
            with look.kept():
                for start in starts:
                    draw_alike()
                    result = loss(start, start + half)
                found.append(_numbers(result, half)[2])
    return len(found) == 2 and found[0] == found[1]


def _rows(output: Any, rows: int, start: int, stop: int) -> Any:
    """Some of what a model returned; what has no rows is what it is."""
    of_rows = {p: leaf for p, leaf in leaves(output) if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (rows,)}
    return put(output, {path: leaf[start:stop] for path, leaf in of_rows.items()})


def _own_rows(batch: Any, start: int, stop: int) -> Any:
    """Some rows of a batch, which may be written into: the backward pass that follows reads the batch's own."""
    rows = take_rows(batch, start, stop - start)
    return put(rows, {path: leaf.clone() for path, leaf in leaves(rows) if isinstance(leaf, torch.Tensor)})


class OfModel:
    """The same of a model and the loss function together: one whose rows, or numbers, are made of each other's."""

    def __init__(self, loss_fn: LossFn, run: Callable[[Any], Any], model: nn.Module, output: Any, batch: Any) -> None:
        """Make one at its first micro-batch.

        Args:
            loss_fn: of which `Repeatable` holds.
            run: a micro-batch -> the model's output, by this rank alone.
            model: that it calls.
            output: of the model.
            batch: the micro-batch that it is of.
        """
        self._rows = min(_num_rows(batch), 2 * PARTS)
        found = [t for _, t in leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.returns_numbers = any(not tensor.dim() for tensor in found)
        per_row = sum(tensor.numel() for tensor in found) // max(1, _num_rows(batch))
        self._can = bool(found) and self._rows > 1 and per_row * self._rows <= MOST
        self._can = self._can and not any(tensor.is_meta for tensor in found)
        if self._can:
            self._device = found[0].device
            self._tolerance = 10 * max(_TOLERANCE.get(tensor.dtype, 0.1) for tensor in found)
            self._look = Look(self._device, loss_fn, model, batch, global_hooks())

        def loss(start: int, stop: int) -> Any:
            part = _own_rows(batch, start, stop)
            return loss_fn(run(part), part)

        self._loss = loss

    def unlike_parts(self, *, later: bool = False) -> str:
        """See the function of this name.

        Cost: three forwards of at most eight rows, without gradients, six `later`; less where one calls other ranks,
        or the compiler.
        """
        if not self._can:
            return ""
        loss = _second(self._look, self._device, self._loss) if later else self._loss
        return _of_pieces(loss, self._look, self._rows, self._tolerance)

    def remembers(self) -> str:
        """How the loss of some rows differs when the model has seen others before; empty: it does not, as far as told.

        Cost: five forwards of at most eight rows, without gradients.
        """
        if not self._can:
            return ""
        found: list[float] = []
        before = states(self._device)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"), quietly(), self._look.kept():
            for _ in range(2):
                restore(before, self._device)
                found.append(_numbers(self._loss(0, self._rows), self._rows)[2])
        if len(found) < 2 or abs(found[0] - found[1]) <= self._tolerance * abs(found[0]) or not math.isfinite(found[0]):
            return ""
        if _is_of_each_row(self._loss, self._look, partial(restore, before, self._device), self._rows // 2):
            return ""
        return f"it gives {found[0]:.5g} for {self._rows} rows, and for the same ones {found[1]:.5g} when called again"


def _of_pieces(loss: Callable[[int, int], Any], look: Look, count: int, tolerance: float) -> str:
    """What the losses of rows from .. to make of `count` rows, of these once more, and of their parts."""
    cuts = [count * i // min(count, PARTS) for i in range(min(count, PARTS) + 1)]
    found, is_done = list[tuple[float, float, float]](), False
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), quietly(), look.kept():
        for start, stop in [(0, count), (0, count), *pairwise(cuts)]:
            found.append(_numbers(loss(start, stop), stop - start))
        if 2 < count == len(cuts) - 1:  # of one row each, which goes with as many rows as something else has
            loss(0, count - 1)
        is_done = True  # not of a function, or a batch, that was made for whole micro-batches
    return _compared(*found, tolerance=tolerance, rows=count) if is_done else ""


def _num_rows(batch: Any) -> int:
    """Rows of a micro-batch; 0: of one that has none that can be told."""
    try:
        return num_rows(batch)
    except ModelError:
        return 0


def _numbers(result: Any, rows: int) -> tuple[float, float, float]:
    """A loss's sum and weight, and what the function gave."""
    loss = as_loss(result, rows)
    value = float(result.detach()) if isinstance(result, torch.Tensor) else float(loss.sum.detach())
    return float(loss.sum.detach()), float(loss.weight), value


def reached(function: LossFn) -> tuple[list[LossFn], list[nn.Module]]:
    """A function and those of the user's that it names, and the modules that they name."""
    functions, modules = [function], list[nn.Module]()
    for each in functions:  # which grows
        for _, value in named_by(each):
            new: list[Any] = [value]
            if isinstance(value, nn.Module) and value not in modules:
                modules.append(value)
                new = [type(module).forward for module in value.modules()]
            functions += [f for f in new if isinstance(f, FunctionType) and f not in functions and _is_of_user(f)]
    return functions, modules


def _is_of_user(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] not in ("torch", "numpy", "transformers", "shardwise")


def _compared(
    whole: tuple[float, float, float],
    again: tuple[float, float, float],
    *parts: tuple[float, float, float],
    tolerance: float,
    rows: int,
) -> str:
    total, weight = sum(each[0] for each in parts), sum(each[1] for each in parts)
    scale = max(abs(whole[0]), sum(abs(each[0]) for each in parts))
    if not math.isfinite(whole[0]) or abs(again[0] - whole[0]) > tolerance * abs(whole[0]):
        return ""
    if abs(total - whole[0]) <= tolerance * scale and abs(weight - whole[1]) <= 1e-6 * whole[1]:
        return ""
    return f"of {rows} rows it gives {whole[2]:.5g}, of parts of these {', '.join(f'{each[2]:.5g}' for each in parts)}"
