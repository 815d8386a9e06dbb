"""Averages of Adam that are stored in another type than this run's optimizer keeps: read as they are, then changed.

What is stored is told by names and types alone: `exp_avg` and `exp_avg_sq` of some type, with a `seed` beside them
where they are rounded stochastically, or codes and scales. Each rank reads its own part and hands the values to the
optimizer, which keeps them as it keeps those of a step; nobody holds more than the averages of a rank twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.train.updates.low_bits import CODES, MOMENTS, SCALES, Coded, LowBitAdamW, Plain
from shardwise.train.updates.optim import MASTER, PREFIX, NamedOptimizer
from shardwise.train.updates.state_values import Kind

STOCHASTIC = "bfloat16-stochastic"
_PLAIN = ("float64", "float32", "bfloat16")
_BESIDE = {"step", MASTER}
"""Keys of a parameter's state that are no averages: they load as they are."""


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Those of one parameter, which are stored in another way than they are kept."""

    what: ClassVar[str] = "averages"
    counted: ClassVar[str] = "moments"
    name: str
    before: str
    """`float32`, `bfloat16`, `bfloat16-stochastic`, `8bit` or `4bit`."""
    now: str
    stored: Plain | Coded
    kept: Plain | Coded
    wide: torch.dtype
    keys: tuple[str, ...]
    """Of what is stored and not kept as it is."""
    made: tuple[str, ...]

    @property
    def setting(self) -> str:
        """Which one says the types: full ones are those of the parameters."""
        return "plan.precision" if {self.before, self.now} == {"float64", "float32"} else "optimizer.state_dtype"

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of what is made."""
        return tuple(f"{PREFIX}{self.name}.{key}" for key in self.made)

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors of what is stored, of its types, in this run's layout."""
        return {f"{PREFIX}{self.name}.{key}": tensor for key, tensor in self.stored.fresh().items()}

    def run(self, filled: dict[str, Tensor]) -> Iterator[tuple[str, float, str, float]]:
        """Replace what is stored by what is kept: name, rounding, its unit, the largest that its type explains."""
        prefix = f"{PREFIX}{self.name}."
        state: dict[str, Any] = {key: filled.pop(prefix + key) for key in self.keys}
        mean, square = self.stored.read(state, self.wide)
        new: dict[str, Any] = {"step": filled[f"{prefix}step"]}
        self.kept.write(new, mean, square)
        for key, found in zip(MOMENTS, self.kept.roundings(new, mean, square), strict=True):
            yield prefix + key, found.largest, found.of, found.most
        for key in self.made:
            value = new[key]
            filled[prefix + key] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)


def other_averages(
    optimizer: NamedOptimizer, stored: Mapping[str, Kind], template: Mapping[str, Tensor]
) -> Iterator[Averages]:
    """Those that a checkpoint keeps in another way than an optimizer does.

    Only between ways to keep the two averages of Adam: what differs otherwise stays for the comparison of names.

    Args:
        optimizer: whose `state_template` gave `template`.
        stored: shape and type of every tensor of the checkpoint.
        template: tensors by name as this state keeps them.
    """
    theirs = _by_parameter(stored)
    ours = _by_parameter({name: (tuple(t.shape), _word(t.dtype)) for name, t in template.items()})
    yield from _items(optimizer, theirs, ours)


def _items(
    optimizer: NamedOptimizer, theirs: Mapping[str, dict[str, Kind]], ours: Mapping[str, dict[str, Kind]]
) -> Iterator[Averages]:
    for name, parameter in optimizer.params.items():
        before, now = _kept_as(theirs.get(name, {})), _kept_as(ours.get(name, {}))
        owner, live = optimizer.owner(name), optimizer.live[name]
        is_coded = before in ("8bit", "4bit")
        if before is None or now is None or before == now or (is_coded and live.dim() < 2):
            continue
        if isinstance(owner, LowBitAdamW):
            kept = owner.averages(parameter)
        elif isinstance(owner, torch.optim.Adam | torch.optim.AdamW) and now in _PLAIN:
            kept = Plain(live, getattr(torch, now))
        else:
            continue
        stored_in = {kind for _, kind in theirs[name].values()}
        full = torch.float64 if "float64" in stored_in else torch.float32
        yield Averages(
            name=name,
            before=before,
            now=now,
            stored=_reader(live, before, name, full),
            kept=kept,
            wide=torch.promote_types(live.dtype, full),
            keys=tuple(theirs[name].keys() - _BESIDE),
            made=tuple(ours[name].keys() - _BESIDE),
        )


def _reader(live: Tensor, kind: str, name: str, full: torch.dtype) -> Plain | Coded:
    if kind in ("8bit", "4bit"):
        return Coded(live, kind, full)
    if kind == STOCHASTIC:
        return Plain(live, torch.bfloat16, (name, 0))
    return Plain(live, getattr(torch, kind))


def _kept_as(state: Mapping[str, Kind]) -> str | None:
    """How the averages of a parameter are kept, by the names and types of its state; None: by none of the ways here.

    >>> _kept_as({"step": ((), "float32"), "exp_avg": ((4,), "float32"), "exp_avg_sq": ((4,), "float32")})
    'float32'
    """
    keys, types = state.keys() - _BESIDE, {dtype for key, (_, dtype) in state.items() if key in MOMENTS}
    if "step" not in state:
        return None
    if keys == {*MOMENTS} and len(types) == 1:
        return next(iter(types & {*_PLAIN}), None)
    if keys == {*MOMENTS, "seed"} and types == {"bfloat16"}:
        return STOCHASTIC
    return {frozenset((*CODES, *SCALES)): "8bit", frozenset((CODES[0], *SCALES)): "4bit"}.get(frozenset(keys))


def _by_parameter(kinds: Mapping[str, Kind]) -> dict[str, dict[str, Kind]]:
    """`optim.h.0.weight.exp_avg` is the key `exp_avg` of `h.0.weight`."""
    found: dict[str, dict[str, Kind]] = {}
    for full_name, kind in kinds.items():
        if full_name.startswith(PREFIX):
            name, _, key = full_name.removeprefix(PREFIX).rpartition(".")
            found.setdefault(name, {})[key] = kind
    return found


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
