"""Which parameters an optimizer's groups take, by patterns of names; and the dials that its constructor refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.errors import ModelError, UsageError
from shardwise.findings import nearest
from shardwise.parallel.placed import Placed


def matches(name: str, pattern: str) -> bool:
    """Whether a shell-style pattern covers a parameter's name; `*` crosses dots."""
    return fnmatchcase(name, pattern)


def split_by_pattern(
    placed: Placed, names: Sequence[str], patterns: Sequence[str], what: str, *, strict: bool = True
) -> set[str]:
    """Those names that a shell-style pattern matches (`*` crosses dots: `*.bias`, `*norm*`).

    Raises:
        ModelError: `strict`, and a pattern matches nothing on any pipeline stage.
    """
    hits = [{name for name in names if matches(name, pattern)} for pattern in patterns]
    found = [bool(hit) or not strict for hit in hits]
    if patterns and strict and placed.mesh.size("pp") > 1:
        stages: list[list[bool]] = [[] for _ in range(placed.mesh.size("pp"))]
        dist.all_gather_object(stages, found, group=placed.mesh.group("pp"))
        found = [any(column) for column in zip(*stages, strict=True)]
    for pattern, ok in zip(patterns, found, strict=True):
        if not ok:
            raise ModelError(
                f"{what}: pattern {pattern!r} matches none of the model's parameters; {nearest(pattern, list(names))}"
            )
    return set().union(*hits)


def decay_groups(
    placed: Placed, params: Mapping[str, nn.Parameter], weight_decay: float, no_decay: Sequence[str]
) -> list[dict[str, Any]]:
    """Two groups, with decay and (what a pattern of `no_decay` matches) without; an empty one is left out."""
    without = split_by_pattern(placed, list(params), no_decay, "no_decay")
    groups = [
        {"params": [p for name, p in params.items() if name not in without], "weight_decay": weight_decay},
        {"params": [p for name, p in params.items() if name in without], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def check_dials(name: str, **dials: float) -> None:
    """Refuse negative, infinite or NaN dials, and decays (`beta...`, `momentum`) of 1 or more.

    Raises:
        UsageError: naming the dial, the value and the range.
    """
    for dial, value in dials.items():
        below_one = dial.startswith(("beta", "momentum"))
        if not (math.isfinite(value) and value >= 0 and (not below_one or value < 1)):
            raise UsageError(f"{name}: {dial}={value}; it must be {'in [0, 1)' if below_one else 'finite and >= 0'}")
