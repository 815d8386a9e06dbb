"""What `parallel/torch_private.py` takes from torch's pipelines is still there, and still means what it meant."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime

from shardwise.parallel.torch_private import SCHEDULE_CLASSES, schedule_order
from shardwise.plan.plan import LOOPED, SCHEDULES


def test_every_kind_has_torchs_class() -> None:
    assert set(SCHEDULE_CLASSES) == set(SCHEDULES)
    for kind, schedule in SCHEDULE_CLASSES.items():
        base = _PipelineScheduleRuntime if kind in LOOPED else PipelineScheduleSingle
        assert issubclass(schedule, base)
        assert {"loss_fn", "scale_grads", "n_microbatches"} <= set(inspect.signature(schedule).parameters)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_run_schedule_can_call_it(kind: str) -> None:
    names = list(inspect.signature(SCHEDULE_CLASSES[kind]._step_microbatches).parameters)
    assert names[:6] == ["self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"]


def test_a_stage_has_what_run_schedule_sets() -> None:
    assert isinstance(inspect.getattr_static(PipelineStage, "has_backward"), property)
    assert callable(PipelineStage.clear_runtime_states)
    assert {"input_args", "output_args", "group"} <= set(inspect.signature(PipelineStage).parameters)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_order_reads_every_action(kind: str) -> None:
    stages = 2 if kind in LOOPED else 1
    rows = [row for rank in schedule_order(kind, 2, stages, 4) for row in rank]
    assert {work for work, _, _ in rows} in ({"F", "B"}, {"F", "I", "W"}, {"F", "B", "I", "W"})
    assert sum(work == "F" for work, _, _ in rows) == 2 * stages * 4
