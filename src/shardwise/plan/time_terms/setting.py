"""What the time of a block goes by, but for the block and the micro-batch. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.hardware.cluster import Cluster
from shardwise.plan.costs.kernels import BYTES
from shardwise.plan.plan import Axes
from shardwise.plan.stack import Stack
from shardwise.plan.workload import PACKED, Adapters, Packed

Shape = tuple[float, int]
"""Sequences of a micro-batch, and their length over all ranks."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything but the block and the micro-batch."""

    cluster: Cluster
    stack: Stack
    axes: Axes
    dtype: str
    sequence: bool = False
    context: str = "ring"
    frozen: bool = False
    """Weights get no gradient (adapters on top of them do)."""
    gathers: bool = False
    """`fully_shard` holds the parameters."""
    adapters: Adapters | None = None
    """Which are beside frozen weights."""
    casts: bool = False
    """One process casts them, each by a kernel of its own."""

    @property
    def packed(self) -> Packed | None:
        """How frozen weights are packed; None: they are not."""
        return PACKED[self.adapters.base] if self.adapters and self.adapters.base else None

    @property
    def launch(self) -> float:
        """Seconds of the host per kernel: those that a probe found, else the stack's."""
        return self.cluster.launch or self.stack.launch

    @property
    def product_launch(self) -> float:
        """The same per matrix product."""
        return self.cluster.product_launch or self.launch

    @property
    def biased_launch(self) -> float:
        """And per product whose kernel adds a bias."""
        return self.cluster.biased_launch or self.product_launch

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return BYTES[self.dtype] if self.dtype not in ("fp8", "fp4") else 2.0
