"""Averages of Adam that are stored in another type than this run's optimizer keeps: read as they are, then changed.

What is stored is told by names and types alone: `exp_avg` and `exp_avg_sq` of some type, with a `seed` beside them
where they are rounded stochastically, or codes and scales. Each rank reads its own part and hands the values to the
optimizer, which keeps them as it keeps those of a step; nobody holds more than the averages of a rank twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.train.low_bits import CODES, MOMENTS, SCALES, Coded, LowBitAdamW, Plain
from shardwise.train.optim import MASTER, PREFIX, NamedOptimizer
from shardwise.train.state_values import Kind

STOCHASTIC = "bfloat16-stochastic"
_PLAIN = ("float64", "float32", "bfloat16")
_BESIDE = {"step", MASTER}
"""Keys of a parameter's state that are no averages: they load as they are."""
_SLACK = 1e-6
"""For the arithmetic of a division and a product."""


class Moved(NamedTuple):
    """One average that changed its type."""

    name: str
    """`optim.h.0.weight.exp_avg`."""
    before: str
    """How it was stored: `float32`, `bfloat16`, `bfloat16-stochastic`, `8bit` or `4bit`."""
    now: str
    rounding: float
    """What that cost, at most; 0: nothing."""
    of: str
    """Its unit: `relative` to the number, or `of its block's largest`."""


class _Item(NamedTuple):
    """The averages of one parameter."""

    name: str
    before: str
    now: str
    stored: Plain | Coded
    kept: Plain | Coded
    wide: torch.dtype
    sources: tuple[str, ...]
    """Keys of what is stored and not kept as it is."""
    targets: tuple[str, ...]


class Conversion:
    """What a state does with averages of another type; made by `find_conversion`.

    Attributes:
        targets: names of the state's own tensors that are made, and not read.
    """

    def __init__(self, items: Collection[_Item]) -> None:
        """See `find_conversion`."""
        self._items = tuple(items)
        self.targets = frozenset(f"{PREFIX}{item.name}.{key}" for item in items for key in item.targets)

    @property
    def what(self) -> str:
        """What differs, for an error's text."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for item in self._items:
            kinds.setdefault((item.before, item.now), []).append(item.name)
        return "; ".join(
            f"the averages of {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} are {before} in the "
            f"checkpoint, {now} in this run"
            for (before, now), names in kinds.items()
        )

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors of what is stored, of its types, in this run's layout."""
        return {
            f"{PREFIX}{item.name}.{key}": tensor for item in self._items for key, tensor in item.stored.fresh().items()
        }

    @torch.no_grad()
    def run(self, filled: dict[str, Tensor]) -> list[Moved]:
        """Replace, in `filled`, what `sources` gave by what the optimizer keeps of it; every rank takes part.

        Cost: the averages of one parameter at a time in fp32 (of fp64 parameters fp64), and as a step of the optimizer.

        Raises:
            CheckpointError: a number is not finite, or did not arrive within what its type can round.
        """
        moved: list[Moved] = []
        wrong: list[str] = []
        for item in self._items:
            prefix = f"{PREFIX}{item.name}."
            state: dict[str, Any] = {key: filled.pop(prefix + key) for key in item.sources}
            mean, square = item.stored.read(state, item.wide)
            new: dict[str, Any] = {"step": filled[f"{prefix}step"]}
            item.kept.write(new, mean, square)
            for key, found in zip(MOMENTS, item.kept.roundings(new, mean, square), strict=True):
                moved.append(Moved(prefix + key, item.before, item.now, found.largest, found.of))
                if not found.largest <= found.most + _SLACK:
                    wrong.append(f"{prefix}{key}: found a rounding of {found.largest:.2g} ({found.of}), needed at most "
                                 f"{found.most:.2g}")  # fmt: skip
            made = {key: new[key] for key in item.targets}
            filled |= {
                prefix + key: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
                for key, value in made.items()
            }
        if wrong:  # after the last one: other ranks are in the same collectives
            raise CheckpointError(
                f"{wrong[0]} ({len(wrong)} averages on this rank); they are not finite, or were changed on the way: "
                "load an older checkpoint, or keep the optimizer's state_dtype as it was"
            )
        return moved


def find_conversion(
    optimizer: NamedOptimizer, stored: Mapping[str, Kind], template: Mapping[str, Tensor]
) -> Conversion | None:
    """The averages that a checkpoint keeps in another way than an optimizer does; None: there are none, or no way.

    Only between ways to keep the two averages of Adam: what differs otherwise stays for the comparison of names.

    Args:
        optimizer: whose `state_template` gave `template`.
        stored: shape and type of every tensor of the checkpoint.
        template: tensors by name as this state keeps them.
    """
    theirs = _by_parameter(stored)
    ours = _by_parameter({name: (tuple(t.shape), _word(t.dtype)) for name, t in template.items()})
    return Conversion(items) if (items := list(_items(optimizer, theirs, ours))) else None


def _items(
    optimizer: NamedOptimizer, theirs: Mapping[str, dict[str, Kind]], ours: Mapping[str, dict[str, Kind]]
) -> Iterator[_Item]:
    for name, parameter in optimizer.params.items():
        before, now = _kept_as(theirs.get(name, {})), _kept_as(ours.get(name, {}))
        owner, live = optimizer.owner(name), optimizer.live[name]
        is_coded = before in ("8bit", "4bit")
        if before is None or now is None or before == now or (is_coded and live.dim() < 2):
            continue
        if theirs[name].keys() & _BESIDE != ours[name].keys() & _BESIDE:
            continue
        if isinstance(owner, LowBitAdamW):
            kept = owner.averages(parameter)
        elif isinstance(owner, torch.optim.Adam | torch.optim.AdamW) and now in _PLAIN:
            kept = Plain(live, getattr(torch, now))
        else:
            continue
        yield _Item(
            name=name,
            before=before,
            now=now,
            stored=_reader(live, before, name),
            kept=kept,
            wide=torch.promote_types(live.dtype, torch.float32),
            sources=tuple(theirs[name].keys() - _BESIDE),
            targets=tuple(ours[name].keys() - _BESIDE),
        )


def _reader(live: Tensor, kind: str, name: str) -> Plain | Coded:
    if kind in ("8bit", "4bit"):
        return Coded(live, kind)
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
