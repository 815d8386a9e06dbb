"""Tools for testing distributed code on one machine: `World`, real processes; `fake_world`, one that pretends."""

from __future__ import annotations

from shardwise.testing.fake import fake_world as fake_world
from shardwise.testing.world import World as World
from shardwise.testing.world import WorldError as WorldError

__all__ = ["World", "WorldError", "fake_world"]
