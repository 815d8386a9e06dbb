"""What recompute refuses, before anything is computed."""

from __future__ import annotations

import pytest
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError


def model(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), norm(4)) for _ in range(4)))


def test_recomputing_a_batch_norm_is_refused() -> None:
    plan = sw.Plan.parse("dp1 / recompute=blocks")
    found = r"0\.1 is a BatchNorm1d with running statistics"
    with sw.open_mesh(plan) as mesh, pytest.raises(ModelError, match=found):
        sw.apply(lambda: model(nn.BatchNorm1d), plan, mesh)


def test_other_norms_are_recomputed() -> None:
    plan = sw.Plan.parse("dp1 / recompute=blocks")
    with sw.open_mesh(plan) as mesh:
        assert sw.apply(lambda: model(nn.LayerNorm), plan, mesh).blocks == ("0", "1", "2", "3")
