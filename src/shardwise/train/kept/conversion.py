"""What a checkpoint keeps in other types than this run: found by names and types, and changed with leave."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.train.kept.retyped import Retyped, retyped
from shardwise.train.updates.moments import Averages, other_averages
from shardwise.train.updates.optim import NamedOptimizer
from shardwise.train.updates.state_values import Kind

_SLACK = 1e-6
"""For the arithmetic of a division and a product."""


class Moved(NamedTuple):
    """One tensor that changed its type."""

    what: str
    """`moments` or `weights`."""
    name: str
    """`optim.h.0.weight.exp_avg`."""
    before: str
    """How it was stored: `float32`, `bfloat16`, `bfloat16-stochastic`, `8bit`, `bfloat16 with float32 masters` ..."""
    now: str
    rounding: float
    """What that cost, at most; 0: nothing."""
    of: str
    """Its unit: `relative` to the number, or `of its block's largest`."""


Item = Averages | Retyped
"""What changes together."""


class Conversion:
    """What a state does with tensors of other types; made by `find_conversion`.

    Attributes:
        targets: names of the state's own tensors that are made, and not read.
    """

    def __init__(self, items: Collection[Item]) -> None:
        """See `find_conversion`."""
        self._items = tuple(items)
        self.targets = frozenset(name for item in items for name in item.targets)

    @property
    def what(self) -> str:
        """What differs, for an error's text."""
        kinds: dict[tuple[str, str, str], list[str]] = {}
        for item in self._items:
            kinds.setdefault((item.what, item.before, item.now), []).append(item.name)
        return "; ".join(
            f"the {what} of {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} are {before} in the "
            f"checkpoint, {now} in this run"
            for (what, before, now), names in kinds.items()
        )

    @property
    def settings(self) -> tuple[str, ...]:
        """Which settings say these types."""
        return tuple(sorted({item.setting for item in self._items}))

    def sources(self) -> dict[str, Tensor]:
        """Fresh tensors of what is stored, of its types, in this run's layout."""
        return {name: tensor for item in self._items for name, tensor in item.sources().items()}

    @torch.no_grad()
    def run(self, filled: dict[str, Tensor]) -> list[Moved]:
        """Replace, in `filled`, what `sources` gave by what the state keeps of it; every rank takes part.

        Cost: a pass over what is changed; of averages those of one parameter at a time in fp32 (of fp64 parameters
        fp64), and as a step of the optimizer.

        Raises:
            CheckpointError: a number is not finite, or did not arrive within what its type can round.
        """
        moved: list[Moved] = []
        wrong: list[str] = []
        for item in self._items:
            for name, rounding, of, most in item.run(filled):
                moved.append(Moved(item.counted, name, item.before, item.now, rounding, of))
                if not rounding <= most + _SLACK:
                    wrong.append(f"{name}: found a rounding of {rounding:.2g} ({of}), needed at most {most:.2g}")
        if wrong:  # after the last one: other ranks are in the same collectives
            raise CheckpointError(
                f"{wrong[0]} ({len(wrong)} tensors on this rank); they are not finite, are too large for their new "
                "type, or were changed on the way: load an older checkpoint, or keep the types as they were"
            )
        return moved


def find_conversion(
    optimizer: NamedOptimizer, stored: Mapping[str, Kind], template: Mapping[str, Tensor]
) -> Conversion | None:
    """What a checkpoint keeps in another way than a state does; None: nothing, or no way is known.

    Args:
        optimizer: of the state.
        stored: shape and type of every tensor of the checkpoint.
        template: tensors by name as this state keeps them.
    """
    averages = list(other_averages(optimizer, stored, template))
    taken = {name for item in averages for name in item.targets}
    rest = {name: tensor for name, tensor in template.items() if name not in taken}
    items: list[Item] = [*averages, *retyped(optimizer, stored, rest)]
    return Conversion(items) if items else None
