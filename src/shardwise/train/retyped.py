"""Weights that a checkpoint keeps in another precision than this run: read as they are stored, then changed.

The most exact of what is stored counts: the fp32 master of a weight, where the run that saved had one. A run that keeps
masters gives them that value, and its weights are the rounding of it. Each rank changes its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.train.optim import MASTER, PREFIX, NamedOptimizer
from shardwise.train.state_values import Kind
from shardwise.train.update_rules import local_shard

MODEL = "model."
_FLOATS = {"float64", "float32", "bfloat16", "float16"}


class Retyped:
    """One weight, buffer, average of weights, or tensor of an optimizer whose numbers change their type.

    Args:
        name: of the tensor.
        before: torch's names of the stored types: of the tensor, and of its master where one is stored.
        kept: the tensors of this run, and of its master where it keeps one; only shapes, types and layouts are used.

    Attributes:
        targets: names of what is made.
    """

    setting = "plan.precision"

    def __init__(self, name: str, before: tuple[str, ...], kept: tuple[Tensor, ...]) -> None:
        """See the class."""
        self.name, self.before, self.now = name, _said(before), _said(tuple(_word(tensor.dtype) for tensor in kept))
        self.what = self.counted = "weights" if name.startswith(MODEL) else "averages"
        self._names = (name, f"{PREFIX}{name.removeprefix(MODEL)}.{MASTER}")
        self._before, self._kept = before, kept
        self.targets = self._names[: len(kept)]

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors of what is stored, in this run's layout."""
        types = [getattr(torch, kind) for kind in self._before]
        return {name: torch.empty_like(self._kept[0], dtype=t) for name, t in zip(self._names, types, strict=False)}

    def run(self, filled: dict[str, Tensor]) -> Iterator[tuple[str, float, str, float]]:
        """Replace what is stored by what is kept: name, rounding, its unit, the largest that its type explains."""
        exact = [filled.pop(name) for name in self.sources()][-1]
        for name, like in zip(self._names, self._kept, strict=False):
            filled[name] = torch.empty_like(like)
            local_shard(filled[name]).copy_(local_shard(exact))
        widest = self._kept[-1].dtype
        yield self.name, _rounding(local_shard(exact), widest), "relative", torch.finfo(widest).eps / 2


def retyped(optimizer: NamedOptimizer, stored: Mapping[str, Kind], template: Mapping[str, Tensor]) -> Iterator[Retyped]:
    """What a checkpoint and a run keep in other types; names and shapes that differ are left to their comparison.

    Args:
        optimizer: of the run.
        stored: shape and type of every tensor of the checkpoint.
        template: tensors by name as this state keeps them.
    """
    masters = optimizer.masters
    for name, tensor in template.items():
        shape, before = stored.get(name, ((), ""))
        now = _word(tensor.dtype)
        if not {before, now} <= _FLOATS or shape != tuple(tensor.shape):
            continue
        if name.startswith(MODEL):
            master = f"{PREFIX}{name.removeprefix(MODEL)}.{MASTER}"
            has, keeps = master in stored, name.removeprefix(MODEL) in masters
            # weights that are loaded alone, of the run's type, are no change: masters begin with them
            if before != now or (has and not keeps) or (not has and master in template):
                types = (before, stored[master][1]) if has else (before,)
                kept = (tensor, torch.empty_like(tensor, dtype=torch.float32)) if keeps else (tensor,)
                yield Retyped(name, types, kept)
        elif before != now:
            yield Retyped(name, (before,), (tensor,))


def _rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """The largest by which numbers move, relative to them; NaN where one that was finite no longer is."""
    wide = torch.promote_types(exact.dtype, dtype)
    was, now = exact.to(wide), exact.to(dtype).to(wide)
    errors = ((now - was).abs() / was.abs().clamp(min=torch.finfo(dtype).tiny))[was.isfinite()]
    return float(errors.max()) if errors.numel() else 0.0


def _said(types: tuple[str, ...]) -> str:
    return types[0] if len(types) == 1 else f"{types[0]} with {types[1]} masters"


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
