"""How far estimates were from measurements. The numbers are data: `accuracy.toml`, which `make accuracy` writes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.model.profile import Profile
from shardwise.plan.plan import Plan

FEW = 10
"""Fewer runs of a kind of layout than these give no band of their own."""
FEW_OF_DEVICE = 5
"""Fewer runs on a device than these do not count as measurements of it."""


@dataclass(frozen=True)
class Band:
    """Absolute relative errors of an estimator; 0: not yet calibrated."""

    median: float
    p90: float
    rows: int = 0
    """Measurements behind it; 0: not said."""
    caution: str = ""
    """Where nobody, or hardly anybody, published a run on the device: the errors are then those on others."""

    def around(self, value: float) -> tuple[float, float] | None:
        """Where 9 of 10 measurements lay, for an estimate; None: not known."""
        return (value * (1 - self.p90), value * (1 + self.p90)) if self.p90 else None

    def __str__(self) -> str:
        if not self.p90:
            return "not yet calibrated"
        text = f"half of the measurements within {self.median:.0%}, nine of ten within {self.p90:.0%}"
        return f"{self.caution}; on others {text}" if self.caution else text


def band(what: str, device: str) -> Band:
    """The band of `time` or `memory` on a cluster's device, over all layouts.

    >>> band("time", "h100").p90 < band("time", "cpu").p90
    True
    >>> str(band("time", "trainium2"))[:43]
    'no measurement of trainium2: its constants '
    """
    table, is_cpu = _table(), device.startswith("cpu")
    found = _band(table.get(f"cpu-{what}" if is_cpu else what, table[what]))
    runs = sum(table["devices"].get(device, {}).values())
    if is_cpu or runs >= FEW_OF_DEVICE:
        return found
    few = f"only {runs} measurements of {device}" if runs else f"no measurement of {device}: its constants are nominal"
    return replace(found, caution=few)


def band_of_kind(what: str, kind: str) -> Band | None:
    """The band of layouts of a kind (see `kind_of`), on all devices; None: fewer than `FEW` runs were published."""
    entry = _table()["kinds"].get(kind, {}).get(what, {})
    return _band(entry) if entry.get("rows", 0) >= FEW else None


def kind_of(plan: Plan, *, experts: bool) -> str:
    """Kind of layout: the axes in use and how data ranks share.

    >>> kind_of(Plan.parse("pp2 fsdp4 tp2 zero1"), experts=True), kind_of(Plan(), experts=False)
    ('experts + tp + pp + zero 1', 'one device')
    """
    axes = plan.axes
    parts = ["experts"] if experts else []
    parts += [name for name in ("tp", "pp", "cp") if getattr(axes, name) > 1]
    if axes.data > 1:
        parts.append(f"zero {plan.zero}" if axes.dp_shard > 1 and plan.zero else "replicas")
    return " + ".join(parts) or "one device"


def likeness(plan: Plan, profile: Profile) -> str:
    """One sentence: how far the estimates of layouts of this plan's kind have been from published runs.

    And of all runs of sources outside the fit (but for the constants that docs/planner.md names): what to expect of a
    cluster that nobody has seen.
    """
    kind, few = kind_of(plan, experts=profile.experts > 0), f"fewer than {FEW}, so nobody knows"
    known = {what: band_of_kind(what, kind) for what in ("time", "memory")}
    said = [f"{what} {f'{_halves(found)} of {found.rows:,}' if found else few}" for what, found in known.items()]
    text = f"published runs laid out as this plan is ({kind}): {'; '.join(said) if any(known.values()) else few}"
    others = ", ".join(f"{what} {_halves(_band(entry))}" for what, entry in _table()["elsewhere"].items())
    text += f"; sources outside the fit (docs/planner.md): {others}"
    if not any(block.attentions for block in profile.blocks):
        text += "; none of them is of a model without attention"
    return text


def _halves(found: Band) -> str:
    return f"half within {found.median:.0%}, nine of ten within {found.p90:.0%}"


def _band(entry: Mapping[str, Any]) -> Band:
    return Band(float(entry["median"]), float(entry["p90"]), int(entry.get("rows", 0)))


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shardwise.plan").joinpath("accuracy.toml").read_text(encoding="utf-8"))
