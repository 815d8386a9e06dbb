"""What recompute refuses, before anything is computed."""

from __future__ import annotations

import pytest
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError


def model(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), norm(4)) for _ in range(4)))


def test_recomputing_a_compiled_batch_norm_is_refused() -> None:
    plan = sw.Plan.parse("dp1 / compile / recompute=blocks")
    found = r"0\.1 is a BatchNorm1d with running statistics"
    with sw.open_mesh(plan) as mesh, pytest.raises(ModelError, match=found):
        sw.apply(lambda: model(nn.BatchNorm1d), plan, mesh)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_others_are_recomputed(norm: type[nn.Module]) -> None:
    plan = sw.Plan.parse("dp1 / recompute=blocks")
    with sw.open_mesh(plan) as mesh:
        assert sw.apply(lambda: model(norm), plan, mesh).blocks == ("0", "1", "2", "3")
