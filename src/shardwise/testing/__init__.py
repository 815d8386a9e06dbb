"""Tools for testing distributed code: `World`, real processes; `fake_world`, a pretended one; `fail_at`, a fault."""

from __future__ import annotations

from shardwise.testing.fake import fake_world as fake_world
from shardwise.testing.faults import fail_at as fail_at
from shardwise.testing.world import World as World
from shardwise.testing.world import WorldError as WorldError

__all__ = ["World", "WorldError", "fail_at", "fake_world"]
