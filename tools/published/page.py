"""The page docs/planner-accuracy.md: errors by source and by kind of layout, the worst rows, every constant."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from published.constants import table, tables
from published.rows import Row
from published.scatter import draw_scatter
from published.score import Result, chosen, memories, oom, spread, summary, times

HEAD = """# Planner accuracy

How far `estimate_time` and `estimate_memory` are from measurements that others published. Errors are predicted /
measured - 1: median and 90th percentile of their size; bias is the median with its sign. What a prediction may know
of a run stands [below](#how-a-row-is-read). `make accuracy` writes this page, from any file with the same columns:
`make accuracy ROWS=file.csv OUT=accuracy.json`.
"""
READ = (
    "Each row becomes a model, a cluster, a plan, a workload and a software stack (`tools/published/`). Nothing "
    "depends\non which row or source it is."
)
READ_AS = (
    ("nothing of a setting", "the default of its stack"),
    (
        "nothing of recompute, and our estimate would not fit without",
        "the least recompute that fits; of DeepSpeed, FSDP1, eager PyTorch and JAX that of whole blocks, their one "
        "switch. Such rows count in all figures; those of out of memory are given without them too",
    ),
    (
        "a type of 16 bits of a trainer, and nothing else would fit",
        "weights and states in it; they count in the same way",
    ),
    (
        "no micro-batch",
        "the one that fits and is predicted fastest, as whoever printed none has looked for it",
    ),
    ("memory", "memory as its source counts it: allocated, reserved by the allocator, or used on the device"),
    ("in its notes that it ran out of memory", "a plan that must not fit"),
)
WORST = 10


def write_page(path: Path, results: Sequence[Result], report: Mapping[str, Any]) -> None:
    """Write the page and its two pictures beside it, under images/."""
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.row.group].append(result)
    _draw(images / "accuracy-time.png", "Time of a step", "seconds", groups, _time_point)
    _draw(images / "accuracy-memory.png", "Peak memory", "GiB", groups, _memory_point)
    path.write_text(page(results, report), encoding="utf-8")


def page(results: Sequence[Result], report: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    sources: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.row.kind].append(result)
        sources[result.row.group].append(result)
    reasons = "; ".join(f"{reason}: {count}" for reason, count in report["skipped"].items()) or "none"
    parts = [
        HEAD.rstrip(),
        "## At a glance",
        f"{report['rows']} rows, {report['used']} used. Not used: {reasons}.",
        _glance(results, report),
        "![predicted against measured time](images/accuracy-time.png)",
        "![predicted against measured memory](images/accuracy-memory.png)",
        "## How a row is read",
        READ,
        table(("where a row says", "it is predicted with"), READ_AS),
        "## By source",
        _by(sources, {name: _publisher(group[0].row) for name, group in sources.items()}),
        "## By kind of layout",
        _by(kinds),
        "## The worst rows",
        f"The {WORST} largest errors of time:",
        _worst(results, lambda result: result.time_error, _time_reason),
        f"The {WORST} largest errors of memory:",
        _worst(results, lambda result: result.memory_error, _memory_reason),
        "## Constants",
        tables(),
    ]
    return "\n\n".join(parts) + "\n"


def percent(value: float | None, *, signed: bool = False) -> str:
    """`7.5 %`, or `-` for None."""
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def _spread_cells(errors: Sequence[float]) -> tuple[str, str, str]:
    numbers = spread(errors)
    return percent(numbers["median"]), percent(numbers["p90"]), percent(numbers["bias"], signed=True)


def _glance(results: Sequence[Result], report: Mapping[str, Any]) -> str:
    sound = [result for result in results if not result.row.doubtful]
    best, pairs = chosen(results), report["ranking"]
    rows = [
        ("time of a step", str(len(times(results))), *_spread_cells(times(results))),
        ("without rows that their source marks as doubtful", str(len(times(sound))), *_spread_cells(times(sound))),
        ("peak memory", str(len(memories(results))), *_spread_cells(memories(results))),
    ]
    for kind in ("allocated", "reserved", "device"):
        errors = memories(result for result in results if result.row.memory_kind == kind)
        rows.append((f"- {kind}", str(len(errors)), *_spread_cells(errors)))
    share = pairs["right"] / pairs["pairs"] if pairs["pairs"] else None
    ran, failed = sum(not r.row.oom for r in results), sum(r.row.oom for r in results)
    told = [result for result in results if not result.row.infers_recompute]
    lines = [
        table(("", "rows", "median", "90th percentile", "bias"), rows),
        f"- Out of memory: {percent(report['oom']['recall'])} of {failed} rows that ran out are predicted not to fit, "
        f"and {percent(report['oom']['false_alarms'])} of {ran} that ran.",
        f"  Without the {len(results) - len(told)} rows whose recompute is assumed: {percent(oom(told)['recall'])} and "
        f"{percent(oom(told)['false_alarms'])}.",
        f"- Ranking: of {pairs['pairs']} pairs of layouts of one job that differ by more than 5 %, "
        f"{percent(share)} are ordered rightly.",
        f"- Choice: of {best['jobs']} jobs with three layouts or more, the layout predicted best is within 5 % of the "
        f"fastest published one in {percent(best['within_5_percent'])}; median loss {percent(best['median_loss'])}.",
    ]
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _publisher(row: Row) -> str:
    """Who published a row: a repository, or the first words of its source."""
    found = re.match(r"[\w.-]+/[\w.-]+", row.source) or re.match(r"[^(]*?(?= \(| src/| section |$)", row.source)
    return found[0] if found else row.source


def _by(groups: Mapping[str, Sequence[Result]], of: Mapping[str, str] | None = None) -> str:
    """A line for each group; `of`: what else is said of them."""
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        numbers, best = summary(group), chosen(group)
        pairs = numbers["ranking"]
        rows.append(
            (
                name,
                *([of[name]] if of else []),
                len(group),
                " / ".join(_spread_cells(times(group))),
                " / ".join(_spread_cells(memories(group))),
                f"{percent(oom(group)['recall'])} / {percent(oom(group)['false_alarms'])}",
                f"{percent(pairs['right'] / pairs['pairs'])} of {pairs['pairs']}" if pairs["pairs"] else "-",
                percent(best["median_loss"]),
            )
        )
    head = (
        "",
        *(["published by"] if of else []),
        "rows",
        "time: median / p90 / bias",
        "memory: median / p90 / bias",
        "out of memory: recall / false alarms",
    )
    return table((*head, "ranked rightly", "loss of the choice"), rows)


def _worst(results: Sequence[Result], error: Callable[[Result], float | None], reason: Callable[[Result], str]) -> str:
    known = [(abs(value), value, result) for result in results if (value := error(result)) is not None]
    known.sort(key=lambda item: -item[0])
    rows = [
        (f"`{r.row.id}`", r.row.spec.name, f"{r.row.cluster.world} {r.row.cluster.name}", f"`{r.row.plan}`",
         percent(value, signed=True), reason(r))
        for _, value, r in known[:WORST]
    ]  # fmt: skip
    return table(("row", "model", "devices", "plan", "error", "reason"), rows)


def _time_reason(result: Result) -> str:
    name, value = max(result.terms.items(), key=lambda item: item[1])
    said = f"{result.step_time:.3g} s predicted ({name} {100 * value / result.step_time:.0f} %), "
    return said + f"{result.row.step_time:.3g} s measured; " + _why(result)


def _memory_reason(result: Result) -> str:
    kind = f"{result.row.memory_kind}, {result.row.memory_stage} rank"
    return f"{result.memory_gib:.1f} GiB predicted, {result.row.memory_gib:.1f} GiB measured ({kind}); " + _why(result)


def _why(result: Result) -> str:
    if result.row.doubtful:
        return f"the source marks it: {result.row.doubtful}"
    return f"assumed: {'; '.join(result.row.assumed)}" if result.row.assumed else "nothing was assumed"


def _time_point(result: Result) -> tuple[float, float] | None:
    return (result.row.step_time, result.step_time) if result.row.step_time else None


def _memory_point(result: Result) -> tuple[float, float] | None:
    return (result.row.memory_gib, result.memory_gib) if result.row.memory_gib else None


def _draw(
    path: Path,
    title: str,
    unit: str,
    groups: Mapping[str, Sequence[Result]],
    point: Callable[[Result], tuple[float, float] | None],
) -> None:
    points = {name: [p for result in group if (p := point(result))] for name, group in groups.items()}
    draw_scatter(path, title, unit, {name: found for name, found in points.items() if found})
