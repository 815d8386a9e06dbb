"""`plan/accuracy.toml`, by which the planner says how far its estimates are off: of all rows, by kind, by device."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from published.rows import read
from published.score import Result, memories, predict_all, spread, times

HEAD = """# Errors of the closed form against published measurements, as docs/planner-accuracy.md has them: absolute
# relative errors, median and 90th percentile, and how many rows they are of. Written by `make accuracy`.
"""
CPU = "# Steps of two ranks on two cores that other programs used as well (bench/prediction.py, docs/planner.md)"
KEPT = {"median": 0.50, "p90": 0.60}
"""Of `cpu-time`, where the file that is replaced does not say."""
ELSEWHERE = Path(__file__).parent / "elsewhere.csv"
"""Runs of sources that constants were not fitted to."""
OF = {"time": times, "memory": memories}


def write_bands(path: Path, results: Sequence[Result]) -> None:
    """Replace the file; its entry for CPUs, which published rows say nothing of, stays.

    What the planner says of sources that nobody fitted is of `ELSEWHERE`, whatever the results are of.
    """
    before = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    others, _ = predict_all(read(ELSEWHERE)[0])
    path.write_text(bands(results, others, before.get("cpu-time", KEPT)), encoding="utf-8")


def bands(results: Sequence[Result], others: Sequence[Result], cpu: Mapping[str, float]) -> str:
    """The file's text; `others`: of sources that constants were not fitted to."""
    kinds: dict[str, list[Result]] = defaultdict(list)
    devices: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        kinds[result.row.kind].append(result)
        devices[result.row.cluster.device.name].append(result)
    lines = [HEAD.rstrip()]
    for what, errors in OF.items():
        lines += ["", f"[{what}]", *(f"{name} = {value}" for name, value in _numbers(errors(results)).items())]
    lines += ["", CPU, "[cpu-time]", *(f"{name} = {value}" for name, value in cpu.items())]
    lines += ["", "# Of sources that constants were not fitted to (tools/published/elsewhere.csv)", "[elsewhere]"]
    lines += [f"{what} = {_inline(_numbers(errors(others)))}" for what, errors in OF.items()]
    for kind, group in sorted(kinds.items(), key=lambda item: -len(item[1])):
        entries = {what: _numbers(errors(group)) for what, errors in OF.items()}
        lines += ["", f'[kinds."{kind}"]', *(f"{what} = {_inline(entry)}" for what, entry in entries.items() if entry)]
    lines += ["", "# Rows of each device", "[devices]"]
    for name, group in sorted(devices.items()):
        lines.append(f'"{name}" = {_inline({what: len(errors(group)) for what, errors in OF.items()})}')
    return "\n".join(lines) + "\n"


def _numbers(errors: Sequence[float]) -> dict[str, Any]:
    found = spread(errors)
    return {"rows": len(errors), "median": found["median"], "p90": found["p90"]} if errors else {}


def _inline(entry: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in entry.items()) + " }"
