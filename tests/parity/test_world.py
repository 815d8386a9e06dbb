"""The warm world: what its workers need is there before they are forked."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing.world import World
from tests.parity import grid


def imported_by_a_run(text: str) -> set[str]:
    before = set(sys.modules)
    grid.run_plan(text, "decoder", 16)
    return {name for name in set(sys.modules) - before if name.startswith(("shardwise", "torch.distributed"))}


def test_a_worker_imports_nothing_of_ours(world) -> None:
    """Each import would be paid by every rank of every call."""
    assert world(2, imported_by_a_run, "fsdp2 / fp64") == [set(), set()]


def waited_for_a_peer(backend: str) -> str:
    with sw.open_mesh(sw.Plan.parse("dp2 tp2"), timeout_s=1.0, backend=backend) as mesh:
        if mesh.rank == 3:
            time.sleep(2.5)
            return ""
        try:
            mesh.all_reduce_sum(torch.ones(1), "tp")
        except RuntimeError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("backend", ["gloo", "host"])
def test_the_time_limit_holds_for_the_groups_of_single_axes_too(world: World, backend: str) -> None:
    """Torch gives those of a mesh 30 minutes, whatever the group of the world has."""
    first, second, waited, _ = world(4, waited_for_a_peer, backend)
    assert "Timed out waiting 1000ms" in waited and not first and not second


def again(plan: str) -> list[bool]:
    found = []
    for _ in range(3):
        with sw.open_mesh(sw.Plan.parse(plan)) as mesh:
            mesh.all_reduce_sum(torch.ones(1))
            place = Path(os.environ["SHARDWISE_INIT"].removeprefix("file://"))
            found.append([(place.parent / f"{place.name}{end}").exists() for end in ("", "-1", "-2")][len(found)])
            mesh.all_reduce_sum(torch.ones(1))
    return found


def test_meshes_in_a_row_meet_in_files_of_their_own(world: World) -> None:
    """The last rank to leave one removes it: where the first was back already, they waited for each other for ever."""
    assert world(2, again, "dp2") == [[True] * 3] * 2


def ended_by_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_that_ends_a_rank_is_of_its_caller_too(world: World) -> None:
    with pytest.raises(KeyboardInterrupt):
        world(1, ended_by_ctrl_c)
