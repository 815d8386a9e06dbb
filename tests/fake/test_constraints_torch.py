"""The table of constraints against torch itself: schedules' constructors, and who carries replication."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from shardwise.plan.constraints import ROWS
from shardwise.plan.engines import uses_fully_shard
from shardwise.plan.plan import LOOPED, PRECISIONS, SCHEDULES, V_SHAPED, Plan
from shardwise.plan.repair import Case, change

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


def test_ddp_is_where_the_data_pass_puts_it() -> None:
    for pp, dp, tp, zero, precision in product((1, 2), (1, 2), (1, 2), (0, 1), PRECISIONS):
        plan = change(Plan(), axes__pp=pp, axes__dp_replicate=dp, axes__tp=tp, zero=zero, precision=precision)
        assert Case(plan=plan).uses_ddp == (plan.axes.data > 1 and not uses_fully_shard(plan)), str(plan)
