"""Predictions of rows and the numbers that sum them up. Errors are predicted / measured - 1."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from published.rows import Row
from shardwise.errors import ShardwiseError
from shardwise.hardware.cluster import GIB
from shardwise.model.profile import profile_of
from shardwise.plan.memory import Memory, estimate_memory
from shardwise.plan.timing import estimate_time

NOISE = 0.05
"""Two measured times closer than this are a tie."""
LAYOUTS = 3
"""Layouts of one job from which a best one is chosen."""


@dataclass(frozen=True)
class Result:
    """A row and what the planner says of it."""

    row: Row
    step_time: float
    """Seconds."""
    memory_gib: float
    """The number of the row's kind, on the row's rank of the pipeline."""
    fits: bool
    terms: Mapping[str, float]
    """Seconds by term."""

    @property
    def time_error(self) -> float | None:
        """Relative, signed; None where the row has no time."""
        return self.step_time / self.row.step_time - 1 if self.row.step_time else None

    @property
    def memory_error(self) -> float | None:
        """Relative, signed; None where the row has no memory."""
        return self.memory_gib / self.row.memory_gib - 1 if self.row.memory_gib else None


def predict(row: Row) -> Result:
    """What the estimators say of a row.

    Raises:
        PlanError: a plan that the model or the batch does not divide.
    """
    profile = profile_of(row.spec)
    step = estimate_time(profile, row.cluster, row.plan, row.workload, stack=row.stack)
    memory = estimate_memory(profile, row.plan, row.workload, stack=row.stack, device=row.cluster.device)
    return Result(row, step.total, printed(memory, row) / GIB, memory.fits, step.terms)


def printed(memory: Memory, row: Row) -> float:
    """Bytes of the number that the row's source prints: of its kind, on the rank that it looks at."""
    if row.memory_stage == "worst":
        return float(getattr(memory, row.memory_kind))
    rank = memory.stages[0 if row.memory_stage == "first" else -1]
    reserved = memory.reserved_of(rank)
    extra = memory.device - memory.reserved
    return {"allocated": rank.allocated, "reserved": reserved, "device": reserved + extra}[row.memory_kind]


def predict_all(rows: Iterable[Row], with_: Callable[[Row], Result] = predict) -> tuple[list[Result], dict[str, int]]:
    """Predictions, and reason -> number of rows that the planner refuses."""
    results, refused = [], Counter[str]()
    for row in rows:
        try:
            results.append(with_(row))
        except ShardwiseError as error:
            refused[f"planner: {str(error).split(':')[0]}"] += 1
        except (ArithmeticError, ValueError):
            refused["planner: numbers that cannot be"] += 1
    return results, dict(refused)


def quantile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between neighbours.

    >>> quantile([4.0, 1.0, 2.0, 3.0], 0.5)
    2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(errors: Sequence[float]) -> dict[str, float | None]:
    """Median and 90th percentile of the absolute errors; bias: median of the signed ones.

    >>> spread([0.1, -0.2, 0.3])["median"]
    0.2
    """
    if not errors:
        return {"median": None, "p90": None, "bias": None}
    size = [abs(error) for error in errors]
    numbers = {"median": quantile(size, 0.5), "p90": quantile(size, 0.9), "bias": quantile(errors, 0.5)}
    return {name: round(value, 4) for name, value in numbers.items()}


def oom(results: Sequence[Result]) -> dict[str, float | None]:
    """Share of the rows that ran out of memory that are predicted not to fit, and of those that ran."""
    failed = [result for result in results if result.row.oom]
    ran = [result for result in results if not result.row.oom]
    return {"recall": _share_unfit(failed), "false_alarms": _share_unfit(ran)}


def _share_unfit(results: Sequence[Result]) -> float | None:
    return round(sum(not result.fits for result in results) / len(results), 4) if results else None


def ranking(results: Sequence[Result]) -> dict[str, int]:
    """Pairs of layouts of one job whose times differ by more than the noise, and how many are ordered rightly."""
    pairs = right = 0
    for group in jobs(results):
        for a, b in combinations(group, 2):
            if (a.row.plan, a.row.stack) == (b.row.plan, b.row.stack):
                continue
            slow, fast = (a, b) if a.row.step_time > b.row.step_time else (b, a)  # type: ignore[operator]
            if slow.row.step_time > fast.row.step_time * (1 + NOISE):  # type: ignore[operator]
                pairs += 1
                right += slow.step_time > fast.step_time
    return {"pairs": pairs, "right": right}


def chosen(results: Sequence[Result]) -> dict[str, float | int | None]:
    """Jobs with several layouts: how much slower than the best measured one is the one that is predicted best."""
    losses = []
    for group in jobs(results):
        if len({result.row.plan for result in group}) >= LAYOUTS:
            times = [result.row.step_time for result in group if result.row.step_time]
            pick = min(group, key=lambda result: result.step_time)
            losses.append((pick.row.step_time or 0.0) / min(times) - 1)
    if not losses:
        return {"jobs": 0, "median_loss": None, "within_5_percent": None}
    near = sum(loss <= NOISE for loss in losses) / len(losses)
    return {"jobs": len(losses), "median_loss": round(quantile(losses, 0.5), 4), "within_5_percent": round(near, 4)}


def jobs(results: Sequence[Result]) -> list[list[Result]]:
    """Results with a time, by source, model, hardware, number of devices, length, global batch and precision."""
    groups = defaultdict(list)
    for result in results:
        row = result.row
        if row.step_time:
            work = (row.workload.seq_len, row.workload.global_batch, row.workload.compute, row.plan.precision)
            device = (row.cluster.device.name, row.cluster.world)
            groups[row.group, row.spec, device, work].append(result)
    return [group for group in groups.values() if len(group) > 1]


def times(results: Iterable[Result]) -> list[float]:
    """Errors of the times that are known."""
    return [error for result in results if (error := result.time_error) is not None]


def memories(results: Iterable[Result]) -> list[float]:
    """Errors of the memories that are known."""
    return [error for result in results if (error := result.memory_error) is not None]


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers of a set of results."""
    return {
        "time": spread(times(results)),
        "memory": spread(memories(results)),
        "oom": oom(results),
        "ranking": ranking(results),
    }


def report(results: Sequence[Result], rows: int, skipped: Mapping[str, int]) -> dict[str, Any]:
    """What `make accuracy` writes."""
    sources: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        sources[result.row.group].append(result)
    by_source = {
        name: {"used": len(group), **summary(group), "chosen": chosen(group)} for name, group in sorted(sources.items())
    }
    by_reason = dict(sorted(skipped.items()))
    return {"rows": rows, "used": len(results), "skipped": by_reason, **summary(results), "by_source": by_source}
