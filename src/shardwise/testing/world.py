"""The warm forked world of `shardwise.launch.forked`, under the name that tests import."""

from __future__ import annotations

from shardwise.launch.forked import World as World
from shardwise.launch.forked import WorldError as WorldError

__all__ = ["World", "WorldError"]
