"""`python tools/calibrate.py ROWS.csv`: fit the constants of devices, links and stacks to published step times.

A coordinate search on the logarithm of predicted over measured time. Every constant has one value for all rows of its
device, link or stack. Writes hardware/devices.toml and plan/stacks.toml; look at `git diff`, then run `make accuracy`.
`--leave-out` fits to all others instead, and says how far off what it names then is: a SOURCE; `device:NAME`, rows of
a device, which then has the constants of its sibling; `model:K`, the K-th fifth of the models of every source, by size.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tomlkit

from published.rows import Row, read
from published.score import quantile, spread
from shardwise.errors import ShardwiseError
from shardwise.hardware.cluster import Cluster
from shardwise.model.profile import profile_of
from shardwise.plan.stack import Stack
from shardwise.plan.timing import estimate_time

SIBLINGS = {
    "h200": "h100",
    "h100-96g": "h100",
    "gh200": "h100",
    "a100-40g": "a100-80g",
    "b200": "gb200",
    "b300": "gb300",
}
"""Device -> another of its silicon, in both directions."""
FOLDS = 5
"""Parts of the models of a source, by size, of which one is left out."""
FEW = 100
"""Rows of a source of which `--every` drops none."""
PACKAGE = Path(__file__).parents[1] / "src" / "shardwise"
FILES = {"device": PACKAGE / "hardware/devices.toml", "link": PACKAGE / "hardware/devices.toml"}
FILES["stack"] = PACKAGE / "plan/stacks.toml"

# What may be fitted, with the bounds that physics sets.
BOUNDS: dict[str, tuple[float, float]] = {
    "device.curve.best": (0.3, 0.85),
    "device.curve.depth": (20, 800),
    "device.low_best": (0.3, 0.75),
    "device.stream": (0.5, 0.92),
    "device.attention.flash1": (0.05, 0.8),
    "device.attention.flash2": (0.05, 0.8),
    "device.attention.flash3": (0.05, 0.85),
    "device.attention.triton": (0.05, 0.8),
    "device.attention.rise": (100.0, 4000.0),
    "link.bandwidth": (1e8, 2e12),
    "link.latency": (2e-6, 1e-4),
    "stack.launch": (1e-6, 5e-5),
    "stack.block_host": (0.0, 5e-3),
    "stack.route_host": (0.0, 5e-3),
    "stack.micro_host": (0.0, 2e-2),
    "stack.step": (0.0, 0.2),
    "stack.network": (0.1, 1.0),
    "stack.efficiency": (0.7, 1.3),
    "stack.overlap_data": (0.0, 1.0),
    "stack.overlap_tensor": (0.0, 1.0),
    "stack.overlap_expert": (0.0, 1.0),
    "stack.overlap_pipeline": (0.0, 1.0),
    "stack.gather_wait": (0.0, 1e-2),
    "stack.tensor_wait": (0.0, 1e-2),
    "stack.stall": (0.0, 5.0),
}


class Constants:
    """The values of both files, by (kind, name, field)."""

    def __init__(self) -> None:
        self.documents = {path: tomlkit.parse(path.read_text(encoding="utf-8")) for path in set(FILES.values())}

    def table(self, kind: str, name: str) -> tomlkit.items.Table:
        """The table of a device, link or stack."""
        document = self.documents[FILES[kind]]
        return document["link"][name] if kind == "link" else document[name]

    def get(self, key: tuple[str, str, str]) -> float | None:
        """A value; None where the file leaves it to the default."""
        found = self.table(key[0], key[1])
        for part in key[2].split("."):
            if part not in found:
                return None
            found = found[part]
        return float(found)

    def set(self, key: tuple[str, str, str], value: float) -> None:
        """Put a value into its document, with three digits."""
        table, (*path, last) = self.table(key[0], key[1]), key[2].split(".")
        for part in path:
            table = table[part]
        table[last] = float(f"{value:.3g}")

    def save(self) -> None:
        """Write both files."""
        for path, document in self.documents.items():
            path.write_text(tomlkit.dumps(document), encoding="utf-8")


def changed(
    row: Row, values: dict[tuple[str, str, str], float], links: dict[str, tuple[str, str]]
) -> tuple[Cluster, Stack]:
    """The row's cluster and stack with some constants replaced."""
    cluster, stack = row.cluster, row.stack
    for (kind, name, field), value in values.items():
        if kind == "stack" and name == stack.name:
            stack = replace(stack, **{field: value})
        elif kind == "device" and name == cluster.device.name:
            cluster = cluster.with_(device=_with(cluster.device, field.split("."), value))
        elif kind == "link" and name in links[cluster.device.name]:
            tier = "local" if links[cluster.device.name][0] == name else "network"
            cluster = cluster.with_(**{tier: replace(getattr(cluster, tier), **{field: value})})
    return cluster, stack


