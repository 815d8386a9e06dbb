"""`LossScale`: by what fp16 losses are multiplied, so that small gradients are numbers of that type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class LossScale:
    """Dynamic scale of fp16 losses: halved on a gradient that is not finite, doubled after `period` good steps.

    The loss is a sum over the window, so the scale starts low: a window of 2^12 tokens at 2^4 is 2^16 for a mean.
    Its decisions rest on numbers that are summed over the world: the same on every rank and every mesh.
    """

    scale: float = 16.0
    good_steps: int = 0
    period: int = 2000
    floor: ClassVar[float] = 2.0**-36
    """As far below the first scale as fp16's least number is below its largest: no smaller one is of any help."""

    @property
    def may_be_at_fault(self) -> bool:
        """A smaller scale may make gradients finite."""
        return self.scale > self.floor

    def update(self, finite: bool) -> None:
        """Account for one step."""
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, self.floor), 0
        elif self.good_steps + 1 >= self.period:
            self.scale, self.good_steps = self.scale * 2, 0
        else:
            self.good_steps += 1
