"""What a constraint is made of, and the search for the nearest plan that holds all of them.

A row of `constraints.ROWS` looks at a `Case` and, when the plan breaks it, gives a `Hit` with candidate plans that
would not. `nearest_legal` follows candidates, nearest first, until a plan breaks no row.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, product
from typing import Any

from shardwise.findings import Severity, table_of
from shardwise.model.profile import Profile
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Axes, Batch, Plan
from shardwise.plan.ranks.engines import is_replicated

_STEPS = 300
"""Plans that the search looks at before it takes the plain one; about 20 microseconds each."""

_WEIGHTS = {
    "precision": 4.0,
    "batch.global_size": 2.0,
    "axes.pp": 2.0,
    "axes.tp": 1.5,
    "schedule.kind": 2.0,
    "schedule.stages_per_rank": 0.5,
    "float8.recipe": 2.0,
    "zero": 0.5,
}
"""How much it costs to change a field; what changes the training itself costs most."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """A model as it was read: more than sizes say, of a module that has none."""

    profile: Profile
    limits: ModelSpec | None = None
    """Sizes that axes must divide, where they are known."""
    left_out: tuple[tuple[str, str], ...] = ()
    """What no plan of it has, and why: axes and other words of `space.FEATURES`."""
    cut: str = "balanced"
    """How its blocks are cut into stages: `Stack.cut`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and what is known of the model, the world and the device; None is unknown, and breaks no row."""

    plan: Plan
    spec: ModelSpec | None = None
    world: int | None = None
    device: str | None = None
    """`cpu`, `cuda`, ...: the type of torch's device."""
    seq_len: int | None = None
    read: Read | None = None

    @property
    def name(self) -> str:
        """What the model is called; empty: none is known."""
        return self.read.profile.name if self.read else self.spec.name if self.spec else ""

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the model; None: unknown."""
        return len(self.read.profile.blocks) if self.read else self.spec.num_layers if self.spec else None

    @cached_property
    def uses_ddp(self) -> bool:
        """True where plain replication is carried by DDP; see `parallel/data.py`."""
        return is_replicated(self.plan)

    @cached_property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.plan.axes.pp * self.plan.schedule.stages

    def with_plan(self, plan: Plan) -> Case:
        """The same circumstances with another plan."""
        return replace(self, plan=plan)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A broken row: what, with which numbers, what to do, and candidate plans that do not break it."""

    what: str
    found: str = ""
    fix: str = ""
    plans: Sequence[Plan] = ()
    severity: Severity = "error"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One constraint: stable id, the sentence of docs/constraints.md, and the predicate."""

    id: str
    why: str
    test: Test


Test = Callable[[Case], Hit | None]
"""A predicate: None where the row holds."""


def table() -> tuple[dict[str, Row], Callable[[str, str], Callable[[Test], Test]]]:
    """An empty section of the table, and the decorator that adds a predicate to it under an id and a sentence."""
    return table_of(Row)


def change(plan: Plan, **fields: Any) -> Plan:
    """A copy with fields replaced; `axes__tp=2` is a field of a part.

    >>> str(change(Plan.parse("dp2"), axes__tp=2))
    'dp2 tp2 / fp32'
    """
    whole: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        part, nested, key = name.partition("__")
        if nested:
            parts.setdefault(part, {})[key] = value
        else:
            whole[name] = value
    for part, values in parts.items():
        whole[part] = replace(getattr(plan, part), **values)
    return replace(plan, **whole)


def resize(plan: Plan, axis: str, degree: int) -> Plan:
    """Change one axis and give its ranks to the data axis in use, so that the world stays the same if it can."""
    before = getattr(plan.axes, axis)
    data = "dp_shard" if plan.axes.dp_shard > 1 or plan.zero else "dp_replicate"
    ranks = getattr(plan.axes, data) * before
    freed = {f"axes__{data}": ranks // degree} if axis != "ep" and ranks % degree == 0 else {}
    return change(plan, **{f"axes__{axis}": degree}, **freed)


def shrink(plan: Plan, axis: str, *sizes: int) -> list[Plan]:
    """The plan with the axis at each smaller degree that divides all sizes, largest first."""
    degree, common = getattr(plan.axes, axis), math.gcd(*sizes)
    return [resize(plan, axis, d) for d in range(degree - 1, 0, -1) if common % d == 0]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def fit_world(plan: Plan, world: int) -> list[Plan]:
    """Plans of that many ranks: other data degrees first, then smaller tensor, pipeline and context degrees."""
    axes, plans = plan.axes, []
    sharded = axes.dp_shard > 1 or plan.zero > 0
    for pp, tp, cp in product(*(divisors(degree)[::-1] for degree in (axes.pp, axes.tp, axes.cp))):
        ranks, rest = divmod(world, pp * tp * cp)
        if rest or not ranks:
            continue
        if sharded:
            splits = [(keep, ranks // keep) for keep in {1, axes.dp_replicate} if ranks % keep == 0]
            splits += [(ranks // axes.dp_shard, axes.dp_shard)] if ranks % axes.dp_shard == 0 else []
        else:
            splits = [(ranks, 1)]
        for replicate, shard in splits:
            degrees = replace(axes, pp=pp, tp=tp, cp=cp, dp_replicate=replicate, dp_shard=shard)
            plans.append(plan.with_(axes=degrees))
    return plans


def fit_batch(plan: Plan) -> list[Plan]:
    """Plans whose global batch divides: fewer or more micro-batches, else the batch rounded up or down."""
    size, data, micro = plan.batch.global_size, plan.axes.data, plan.batch.micro_batches
    assert size is not None
    plans = []
    if size % data == 0:
        plans += [change(plan, batch__micro_batches=m) for m in divisors(size // data) if m <= 4 * micro]
    unit = data * micro
    rounded = {max(1, size // unit) * unit, -(-size // unit) * unit}
    return plans + [change(plan, batch__global_size=to) for to in rounded]


def distance(here: Plan, there: Plan) -> float:
    """How far apart two plans are: a step per field that differs, and the ratio of degrees and counts."""
    total = 0.0
    for name, (a, b) in here.diff(there).items():
        numbers = isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0 and name != "zero"
        total += _WEIGHTS.get(name, 1.0) * (1.0 + (abs(math.log2(a / b)) if numbers else 0.0))
    return total


def plain(case: Case) -> Plan:
    """Replication over the whole world with every dial at its default: breaks no row of the plan's own."""
    plan = case.plan
    world = case.world or plan.world
    size = plan.batch.global_size
    return Plan(
        axes=Axes(dp_replicate=world),
        batch=Batch(global_size=max(size, world) if size is not None else None),
        precision="fp32" if case.device == "mps" else plan.precision,
    )


