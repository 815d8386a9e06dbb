"""`compare`: two traces, number by number; and what a run that differs from itself on purpose says of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.diagnose.verifying.trace import Trace
from shardwise.train.guards.witness import SHARE, ULPS

KINDS = ("loss", "norm", "grad", "param", "state", "statistics")
"""What is compared, in the order of the table."""
FACTOR = 16
"""A difference may be so many times what one process differs from itself by when it adds up in another order."""
_FOLDERS = {"grad": "grad", "param": "param", "state": "optim", "statistics": "buffer"}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One compared number or tensor of one step."""

    kind: str
    step: int
    name: str
    """Of the parameter, buffer or state; empty for loss and norm."""
    value: float
    """Largest absolute error over the largest element (inf: one side is not finite, or the shapes differ)."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What it is a difference of."""
        return self.kind, self.step, self.name


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """How much each compared thing may differ, and why."""

    own: Mapping[tuple[str, int, str], float] = field(default_factory=dict)
    """Largest difference of each thing between one process and itself in other orders."""
    usual: Mapping[str, float] = field(default_factory=dict)
    """The 90th percentile of those by kind."""
    eps: float = torch.finfo(torch.float64).eps
    loss_eps: float = 0.0
    """Of the type that losses are in, where it is another: a model may give its logits in fp32 whatever it runs in."""
    num_runs: int = 0

    def of(self, difference: Difference) -> float:
        """What a difference may be: FACTOR times the most that was measured for it, for its kind, and ULPS."""
        eps = max(self.eps, self.loss_eps) if difference.kind == "loss" else self.eps
        return FACTOR * max(self.own.get(difference.key, 0.0), self.usual.get(difference.kind, 0.0), ULPS * eps)

    def measured(self, difference: Difference) -> float:
        """What one process differed from itself by in the same thing."""
        return self.own.get(difference.key, 0.0)


def relative(mine: torch.Tensor, truth: torch.Tensor, scale: float) -> float:
    """Largest absolute error over the largest element of the truth, or over `scale` where that is larger."""
    if mine.shape != truth.shape:
        return math.inf
    if not truth.numel():
        return 0.0
    a, b = mine.double(), truth.double()
    error = float((a - b).abs().max())
    size = max(float(b.abs().max()), scale)
    if not math.isfinite(error):
        same = bool(((a == b) | (a.isnan() & b.isnan())).all())
        return 0.0 if same else math.inf
    return 0.0 if error == 0 else error / size if size else math.inf


def differences(mine: Trace, truth: Trace, steps: int) -> list[Difference]:
    """Every compared thing of both runs with its difference, step by step. Names that one lacks are not in it."""
    found: list[Difference] = []
    for step in range(1, steps + 1):
        ours, theirs = mine.first.steps[step - 1], truth.first.steps[step - 1]
        for kind, key in (("loss", "loss"), ("norm", "grad_norm")):
            found.append(Difference(kind=kind, step=step, name="", value=number_difference(ours[key], theirs[key])))
        for kind, folder in _FOLDERS.items():
            found += _tensors(kind, folder, step, (mine, truth))
    return found


def number_difference(mine: float, truth: float) -> float:
    """Relative; inf where one of them only is finite, or the truth only is zero."""
    if mine == truth or (math.isnan(mine) and math.isnan(truth)):
        return 0.0
    return abs(mine - truth) / abs(truth) if truth and math.isfinite(mine) and math.isfinite(truth) else math.inf


