"""The proof at load sees a state that is not the stored one, whether parts lie as they are stored or not."""

from __future__ import annotations

import pytest
from torch import Tensor

from shardwise.checkpoint import loading
from shardwise.checkpoint.layout import local_of
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from shardwise.parallel.mesh import open_mesh
from shardwise.testing.world import World
from shardwise.train.optimizers import adamw
from tests.parity.placing import LAYOUTS, State, place


class Wrong(State):
    """Takes a checkpoint over with a fault."""

    fault = ""

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        first, second = (next(n for n in tensors if n.endswith(key)) for key in (".exp_avg", ".exp_avg_sq"))
        if self.fault == "averages in each other's place":
            tensors = {**tensors, first: tensors[second], second: tensors[first]}
        super().load_tensors(tensors)
        if self.fault == "an average that is changed afterwards":
            tensors[first].add_(1)
        if self.fault == "a parameter, unseen by autograd, on the last rank" and self.mesh.rank == self.mesh.world - 1:
            local_of(next(iter(self._model().values()))).view(-1).numpy()[0] += 1


def save(path: str) -> None:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        placed = place("fsdp2", mesh)
        state = State(placed, adamw(placed, 0.01))
        state.run(1)
        Store(path).save(state)


def load(path: str, layout: str, fault: str) -> tuple[str, int]:
    """The error, if any, and how many parts a sum was taken of."""
    summed = []
    right = loading._contribution
    loading._contribution = lambda part, tensor: summed.append(part) or right(part, tensor)
    with open_mesh(LAYOUTS[layout]) as mesh:
        placed = place(layout, mesh)
        state = Wrong(placed, adamw(placed, 0.01))
        state.fault = fault
        try:
            Store(path).load_latest(state)
        except CheckpointError as error:
            return str(error), len(summed)
    return "", len(summed)


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("proof"))
    world(2, save, path)
    return path


@pytest.mark.parametrize("layout", ["fsdp2", "dp2", "tp2", "one"])
def test_sums_are_taken_of_what_does_not_lie_as_it_is_stored(world: World, stored: str, layout: str) -> None:
    for error, summed in world(LAYOUTS[layout].world, load, stored, layout, ""):
        assert error == "" and (summed == 0) == (layout == "fsdp2")


@pytest.mark.parametrize("layout", ["fsdp2", "dp2", "one"])
@pytest.mark.parametrize(
    "fault",
    [
        "averages in each other's place",
        "an average that is changed afterwards",
        "a parameter, unseen by autograd, on the last rank",
    ],
)
def test_another_state_is_not_proven(world: World, stored: str, layout: str, fault: str) -> None:
    for error, _ in world(LAYOUTS[layout].world, load, stored, layout, fault):
        assert "checksums differ" in error or "the copies on ranks 0 and 1 differ" in error
