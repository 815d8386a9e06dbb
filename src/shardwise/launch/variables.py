"""Hands the process's environment variables to the pure functions that interpret them. Nothing else is here."""

from __future__ import annotations

import os
from collections.abc import Mapping


def variables() -> Mapping[str, str]:
    """The environment of this process, for `read_environment` and for what the ranks of a job inherit."""
    return os.environ


def set_variables(changes: Mapping[str, str]) -> None:
    """Give a process that was forked as a rank what its launcher would have started it with."""
    os.environ.update(changes)