def _with(record: object, path: Sequence[str], value: float) -> object:
    if len(path) == 1:
        return replace(record, **{path[0]: value})  # type: ignore[type-var]  # a frozen dataclass
    return replace(record, **{path[0]: _with(getattr(record, path[0]), path[1:], value)})  # type: ignore[type-var]  # too


def errors_of(
    rows: Sequence[Row], values: dict[tuple[str, str, str], float], links: dict[str, tuple[str, str]]
) -> list[float]:
    """log(predicted / measured) of each row."""
    found, same = [], {}
    for row in rows:
        pair = changed(row, values, links)
        cluster, stack = same.setdefault(pair, pair)
        total = estimate_time(profile_of(row.spec), cluster, row.plan, row.workload, stack=stack).total
        found.append(math.log(total / row.step_time))
    return found


def loss_of(rows: Sequence[Row], errors: Sequence[float]) -> float:
    """Mean, 90th percentile and bias of each source, weighted by the root of its number of rows."""
    by_source: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        by_source.setdefault(row.group, []).append(error)
    total = 0.0
    for found in by_source.values():
        sizes = [min(abs(error), 0.5) for error in found]
        total += len(found) ** 0.5 * (sum(sizes) / len(sizes) + 0.4 * quantile(sizes, 0.9) + 0.3 * abs(median(found)))
    return total


@dataclass(frozen=True)
class Job:
    """Rows with what their times are fitted by."""

    rows: Sequence[Row]
    values: dict[tuple[str, str, str], float]
    links: dict[str, tuple[str, str]]

    def errors(self, values: dict[tuple[str, str, str], float]) -> list[float]:
        """log(predicted / measured) of each row with these values."""
        return errors_of(self.rows, values, self.links)

    def touched(self, key: tuple[str, str, str]) -> list[int]:
        """Places of the rows that a constant acts on."""
        kind, name, _ = key
        if kind == "stack":
            return [i for i, row in enumerate(self.rows) if row.stack.name == name]
        devices = [i for i, row in enumerate(self.rows) if kind == "device" and row.cluster.device.name == name]
        return devices or [i for i, row in enumerate(self.rows) if name in self.links[row.cluster.device.name]]


def job_of(rows: Sequence[Row], constants: Constants) -> Job:
    """Some rows, with the constants of their stacks, devices and links as the files have them."""
    devices, table = {row.cluster.device.name for row in rows}, constants.documents[FILES["device"]]
    links = {name: (table[name]["local"], table[name]["network"]) if name in table else ("", "") for name in devices}
    owners = {"stack": {row.stack.name for row in rows}, "device": devices}
    owners["link"] = {link for pair in links.values() for link in pair}
    keys = [
        (k.split(".")[0], name, k.split(".", 1)[1]) for k in BOUNDS for name in sorted(owners[k.split(".")[0]]) if name
    ]
    values = {key: value for key in keys if (value := _known(constants, key)) is not None}
    return Job(rows, values, links)


def fit(job: Job, seconds: float) -> dict[tuple[str, str, str], float]:
    """Coordinate search with shrinking steps, until nothing improves or the time is up."""
    values, errors = job.values, job.errors(job.values)
    best, touched = loss_of(job.rows, errors), {key: job.touched(key) for key in job.values}
    end, step = time.monotonic() + seconds, 0.3
    print(f"start {best:.3f}, {len(values)} constants, {len(job.rows)} rows")
    while step > 0.02 and time.monotonic() < end:
        for key in values:
            low, high = BOUNDS[f"{key[0]}.{key[2]}"]
            for factor in (1 + step, 1 / (1 + step)):
                tried, changed_errors = {**values, key: min(max(values[key] * factor, low), high)}, errors.copy()
                again = errors_of([job.rows[i] for i in touched[key]], tried, job.links)
                for i, error in zip(touched[key], again, strict=True):
                    changed_errors[i] = error
                loss = loss_of(job.rows, changed_errors)
                if loss < best - 1e-4:
                    best, values, errors = loss, tried, changed_errors
                    break
            if time.monotonic() > end:
                return values
        print(f"step {step:.3f}: {best:.3f}")
        step /= 1.8
    return values