def _tensors(kind: str, folder: str, step: int, traces: tuple[Trace, Trace]) -> Iterator[Difference]:
    mine, truth = traces
    names = [name for name in truth.names(folder, step) if f"{folder}/{step}/{name}" in mine.owners]
    sizes = {name: _largest(truth.tensor(f"{folder}/{step}/{name}")) for name in names}
    groups: dict[str, list[float]] = {}
    for name, size in sizes.items():
        groups.setdefault(_group(kind, name), []).append(size)
    usual = {group: SHARE * sorted(values)[len(values) // 2] for group, values in groups.items()}
    for name in names:
        key = f"{folder}/{step}/{name}"
        theirs = truth.tensor(key)
        scale = usual[_group(kind, name)]
        value = max(relative(owner.tensor(key), theirs, scale) for owner in mine.owners[key])
        yield Difference(kind=kind, step=step, name=name, value=value)


def _group(kind: str, name: str) -> str:
    """State is compared in size with state of the same key: first and second moments have different units."""
    return name.rpartition(".")[2] if kind in ("state", "statistics") else ""


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    value = float(tensor.double().abs().max())
    return value if math.isfinite(value) else 0.0


def tolerances(truth: Trace, others: Sequence[Trace], steps: int, floor: Tolerances) -> Tolerances:
    """From runs of one process that add up the same numbers in other orders.

    Args:
        truth: the reference.
        others: the same with rows shuffled, in other micro-batches and with other numbers of threads.
        steps: of each.
        floor: that has measured nothing, of the types they ran in.
    """
    own: dict[tuple[str, int, str], float] = {}
    for other in others:
        for difference in differences(other, truth, steps):
            own[difference.key] = max(own.get(difference.key, 0.0), difference.value)
    by_kind: dict[str, list[float]] = {}
    for (kind, _, _), value in own.items():
        by_kind.setdefault(kind, []).append(value)
    usual = {kind: sorted(values)[int(0.9 * (len(values) - 1))] for kind, values in by_kind.items()}
    return replace(floor, own=own, usual=usual, num_runs=len(others))


def factor_of(mine: Trace, truth: Trace, keys: Sequence[str]) -> float | None:
    """The one number that every element of these tensors is multiplied by; None: there is none."""
    ratios, spread = [], 1e-6
    for key in keys:
        first, second = mine.tensor(key), truth.tensor(key)
        if first.shape != second.shape or not second.numel():
            return None
        if second.element_size() < 8:
            spread = 1e-3  # small elements are sums of large ones, in 24 bits
        a, b = first.double().flatten(), second.double().flatten()
        large = b.abs() > 1e-3 * float(b.abs().max())
        if not bool(large.any()):
            continue
        ratio = a[large] / b[large]
        middle = float(ratio.median())
        if not float((ratio - middle).abs().max()) <= spread * max(abs(middle), 1e-12):
            return None
        ratios.append(middle)
    if not ratios or max(ratios) - min(ratios) > spread * max(map(abs, ratios)):
        return None
    return sorted(ratios)[len(ratios) // 2]


def first_module_that_differs(mine: Trace, truth: Trace, step: int, tolerance: float) -> str | None:
    """The first module, in the order in which calls end on one process, whose output is another one.

    A module's output may be whole or sharded on the ranks of tp and cp: it is equal when some way of putting the
    ranks' rows together gives the rows of one process, in any order.
    """
    for name in truth.first.steps[step - 1]["modules"]:
        prints = mine.prints(name, step)
        if prints and not _same_rows(prints, next(iter(truth.prints(name, step).values())), tolerance):
            return str(name)
    return None


_JOINS = ("first", "sum", "rows")


def _same_rows(prints: Mapping[tuple[int, ...], torch.Tensor], truth: torch.Tensor, tolerance: float) -> bool:
    stages: dict[int, dict[tuple[int, ...], torch.Tensor]] = {}
    for (pp, *rest), rows in prints.items():
        stages.setdefault(pp, {})[tuple(rest)] = rows
    return any(
        _is_same_set(joined, truth, tolerance)
        for members in stages.values()
        for by_tp in _JOINS
        for by_cp in _JOINS
        if (joined := _joined(members, by_tp, by_cp)) is not None
    )


def _joined(members: Mapping[tuple[int, ...], torch.Tensor], by_tp: str, by_cp: str) -> torch.Tensor | None:
    """Rows of all data ranks; those of (replicate, shard, cp, tp) ranks put together over tp, then over cp."""
    shares: dict[Any, torch.Tensor] = dict(members)
    for how in (by_tp, by_cp):  # the last coordinate is tp, then cp
        groups: dict[Any, list[torch.Tensor]] = {}
        for index, rows in sorted(shares.items()):
            groups.setdefault(index[:-1], []).append(rows)
        if (
            len({len(group) for group in groups.values()}) == 1
            and len(next(iter(groups.values()))) == 1
            and how != "first"
        ):
            return None  # an axis of one rank: one way is enough
        joined = {index: _join(rows, how) for index, rows in groups.items()}
        shares = {index: rows for index, rows in joined.items() if rows is not None}
        if len(shares) != len(joined):
            return None
    return torch.cat([rows for _, rows in sorted(shares.items())])


def _join(rows: list[torch.Tensor], how: str) -> torch.Tensor | None:
    if how == "first":
        return rows[0]
    if how == "rows":
        return torch.cat(rows)
    return torch.stack(rows).sum(0) if len({r.shape for r in rows}) == 1 else None


def _is_same_set(mine: torch.Tensor, truth: torch.Tensor, tolerance: float, limit: int = 1024) -> bool:
    """Whether each row of one has an equal one in the other, both ways; of many rows, a sample is looked for."""
    sums, squares = float(truth[:, 1].max()), float(truth[:, 2].max())
    scale = torch.tensor([sums, sums, squares, sums], dtype=torch.float64).clamp(min=1e-300)

    def within(some: torch.Tensor, others: torch.Tensor) -> bool:
        some = some[:: max(1, len(some) // limit)]
        nearest = torch.cdist(some / scale, others / scale, p=math.inf).min(1).values
        return bool((nearest <= tolerance).all())

    return bool(mine.isfinite().all()) and within(truth, mine) and within(mine, truth)
