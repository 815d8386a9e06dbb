"""What the system says of this host. No torch."""

from __future__ import annotations

from pathlib import Path

import psutil

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says what a container may use of the memory."""


def host_memory() -> int:
    """Bytes that this process may use.

    >>> host_memory() > 2**20
    True
    """
    return min([int(psutil.virtual_memory().total), *_limits()])


def _limits() -> list[int]:
    texts = [Path(path).read_text(encoding="ascii").strip() for path in LIMITS if Path(path).is_file()]
    return [int(text) for text in texts if text.isdigit()]
