"""`Rates`: what scripts and torch's schedulers set in an optimizer's groups while a run goes on, alike on every rank.

A scheduler that is told a rank's own loss (`ReduceLROnPlateau`) sets another rate there than elsewhere, and from then
on ranks train as several models, of which shards and checkpoints hold parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from shardwise.errors import ReplicaError
from shardwise.train.guards.agreement import Facts, difference, exchanged
from shardwise.train.state import TrainState

_SET = ("lr", "weight_decay", "momentum", "betas")
_BITS = 16


class Rates:
    """Of one state: `own` is compared by the sums of each step, and `check` names what differs."""

    def __init__(self, state: TrainState) -> None:
        """`state`: whose optimizer."""
        self._state = state

    def own(self) -> int:
        """A number that is equal where rates are; Python's hash of numbers is the same in all processes."""
        return hash(tuple(self._numbers())) % (1 << _BITS)

    def _numbers(self) -> Iterator[float]:
        for group in self._state.optimizer.param_groups:
            for value in map(group.get, _SET):
                yield from (each for each in (value if isinstance(value, tuple) else (value,)) if _is_number(each))

    def check(self) -> None:
        """Every rank calls it, where sums say that rates differ.

        Raises:
            ReplicaError: on all ranks: names the first that does.
        """
        mesh = self._state.mesh
        if mesh.world == 1 or dist.get_backend() == "fake":
            return
        groups = enumerate(self._state.optimizer.param_groups)
        found = {f"{key} of the optimizer's group {i}": repr(group.get(key)) for i, group in groups for key in _SET}
        if everyones := exchanged(Facts(mesh.index("pp"), {}, found), mesh):
            raise ReplicaError(f"step {self._state.step + 1}: {difference(everyones)}; {_NEEDED}")


def _is_number(value: object) -> bool:
    """Tensors are not looked at: the host would wait for the device."""
    return isinstance(value, int | float)


_NEEDED = (
    "needed: the same on every rank; give schedulers, and ifs that set rates, what is the same there: the metrics of a "
    "step, what sw.evaluate gives, or a number of each rank's summed over them (mesh.all_reduce_sum)"
)
