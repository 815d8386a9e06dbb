"""Weights that a checkpoint keeps in another precision than this run: read as they are stored, then changed.

The most exact of what is stored counts: the fp32 master of a weight, where the run that saved had one. A run that keeps
masters gives them that value, and its weights are the rounding of it. Each rank changes its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.train.updates.optim import MASTER, PREFIX, NamedOptimizer
from shardwise.train.updates.state_values import Kind
from shardwise.train.updates.update_rules import local_shard

MODEL = "model."
_FLOATS = {"float64", "float32", "bfloat16", "float16"}


class Retyped:
    """One weight, buffer, average of weights, or tensor of an optimizer whose numbers change their type.

    Args:
        name: of the tensor.
        before: torch's names of the stored types: of the tensor, and of its master where one is stored.
        kept: this run's fresh tensor, which is filled.
        keeps: whether this run keeps an fp32 master of it.

    Attributes:
        targets: names of what is made.
    """

    setting = "plan.precision"

    def __init__(self, name: str, before: tuple[str, ...], kept: Tensor, keeps: bool = False) -> None:
        """See the class."""
        types = (kept.dtype, torch.float32)[: 1 + keeps]
        self.name, self.before, self.now = name, _said(before), _said(tuple(map(_word, types)))
        self.what = self.counted = "weights" if name.startswith(MODEL) else "averages"
        names = (name, f"{PREFIX}{name.removeprefix(MODEL)}.{MASTER}")
        self._stored, self._kept, self._widest = dict(zip(names, before, strict=False)), kept, types[-1]
        self.targets = names[: len(types)]

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors of what is stored, in this run's layout."""
        return {name: torch.empty_like(self._kept, dtype=getattr(torch, t)) for name, t in self._stored.items()}

    def run(self, filled: dict[str, Tensor]) -> Iterator[tuple[str, float, str, float]]:
        """Replace what is stored by what is kept: name, rounding, its unit, the largest that its type explains."""
        exact = [filled.pop(name) for name in self._stored][-1]
        masters = [torch.empty_like(self._kept, dtype=self._widest)] if len(self.targets) > 1 else []
        for name, tensor in zip(self.targets, (self._kept, *masters), strict=True):
            filled[name] = tensor
            local_shard(tensor).copy_(local_shard(exact))
        yield self.name, _rounding(local_shard(exact), self._widest), "relative", torch.finfo(self._widest).eps / 2


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
                yield Retyped(name, types, tensor, keeps)
        elif before != now:
            yield Retyped(name, (before,), tensor)


def _rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """The largest by which numbers move, relative to them; infinite where one that was finite no longer is."""
    wide = torch.promote_types(exact.dtype, dtype)
    was, now = exact.to(wide), exact.to(dtype).to(wide)
    errors = ((now - was).abs() / was.abs().clamp(min=torch.finfo(dtype).tiny))[was.isfinite()]
    return float(errors.max()) if errors.numel() else 0.0


def _said(types: tuple[str, ...]) -> str:
    return types[0] if len(types) == 1 else f"{types[0]} with {types[1]} masters"


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
