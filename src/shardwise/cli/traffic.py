"""What a rank sends in a step, message by message: `estimate --traffic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from shardwise.cli.options.planning import Question
from shardwise.errors import ModelError
from shardwise.plan.messages.modules import collectives_of_module, unlisted
from shardwise.plan.messages.scene import Collective
from shardwise.plan.plan import Plan
from shardwise.plan.traffic import collectives_of

RANK = 0


@dataclass(frozen=True)
class Sent:
    """The messages of a rank."""

    messages: Mapping[Collective, int]
    """Each with how often a step has it."""
    note: str = ""
    """What is to be said of them: that they were not predicted, and why."""

    def rows(self) -> list[tuple[Collective, int]]:
        """By axis and kind, the largest first."""
        return sorted(self.messages.items(), key=lambda item: (item[0].axis, item[0].kind, -item[0].num_bytes))

    def to_json(self) -> list[dict[str, Any]]:
        """For programs."""
        return [{**each._asdict(), "times": times} for each, times in self.rows()]

    def table(self) -> Table:
        """For people."""
        traced = " (traced)" if self.note else ""
        table = Table(title=f"rank {RANK} sends in a step{traced}", title_justify="left")
        for name in ("axis", "kind", "times", "MiB each", "MiB"):
            table.add_column(name, justify="left" if name in ("axis", "kind") else "right")
        for each, times in self.rows():
            size = each.num_bytes / 2**20
            table.add_row(each.axis, each.kind, str(times), f"{size:,.3f}", f"{size * times:,.1f}")
        return table


def sent_by(plan: Plan, asked: Question) -> Sent:
    """What rank 0 sends in a step: predicted, or where that of a module cannot be, of its traced step.

    Raises:
        ModelError: sizes that no model of Shardwise's own has; a module whose step can neither be predicted nor traced.
        PlanError: what is not predicted, see `collectives_of`.
    """
    is_cpu = asked.cluster.device.name == "cpu"
    if asked.spec is not None:
        return Sent(collectives_of(asked.spec, plan, asked.workload, rank=RANK, is_cpu=is_cpu))
    from shardwise.diagnose.tracing.module import estimate_module_by_trace
    from shardwise.diagnose.tracing.module_step import module_step  # torch, for those who ask

    assert asked.factory is not None, "a question without sizes has a module"
    if not (why := unlisted(plan)):
        try:
            step = module_step(asked.factory, plan, asked.workload)
            if not (why := unlisted(plan, step)):
                return Sent(collectives_of_module(step, plan, asked.workload, rank=RANK, is_cpu=is_cpu))
        except ModelError as error:
            why = str(error)
    traced = estimate_module_by_trace(asked.factory, plan, asked.workload, rank=RANK)
    note = f"what the module sends is not predicted under this plan ({why}): --traffic lists its traced step, on a CPU"
    return Sent(traced.messages, note)
