"""How far estimates have been from measurements. The numbers are data: `accuracy.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Band:
    """Absolute relative errors of an estimator; 0: not yet calibrated."""

    median: float
    p90: float

    def around(self, value: float) -> tuple[float, float] | None:
        """Where 9 of 10 measurements lay, for an estimate; None: not known."""
        return (value * (1 - self.p90), value * (1 + self.p90)) if self.p90 else None

    def __str__(self) -> str:
        if not self.p90:
            return "not yet calibrated"
        return f"half of the measurements within {self.median:.0%}, nine of ten within {self.p90:.0%}"


def band(what: str, device: str) -> Band:
    """The band of `time` or `memory`, on a cluster's device.

    >>> band("time", "h100").p90 < band("time", "cpu").p90
    True
    """
    entry = _table().get(f"cpu-{what}" if device.startswith("cpu") else what, _table()[what])
    return Band(float(entry["median"]), float(entry["p90"]))


@cache
def _table() -> dict[str, dict[str, float]]:
    return tomllib.loads(files("shardwise.plan").joinpath("accuracy.toml").read_text(encoding="utf-8"))
