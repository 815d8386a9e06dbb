"""A script that goes on with other settings than those of the checkpoint is told what changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.testing import World

ROWS = [(torch.randn(4, generator=torch.Generator().manual_seed(i)),) for i in range(64)]


def state_of(mesh: sw.Mesh, plan: sw.Plan, optimizer: str = "adamw", size: int = 4, **settings: Any) -> sw.TrainState:
    placed = sw.apply(lambda: nn.Linear(4, 4), plan, mesh, seed=settings.pop("seed", 1))
    made = getattr(sw, optimizer)(placed, **{"lr": 0.01, **settings})
    return sw.TrainState(placed, made, sw.loader(ROWS, size, mesh, seed=3))


CASES: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "dp2": [
        ({}, ()),
        ({"lr": 0.5}, ("base_lr: 0.01 -> 0.5",)),
        ({"betas": (0.8, 0.999)}, ("optimizer.groups.betas[0]: 0.9 -> 0.8",)),
        ({"size": 8, "seed": 7}, ("seed: 1 -> 7", "data.global_size: 4 -> 8")),
    ],
    "fsdp2": [({}, ())],
    "dp2 / bf16": [({}, ("plan.precision: fp32 -> bf16",))],
}


def saved(path: str) -> None:
    plan = sw.Plan.parse("dp2")
    with sw.open_mesh(plan) as mesh:
        sw.Store(path).save(state_of(mesh, plan))


def changes(path: str, words: str) -> list[tuple[tuple[str, ...], list[str]]]:
    """For each case what `Loaded.changes` says, and the warnings."""
    found, plan = [], sw.Plan.parse(words)
    with sw.open_mesh(plan) as mesh:
        for settings, _ in CASES[words]:
            state = state_of(mesh, plan, **settings)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loaded = sw.Store(path).load_latest(state)
            assert loaded is not None
            found.append((loaded.changes, [str(warning.message) for warning in caught]))
    return found


def test_what_changed_is_said_on_one_rank(world: World, tmp_path: Path) -> None:
    world(2, saved, str(tmp_path))
    for words, cases in CASES.items():
        for rank, found in enumerate(world(2, changes, str(tmp_path), words)):
            for (_, wanted), (said, warned) in zip(cases, found, strict=True):
                assert said == wanted
                text = f"{tmp_path}/step-00000000: changed since it was saved: {'; '.join(wanted)}"
                assert warned == ([text] if wanted and rank == 0 else [])


def test_another_optimizer_of_the_same_state_is_said(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        sw.Store(tmp_path).save(state_of(mesh, sw.Plan()))
        for config, warns in (({}, True), ({"by": "its own settings"}, False)):
            loaded = None
            with pytest.warns(UserWarning, match="optimizer.name") if warns else warnings.catch_warnings():
                loaded = sw.Store(tmp_path, config=config).load_latest(state_of(mesh, sw.Plan(), "lamb"))
            assert loaded is not None and "optimizer.name: 'AdamW' -> 'Lamb'" in loaded.changes
        assert sw.Store(tmp_path).load(state_of(mesh, sw.Plan(), lr=1.0), tmp_path, weights_only=True).changes == ()


def test_batches_that_cannot_say_where_they_are_are_refused() -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(4, 4), sw.Plan(), mesh)
        with pytest.raises(UsageError, match="batches of type list, which cannot say where it is"):
            sw.TrainState(placed, sw.adamw(placed, lr=0.1), [1, 2])
