"""Disks of a few bytes, for what happens when they are full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*words: str | Path) -> bool:
    return shutil.which("mount") is not None and not subprocess.run(["mount", *words], capture_output=True).returncode


@contextmanager
def disk(path: Path, size: str) -> Iterator[Path]:
    """A directory as a disk of its own, of such a size (`64k`); skips where that is not allowed."""
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", path):
        pytest.skip("a full disk needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
