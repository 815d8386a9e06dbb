"""A run that stops at a random step and goes on in fresh objects is the run that never stopped, bit by bit.

Compared are the samples, losses, gradient norms and scale of every step after the stop, and at the end every parameter,
optimizer state, average and scalar. The model draws in every way that is keyed; saves happen with batches read ahead.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.store import Store
from shardwise.parallel.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.testing.world import World
from shardwise.train.ema import Ema
from shardwise.train.loss import token_cross_entropy
from shardwise.train.lr import warmup_cosine
from shardwise.train.step import make_step
from tests.parity.random_models import DIM, SEQ, VOCAB, Block

STEPS, ROWS, SIZE = 7, 4, 22
"""A step takes 4 of 22 samples, so the run passes from one epoch into the next."""
ALONE, TOGETHER = (100, 24) if os.environ.get("SHARDWISE_SOAK") else (40, 12)


class Case(NamedTuple):
    """Where a run stops, and how it goes on."""

    accumulation: int
    precision: str
    workers_before: int
    stop: int
    workers_after: int

    @property
    def run(self) -> tuple[int, str, int]:
        """The undisturbed run that it is cut from."""
        return self[:3]


class Samples:
    """22 samples; each is a function of its number."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Net(nn.Module):
    """One block: token ids (batch, seq) -> logits (batch, seq, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, DIM), Block(0.2, False), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(input_ids))) + 0  # FSDP2 warns of a view


class Seen(NamedTuple):
    """One step."""

    samples: tuple[int, ...]
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    scale: float | None


class Run:
    """A training run in fresh objects."""

    def __init__(self, mesh: Mesh, plan: Plan, workers: int) -> None:
        placed = sw.apply(Net, plan, mesh, seed=3)
        data = sw.loader(Samples(), plan.batch, mesh, global_size=ROWS, seed=4, workers=workers)
        schedule, ema = warmup_cosine(2, STEPS), Ema(placed, 0.9)
        self.state = sw.TrainState(placed, sw.adamw(placed, 3e-3), data, schedule=schedule, ema=ema)
        self.data = data
        if self.state.loss_scale is not None:  # it doubles every second step, and falls when a gradient overflows
            self.state.loss_scale.scale, self.state.loss_scale.period = 2.0**14, 2
        self.step = make_step(self.state, lambda out, batch: token_cross_entropy(out, batch["labels"]), clip=1.0)
        self.state.placed.train(True)

    def go(self) -> Seen:
        window = next(self.data)
        done, scale = self.step(window), self.state.loss_scale
        scaled = scale.scale if scale is not None else None
        return Seen(tuple(window.sample_ids), done.loss, done.grad_norm, done.lr, done.skipped, scaled)

    def end(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's part of every tensor, and the scalars."""
        local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in self.state.tensors().items()}
        return {name: tensor.clone() for name, tensor in local.items()}, self.state.scalars()


def from_start_to_end(folder: Path, mesh: Mesh, plan: Plan, workers: int) -> tuple[list[Seen], Any, Any]:
    """The undisturbed run, which saves after every step."""
    run, store, seen = Run(mesh, plan, workers), Store(folder, keep=STEPS), []
    for _ in range(STEPS):
        seen.append(run.go())
        store.save(run.state)
    return seen, *run.end()


def resumed_runs(path: str, world: int, cases: list[Case]) -> list[int]:
    """Check the cases; how many steps each did after its stop. Runs on every rank."""
    undisturbed: dict[Any, Any] = {}
    counts = []
    axes = "fsdp2" if world == 2 else "dp1"
    with sw.open_mesh(Plan.parse(axes)) as mesh:
        for case in cases:
            plan = Plan.parse(f"{axes} / mb{case.accumulation} / {case.precision}")
            folder = Path(path) / "-".join(map(str, case.run))
            if case.run not in undisturbed:
                undisturbed[case.run] = from_start_to_end(folder, mesh, plan, case.workers_before)
            seen, tensors, scalars = undisturbed[case.run]
            torch.manual_seed(case.stop)  # the generator of the process is not part of a run
            run = Run(mesh, plan, case.workers_after)
            loaded = Store(folder).load(run.state, folder / f"step-{case.stop:08d}")
            assert loaded.step == case.stop
            for wanted in seen[case.stop :]:
                found = run.go()
                assert repr(found) == repr(wanted), (case, found, wanted)  # a norm that is not finite is the same one
            now, plain = run.end()
            assert plain == scalars, (case, plain, scalars)
            wrong = [name for name, tensor in tensors.items() if not torch.equal(now[name], tensor)]
            assert not wrong and now.keys() == tensors.keys(), (case, wrong)
            counts.append(STEPS - case.stop)
    skipped = [s.skipped for seen, *_ in undisturbed.values() for s in seen]
    scales = {s.scale for seen, *_ in undisturbed.values() for s in seen}
    assert any(skipped) and len(scales) > 2, "no scale moved: the scaler was not put to the test"
    return counts


def drawn(count: int, seed: int) -> list[Case]:
    """Random stops, with every accumulation, precision and number of workers among them."""
    space = list(itertools.product((1, 2), ("fp32", "fp16"), (0, 2), range(1, STEPS), (0, 1, 2)))
    cases = sorted(Case(*drawn) for drawn in random.Random(seed).sample(space, count))
    assert {case.precision for case in cases} >= {"fp32", "fp16"}
    return cases


def test_random_stops_in_one_process_change_nothing(world: World, tmp_path: Path) -> None:
    [counts] = world(1, resumed_runs, str(tmp_path), 1, drawn(ALONE, 1), timeout_s=120)
    assert len(counts) == ALONE and sum(counts) > ALONE


def test_random_stops_of_two_ranks_change_nothing(world: World, tmp_path: Path) -> None:
    for counts in world(2, resumed_runs, str(tmp_path), 2, drawn(TOGETHER, 2), timeout_s=120):
        assert len(counts) == TOGETHER
