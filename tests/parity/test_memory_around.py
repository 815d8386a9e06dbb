"""Outside of steps: the closed form against the live tensor bytes of real processes that place, save and load."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.diagnose.tracing.estimate import training_of
from shardwise.diagnose.tracing.ledger import Ledger, axis_names
from shardwise.model.profile import profile_of
from shardwise.plan.memory import estimate_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import load_stack
from shardwise.plan.workload import Workload
from tests.fake.test_memory_against_trace import MODELS

FAST = [("dp2", "llama", "adamw"), ("fsdp2 / bf16-pure", "llama", "adamw"), ("fsdp2 tp2", "llama", "muon")]
CELLS = [
    ("dp1", "tied", "adamw"),
    ("dp2 / bf16", "llama", "lion"),
    ("fsdp2 / bf16", "llama", "sgd"),
    ("fsdp2 / fp64", "llama", "sgd-momentum"),
    ("fsdp4 / zero1", "tied", "adamw"),
    ("dp2 fsdp2 / zero2", "llama", "adamw-bf16"),
    ("fsdp2 / offload=state", "llama", "adamw"),
    ("fsdp2 ep2", "moe", "adamw"),
    ("fsdp2 ep2", "moe", "muon"),
    ("tp2", "moe", "adamw"),
    ("cp2", "llama", "adamw"),
    ("pp2 fsdp2 / 1f1b mb2", "llama", "adamw"),
]


def phases_of(text: str, model: str, optimizer: str, folder: str) -> dict[str, int]:
    """Largest sums of live bytes: of a placement, a save after a step, and a load into a state that is new.

    Placing and loading are done twice: the first time DTensor finds out shapes with tensors of global shape, which hold
    no memory and are counted.
    """
    plan = Plan.parse(text)
    training = training_of(MODELS[model], work_of(optimizer))
    with sw.open_mesh(plan) as mesh:
        ledger, now = Ledger(axis_names(mesh)), ["first"]
        ledger.patience_s = 1e-3
        ledger.phase = lambda: now[0]

        def enter(phase: str) -> None:
            gc.collect()
            now[0] = phase

        def new() -> sw.TrainState:
            placed = sw.apply(training.model, plan, mesh)
            return sw.TrainState(placed, training.optimizer(placed))

        with ledger:
            state, store = new(), sw.Store(Path(folder))
            enter("step")
            sw.make_step(state, training.loss)(training.batch(mesh))
            enter("save")
            store.save(state)
            for place, load in (("first", "first"), ("place", "load")):
                del state, store
                enter(place)
                state, store = new(), sw.Store(Path(folder))
                enter(load)
                assert store.load_latest(state) is not None
        return {phase: peak.num_bytes for phase, peak in ledger.peaks.items()}


def work_of(optimizer: str) -> Workload:
    return Workload(seq_len=16, global_batch=8, optimizer=optimizer)


def check(world: Any, folder: Path, text: str, model: str, optimizer: str) -> None:
    plan = Plan.parse(text)
    real = world(plan.world, phases_of, text, model, optimizer, str(folder / "store"), timeout_s=300)
    memory = estimate_memory(profile_of(MODELS[model]), plan, work_of(optimizer), stack=load_stack("shardwise-cpu"))
    for phase in ("place", "save", "load"):
        assert memory.peaks[phase] == pytest.approx(max(found[phase] for found in real), rel=0.03), phase


@pytest.mark.share(6)
@pytest.mark.parametrize(("plan", "model", "optimizer"), FAST)
def test_within_three_per_cent(world: Any, tmp_path: Path, plan: str, model: str, optimizer: str) -> None:
    check(world, tmp_path, plan, model, optimizer)


@pytest.mark.parametrize(
    ("plan", "model", "optimizer"), [pytest.param(*cell, marks=pytest.mark.soak) for cell in CELLS]
)
def test_every_layout(world: Any, tmp_path: Path, plan: str, model: str, optimizer: str) -> None:
    check(world, tmp_path, plan, model, optimizer)
