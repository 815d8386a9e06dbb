"""What went through each module of a step, as four numbers per row: enough to say where two runs begin to differ.

The numbers are sums over a row's elements, so those of shards add up to those of the whole, and the order of rows,
ranks and micro-batches does not matter to whoever compares sets of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.inputs import num_rows
from shardwise.parallel.placed import Placed
from shardwise.parallel.stages.stage import PassThrough
from shardwise.parallel.torch_private import in_backward

NUMBERS = 4
"""Sum of x, of |x|, of x^2 and of sin x: a norm's output has the first and third constant, and not the last."""


class Fingerprints:
    """Hooks on every module of a rank that keep the numbers of each call while a step runs."""

    def __init__(self, placed: Placed) -> None:
        """Register the hooks; a compiled model gets none, since they would break its graphs."""
        self.calls: dict[str, list[torch.Tensor]] = {}
        """Module -> one (rows, 4) fp64 tensor per call, modules in the order in which their first call ended."""
        self.is_on = False
        if placed.plan.compile:
            return
        for part in placed.parts:
            for name, module in part.root.named_modules():
                if not isinstance(module, PassThrough):
                    module.register_forward_hook(partial(self._seen, name))

    def start(self) -> None:
        """Forget the last step and listen."""
        self.calls, self.is_on = {}, True

    def stop(self) -> None:
        """Listen no more: what follows is evaluation, or the user's own."""
        self.is_on = False

    def _seen(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if not self.is_on or in_backward():  # a recomputed forward
            return
        with torch.no_grad():
            prints = [fingerprint(tensor) for tensor in floats_in(output)]
        if prints:
            self.calls.setdefault(name, []).extend(prints)


def floats_in(output: Any) -> Iterator[torch.Tensor]:
    """The floating tensors of what a module returned, tuples and dicts opened."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floats_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from floats_in(value)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of each row (first dim): fp64, shape (rows, 4), on the CPU; of a DTensor those of its shard here."""
    if isinstance(tensor, DTensor):
        partial_sum = any(placement.is_partial() for placement in tensor.placements)
        tensor = tensor.full_tensor() if partial_sum else tensor.to_local()
    x = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1).double()
    return torch.stack([x.sum(1), x.abs().sum(1), x.square().sum(1), x.sin().sum(1)], 1).cpu()


def row_names(batch: Any) -> list[str]:
    """A name for the contents of each row of a micro-batch: equal rows, equal names."""
    rows = num_rows(batch)
    hashes = [hashlib.sha256() for _ in range(rows)]
    for tensor in _tensors(batch):
        if tensor.dim() and tensor.shape[0] == rows:
            for digest, row in zip(hashes, tensor.detach().cpu(), strict=True):
                digest.update(row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if row.dim() else b"")
                digest.update(str(row.item()).encode() if not row.dim() else b"")
    return [digest.hexdigest()[:12] for digest in hashes]


def row_forms(batch: Any) -> list[list[str]]:
    """For each row and each tensor three names: of all elements, without equal ones at the end, and at the start.

    A batch that is padded to its longest row has other contents in other company; `same_but_padding` compares them.
    """
    rows = num_rows(batch)
    found: list[list[str]] = [[] for _ in range(rows)]
    for tensor in _tensors(batch):
        if tensor.dim() and tensor.shape[0] == rows:
            for forms, row in zip(found, tensor.detach().cpu(), strict=True):
                forms.append(_forms(row.flatten()))
    return found


def _forms(row: torch.Tensor) -> str:
    """The three names of a flat row: whole, without the equal elements at its end, and at its start."""
    changes = (row != row[-1:]).nonzero()
    end = int(changes[-1]) + 1 if len(changes) else 0
    changes = (row != row[:1]).nonzero()
    start = int(changes[0]) if len(changes) else len(row)
    parts = (row, row[:end], row[start:])
    return ".".join(hashlib.sha256(part.view(torch.uint8).numpy().tobytes()).hexdigest()[:8] for part in parts)


def same_but_padding(one: list[str], other: list[str]) -> bool:
    """Whether two rows, by their forms, hold the same but for equal elements at the ends of their tensors."""
    pairs = [(a.split("."), b.split(".")) for a, b in zip(one, other, strict=False)]
    ends = (set(a[:2]) & set(b[:2]) or set(a[::2]) & set(b[::2]) for a, b in pairs)
    return len(one) == len(other) > 0 and all(ends)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from _tensors(batch[key])
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _tensors(value)
