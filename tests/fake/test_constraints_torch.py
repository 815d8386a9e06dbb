"""The table of constraints against torch itself: schedules' constructors, and who carries replication."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.parallel.engines.repeating import Repeating
from shardwise.plan.constraints import ROWS
from shardwise.plan.plan import LOOPED, SCHEDULES, V_SHAPED, Plan
from shardwise.plan.ranks.engines import casts_weights, is_replicated, uses_fully_shard
from shardwise.plan.repair import Case, change
from shardwise.testing import fake_world
from tests.parity.grid import decoder

TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}


class Stage:
    """As much of a pipeline stage as the constructors look at."""

    def __init__(self, index: int, count: int, pp: int):
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, 0, pp
        self.is_first, self.is_last, self.has_backward = index == 0, index == count - 1, True
        self.submod, self.device = torch.nn.Identity(), torch.device("cpu")
        self.stage_index_to_group_rank = {i: i % pp for i in range(count)}


def torch_takes(kind: str, pp: int, stages: int, micro_batches: int) -> bool:
    count = pp * stages
    local = [0, count - 1] if kind in V_SHAPED and stages == 2 else range(0, count, pp)
    held: Any = [Stage(index, count, pp) for index in local]
    try:
        TORCH[kind](held if kind in LOOPED else held[0], micro_batches, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rows_say_what_the_constructors_say(kind: str) -> None:
    for pp, stages, micro in product((2, 3, 4), (1, 2, 3) if kind in LOOPED else (1,), range(1, 14)):
        plan = change(
            Plan(),
            axes__pp=pp,
            schedule__kind=kind,
            schedule__stages_per_rank=stages,
            batch__micro_batches=micro,
        )
        ours = all(ROWS[row].test(Case(plan=plan)) is None for row in ("pp.micro-batches", "pp.stages-per-rank"))
        assert ours == torch_takes(kind, pp, stages, micro), (kind, pp, stages, micro)


def test_negative_control_a_wrong_row_would_differ() -> None:
    assert not torch_takes("1f1b", 4, 1, 3)
    assert not torch_takes("interleaved", 2, 2, 5)
    assert torch_takes("interleaved", 4, 2, 10), "more than a multiple of pp: a row that says so would be too strict"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_who_holds_the_parameters_is_as_the_plan_says(precision: str) -> None:
    """DDP, `fully_shard`, a process that casts, or nobody: what the planner reckons with is what `apply` makes."""
    found = set()
    for pp, dp, shard, zero in product((1, 2), (1, 2), (1, 2), (0, 1)):
        plan = change(Plan(), axes__pp=pp, axes__dp_replicate=dp, axes__dp_shard=shard, zero=zero, precision=precision)
        if (zero == 0 and shard > 1) or (zero and shard == 1 and max(dp, pp) > 1):
            continue
        plan = change(plan, batch__micro_batches=pp * 2 if pp > 1 else 1)
        with fake_world(plan.world), sw.open_mesh(plan, device="cpu") as mesh:
            part = sw.apply(decoder(4), plan, mesh).parts[0]
        holds = any(isinstance(module, FSDPModule) for module in part.run.modules())
        sums = isinstance(part.run, DistributedDataParallel)
        casts = isinstance(inspect.getclosurevars(part.root.forward).nonlocals.get("wrapper"), Repeating)
        assert (holds, sums, casts) == (uses_fully_shard(plan), is_replicated(plan), casts_weights(plan)), str(plan)
        assert Case(plan=plan).uses_ddp == sums
        found.add((holds, sums, casts))
    assert (
        found
        == {
            "fp32": {(True, False, False), (False, True, False), (False, False, False)},
            "bf16": {(True, False, False), (False, False, True)},
            "bf16-pure": {(True, False, False), (False, True, False), (False, False, False)},
        }[precision]
    )