def nearest_legal(case: Case, start: Iterable[Plan], broken: Test) -> Plan | None:
    """The nearest plan to `case.plan` that breaks no row, reached from the candidates `start`; else a plain one.

    None: neither does a plan that gives all ranks to one axis, with every dial at its default. `broken` gives the first
    error of a case. Cost: at most a few hundred evaluations of the table.
    """
    order = count()
    heap: list[tuple[float, int, Plan]] = []
    seen: set[Plan] = {case.plan}

    def push(plans: Iterable[Plan]) -> None:
        for plan in plans:
            if plan not in seen:
                seen.add(plan)
                heapq.heappush(heap, (distance(case.plan, plan), next(order), plan))

    push(start)
    for _ in range(_STEPS):
        if not heap:
            break
        _, _, plan = heapq.heappop(heap)
        hit = broken(case.with_plan(plan))
        if hit is None:
            return plan
        push(hit.plans)
    replicas = plain(case)
    world, alone = replicas.world, change(replicas, axes__dp_replicate=1)
    others = (change(alone, **{f"axes__{axis}": world}) for axis in ("dp_shard", "tp", "pp", "cp"))
    return next((plan for plan in (replicas, *others) if broken(case.with_plan(plan)) is None), None)


def markdown(sections: Mapping[str, Mapping[str, str]]) -> str:
    """The tables of docs/constraints.md: one per section, one line per row, `id -> why`."""
    lines: list[str] = []
    for section, rows in sections.items():
        lines += [
            "",
            f"## {section}",
            "",
            "| id | what is refused (or, where it says so, remarked), and why |",
            "|---|---|",
        ]
        lines += [f"| `{row}` | {why} |" for row, why in rows.items()]
    return "\n".join(lines).strip() + "\n"