def unseen(job: Job, rest: Job, constants: Constants, seconds: float) -> dict[tuple[str, str, str], float]:
    """Constants of `job` as they would be without its rows: fitted to `rest`, else the median of others of a kind."""
    lent = {key: (key[0], _sibling(key[1], rest), key[2]) for key in job.values.keys() - rest.values.keys()}
    wanted = job.values.keys() | set(lent.values())
    shared = {key: value for key, value in rest.values.items() if key in wanted}
    near = {(key[0], key[1]) for key in shared}
    rows = [
        row for row in rest.rows if ("stack", row.stack.name) in near or ("device", row.cluster.device.name) in near
    ]
    values = fit(Job(rows, shared, rest.links), seconds) if rows else shared
    for key in job.values.keys() - values.keys():
        if lent[key] in values:
            values[key] = values[lent[key]]
            continue
        names = constants.documents[FILES[key[0]]]
        names = names["link"] if key[0] == "link" else names
        others = [_known(constants, (key[0], name, key[2])) for name in names if name != key[1]]
        values[key] = median([value for value in others if value is not None])
    return values


def _sibling(name: str, rest: Job) -> str:
    """A device of the same silicon that other rows have."""
    pairs = [*SIBLINGS.items(), *((there, here) for here, there in SIBLINGS.items())]
    there = {row.cluster.device.name for row in rest.rows}
    return next((other for one, other in pairs if one == name and other in there), name)


def left_out(rows: Sequence[Row], what: str) -> list[bool]:
    """Of each row, whether it is left out: see `--leave-out`."""
    kind, _, name = what.rpartition(":")
    if kind == "device":
        return [row.cluster.device.name == name for row in rows]
    if kind != "model":
        return [row.group == what for row in rows]
    models: dict[str, set[int]] = {}
    for row in rows:
        models.setdefault(row.group, set()).add(row.spec.num_params)
    fifth = {
        (group, size): place * FOLDS // len(sizes) if len(sizes) > 1 else FOLDS
        for group, sizes in models.items()
        for place, size in enumerate(sorted(sizes))
    }
    return [fifth[row.group, row.spec.num_params] == int(name) - 1 for row in rows]


def thinned(rows: Sequence[Row], every: int) -> list[Row]:
    """One row in so many of the sources that have more than `FEW`."""
    sizes = Counter(row.group for row in rows)
    seen = Counter[str]()
    kept = []
    for row in rows:
        if sizes[row.group] <= FEW or seen[row.group] % every == 0:
            kept.append(row)
        seen[row.group] += 1
    return kept


def _known(constants: Constants, key: tuple[str, str, str]) -> float | None:
    try:
        return constants.get(key)
    except (KeyError, TypeError):  # no such table, or the table of links among the devices
        return None


def leave_out(timed: Sequence[Row], given: argparse.Namespace, constants: Constants) -> int:
    """Print how far off what is left out is, with the constants as they are and as the others have them."""
    out = left_out(timed, given.leave_out)
    job = job_of([row for row, left in zip(timed, out, strict=True) if left], constants)
    if not job.rows:
        print(f"calibrate: no timed row of {given.leave_out!r}", file=sys.stderr)
        return 2
    rest = job_of(thinned([row for row, left in zip(timed, out, strict=True) if not left], given.every), constants)
    found = unseen(job, rest, constants, given.minutes * 60)
    for name, values in (("now", job.values), ("unseen", found)):
        errors = job.errors(values)
        print(name, spread([math.exp(error) - 1 for error in errors]))
        for group in sorted({row.group for row in job.rows}):
            part = [math.exp(e) - 1 for row, e in zip(job.rows, errors, strict=True) if row.group == group]
            print(f"  {name} {group} {len(part)} rows", spread(part))
    for key, value in sorted(job.values.items(), key=lambda pair: -abs(found[pair[0]] / (pair[1] or 1.0) - 1)):
        if found[key] != value:
            print("  moved", ".".join(key), f"{value:.3g} -> {found[key]:.3g}")
    return 0


def main() -> int:
    """Read, fit, write."""
    parser = argparse.ArgumentParser(prog="calibrate", description=__doc__)
    parser.add_argument("rows", type=Path, help="a .csv of measurements")
    parser.add_argument("--source", action="append", help="only rows whose id starts so; may be repeated")
    parser.add_argument("--every", type=int, default=1, help="one row in so many of large sources")
    parser.add_argument("--leave-out", help="say what the errors of this were, had nobody seen it; writes nothing")
    parser.add_argument("--minutes", type=float, default=20.0)
    given = parser.parse_args()
    try:
        rows, _ = read(given.rows)
    except ShardwiseError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return int(error.exit_code)
    timed = [
        row for row in rows if row.step_time and not row.doubtful and (not given.source or row.group in given.source)
    ]
    constants = Constants()
    if given.leave_out:
        return leave_out(timed, given, constants)
    for key, value in fit(job_of(thinned(timed, given.every), constants), given.minutes * 60).items():
        constants.set(key, value)
    constants.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
