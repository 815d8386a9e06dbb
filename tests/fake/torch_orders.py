"""The order in which torch's own pipeline schedules do their work: the planner's tables are compared with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from shardwise.parallel.stages.pipeline_torch_private import SCHEDULE_CLASSES


@dataclass
class StandIn:
    """As much of a stage as a schedule looks at when it writes its table."""

    num_stages: int
    group_size: int
    stage_index: int = 0
    group_rank: int = 0
    is_first: bool = True
    is_last: bool = False
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def schedule_order(
    kind: str, num_ranks: int, stages_per_rank: int, micro_batches: int
) -> list[list[tuple[str, int, int]]]:
    """Torch's own order of work: rows per rank of (kind of work, stage, micro-batch), without a process group.

    `F` forward, `B` whole backward, `I` backward to the inputs, `W` backward to the weights. An overlapped pair is
    two rows, as torch runs it. From `_get_pipeline_order` of single-stage schedules, `pipeline_order` of others.
    """
    stages: Any = [StandIn(num_ranks * stages_per_rank, num_ranks) for _ in range(stages_per_rank)]
    single = issubclass(SCHEDULE_CLASSES[kind], PipelineScheduleSingle)
    schedule: Any = SCHEDULE_CLASSES[kind](stages[0] if single else stages, micro_batches, scale_grads=False)
    table = []
    for rank in range(num_ranks):
        rows = []
        for action in schedule.pipeline_order[rank]:
            for part in () if action is None else action.sub_actions or (action,):
                work = part.computation_type.value
                if work in ("F", "B", "I", "W"):
                    rows.append((work, int(part.stage_index), int(part.microbatch_index)))
        table.append(rows)
    return table
