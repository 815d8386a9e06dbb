"""Groups of an optimizer in checkpoints: of stages that have different ones, and what steps keep in them."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.changed import changed, of_stage
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.saving import number_of
from shardwise.checkpoint.scalars import agreed
from shardwise.errors import CheckpointError, ModelError, UsageError
from shardwise.testing import World
from shardwise.train.protect import Kept
from shardwise.train.updates import group_values
from shardwise.train.updates.group_values import GroupValues
from shardwise.train.updates.optim import NamedOptimizer
from tests.checkpoints import SPLITS, write_checkpoint

ROWS = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.ones(1)) for i in range(64)]


class Net(nn.Module):
    """Of two stages the first one has biases and the last has none; between them lie matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(4))
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss_fn(output: torch.Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output - batch[1]).square())


def groups_of(placed: sw.Placed, lr: float) -> torch.optim.Optimizer:
    params = list(placed.parameters())
    wide = {"params": [p for p in params if p.dim() > 1]}
    return torch.optim.AdamW([wide, {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}], lr=lr)


def parts_of(placed: sw.Placed, lr: float) -> Any:
    parts = {"*.bias": lambda p: sw.sgd(p, lr), "last*": lambda p: sw.adamw(p, lr), "*": lambda p: sw.muon(p, 2 * lr)}
    return sw.several(placed, parts)


OPTIMIZERS = {
    "no_decay": lambda placed, lr: sw.adamw(placed, lr, no_decay=("*.bias",)),
    "muon": sw.muon,
    "several": parts_of,
    "torch": groups_of,
}


def started(mesh: sw.Mesh, plan: sw.Plan, name: str, lr: float) -> sw.TrainState:
    placed = sw.apply(Net, plan, mesh, seed=1, sample=ROWS[0][0].expand(2, 8))
    return sw.TrainState(placed, OPTIMIZERS[name](placed, lr), sw.loader(ROWS, plan.batch, mesh, global_size=8))


def train(path: str, words: str, lr: float, until: int) -> dict[str, tuple[float, tuple[str, ...]]]:
    """For each optimizer the last loss, and what is said to have changed since the checkpoint."""
    plan, found = sw.Plan.parse(words), {}
    with sw.open_mesh(plan) as mesh:
        for name in OPTIMIZERS:
            state, store, changes, loss = started(mesh, plan, name, lr), sw.Store(f"{path}/{name}"), (), 0.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if (loaded := store.load_latest(state)) is not None:
                    changes = loaded.changes
            for metrics in sw.steps(state, loss_fn, until=until):
                loss = metrics.loss
            store.save(state)
            found[name] = loss, changes
    return found


def with_another_head(path: str, words: str, lr: float) -> list[str]:
    """Only the last stage has another rate than at the save: what is said of it."""
    plan = sw.Plan.parse(words)
    with sw.open_mesh(plan) as mesh:
        placed = started(mesh, plan, "several", lr).placed
        parts = {"*.bias": lambda p: sw.sgd(p, lr), "last*": lambda p: sw.adamw(p, 5 * lr)}
        optimizer = sw.several(placed, parts | {"*": lambda p: sw.muon(p, 2 * lr)})
        state = sw.TrainState(placed, optimizer, sw.loader(ROWS, plan.batch, mesh, global_size=8))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = sw.Store(f"{path}/several").load_latest(state)
        assert loaded is not None
        return [*loaded.changes, *(str(warning.message) for warning in caught if "base_lr" in str(warning.message))]


def test_stages_with_other_groups_save_and_load(world: World, tmp_path: Path) -> None:
    pipeline = "pp2 / 1f1b mb2 / fp64"
    world(2, train, str(tmp_path), pipeline, 1e-2, 2)
    for words, until in (("dp2 / fp64", 3), (pipeline, 4), (pipeline, 5)):
        for found in world(2, train, str(tmp_path), words, 1e-2, until):
            assert {name: changes for name, (_, changes) in found.items()} == dict.fromkeys(OPTIMIZERS, ())
    together = train(str(tmp_path / "one"), "dp1 / fp64", 1e-2, 5)
    for name, (loss, _) in found.items():
        assert loss == pytest.approx(together[name][0], rel=1e-11), name
    said = world(2, train, str(tmp_path), pipeline, 3e-2, 6)
    assert all(any(line.startswith("base_lr") for line in changes) for _, changes in said[0].values())
    first, last = world(2, with_another_head, str(tmp_path), pipeline, 3e-2)
    assert len(first) == 2 and first[:1] == last == ["base_lr: [0.03, 0.06] -> [0.03, 0.06, 0.15]"]  # rank 0 warns


def test_ranks_of_one_stage_must_agree() -> None:
    one, other = {"step": 1, "base_lr": [0.1], "optimizer": {"name": "SGD", "groups": []}}, {"base_lr": [0.2]}
    assert agreed([one, one | other], [0, 1])["base_lr"] == [0.1, 0.2]
    in_one_stage = {"batch_norm": {"micro_batches": 2}}
    assert agreed([one, one | in_one_stage], [0, 1]) == agreed([one | in_one_stage, one], [0, 1]) == one | in_one_stage
    with pytest.raises(CheckpointError, match=r"'base_lr': \[0.1\] on rank 0, \[0.2\] on rank 1"):
        agreed([one, one | other], [0, 0])
    with pytest.raises(CheckpointError, match="'step': 1 on rank 0, 2 on rank 1"):
        agreed([one, one | {"step": 2}], [0, 1])
    groups = [one | {"groups": [{"lr": 0.1}] * n} for n in (2, 1)]
    with pytest.raises(CheckpointError, match="'groups': .* on rank 1; stages of the pipeline need as many groups"):
        agreed(groups, [0, 1])
    with pytest.raises(CheckpointError, match="'groups': .* on rank 1; all ranks must save"):
        agreed(groups, [0, 0])


class Counting(torch.optim.Optimizer):
    """SGD whose steps become shorter, by a count in its group; its averages have a name with a dot."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "bounds": (0.0, 1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("avg.fast", torch.zeros_like(p))
                    p.sub_(average.lerp_(p.grad, 0.5), alpha=group["lr"] / (1 + group["k"]) ** 0.5)
            group["k"] += 1
            group["bounds"] = (group["bounds"][0] + 1, 1.0)


def counting(mesh: sw.Mesh, *, ema: bool = False) -> sw.TrainState:
    placed = sw.apply(Net, sw.Plan(), mesh, seed=1)
    average = sw.Ema(placed, 0.9) if ema else None
    return sw.TrainState(placed, Counting(placed.parameters()), sw.loader(ROWS, 8, mesh), ema=average)


def trained(state: sw.TrainState, until: int) -> list[float]:
    return [metrics.loss for metrics in sw.steps(state, loss_fn, until=until)]


def test_what_steps_keep_in_groups_goes_on(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        whole = trained(counting(mesh), 6)
        first, seen = counting(mesh), list[int]()
        trained(first, 3)
        sw.Store(tmp_path).save(first)
        second = counting(mesh)
        second.optimizer.torch.register_step_post_hook(lambda *_: seen.append(1))
        loaded = sw.Store(tmp_path).load_latest(second)
        assert loaded is not None and loaded.changes == ()
        assert second.optimizer.param_groups[0]["k"] == 3 and second.optimizer.param_groups[0]["bounds"] == (3.0, 1.0)
        assert not seen, "a load steps nothing that anybody sees"
        assert trained(second, 6) == whole[3:]
        kept = Kept(first)  # a step back, as after a spike
        assert trained(first, 5) == whole[3:5]
        kept.restore(first)
        assert first.optimizer.param_groups[0]["k"] == 3
        third = counting(mesh)
        third.optimizer.param_groups.append({**third.optimizer.param_groups[0], "params": []})
        with pytest.raises(CheckpointError, match=r"\(bounds, k\): found 1 groups in the checkpoint and 2"):
            third.load_scalars(json.loads(json.dumps(first.scalars())))


def test_of_a_scheduler_of_torch_the_rate_that_it_set_is_kept() -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        state = counting(mesh)
        torch.optim.lr_scheduler.OneCycleLR(state.optimizer.torch, 1.0, total_steps=9, cycle_momentum=False)
        assert {"initial_lr", "max_lr", "min_lr"} <= state.optimizer.param_groups[0].keys()
        assert [*state.scalars()["groups"][0]] == ["lr"]


def test_names_in_groups_of_torch_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a stage are others than those of all; and of a large model they were "too large"."""
    monkeypatch.setattr(group_values, "MOST_BYTES", 20)
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(Net, sw.Plan(), mesh)
        named = torch.optim.SGD(placed.named_parameters().items(), lr=0.1)
        state = sw.TrainState(placed, named)
        assert named.param_groups[0]["param_names"] == [*placed.named_parameters()]
        assert "param_names" not in state.scalars()["optimizer"]["groups"][0] and "groups" not in state.scalars()


def test_a_moving_average_that_one_of_two_runs_has_is_named(tmp_path: Path) -> None:
    with sw.open_mesh(sw.Plan()) as mesh:
        plain, averaged = counting(mesh), counting(mesh, ema=True)
        trained(plain, 1)
        trained(averaged, 2)
        for state, other, words in ((plain, averaged, "without a moving"), (averaged, plain, "with a moving")):
            store = sw.Store(tmp_path / words[:7])
            store.save(state)
            with pytest.raises(CheckpointError, match=f"was saved {words} average"):
                store.load(other, store.checkpoints()[0])
        store.load_latest(averaged)
        assert averaged.ema is not None and averaged.ema.updates == 2
        store.load(averaged, store.checkpoints()[0], weights_only=True)
        assert averaged.ema.updates == 0


def test_what_a_store_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with sw.open_mesh(sw.Plan()) as mesh:
        state = counting(mesh)
        store = sw.Store("kept")
        for step, metric in enumerate((torch.tensor(1.5, dtype=torch.float64), np.float32(0.5), 2)):
            state.step = step
            store.save(state, metric=metric)
            os.makedirs("elsewhere", exist_ok=True)
            os.chdir("elsewhere")  # a store stays where it was
        manifests = [json.loads((path / "manifest.json").read_text()) for path in store.checkpoints()]
        assert [manifest["metric"] for manifest in manifests] == [2.0, 0.5, 1.5]
        assert {path.parent for path in store.checkpoints()} == {tmp_path / "kept"}
        for metric in (True, "1", torch.ones(2)):
            with pytest.raises(UsageError, match="metric: found"):
                store.save(state, metric=metric)
    with pytest.raises(UsageError, match="config: found what JSON cannot hold"):
        sw.Store(tmp_path / "other", config={"a": tmp_path})
    for keep in ("3", None, True, 2.5):
        with pytest.raises(UsageError, match="no whole number"):
            sw.Store(tmp_path / "other", keep=keep)  # type: ignore[arg-type]  # what a caller may do


def test_stages_agree_on_what_is_not_equal_to_itself() -> None:
    """NaN comes from every rank as another object; and what cannot be joined is refused, with its key."""

    def of(**group: Any) -> dict[str, Any]:
        return {"step": 1, "base_lr": [float("nan")], "optimizer": {"name": "AdamW", "groups": [group]}}

    told = [of(d=float("nan"), clip=float("inf")) for _ in range(3)]
    found = agreed(told, [0, 1, 2])
    assert len(found["base_lr"]) == len(found["optimizer"]["groups"]) == 1
    assert len(agreed([of(d=1), of(d=2)], [0, 1])["optimizer"]["groups"]) == 2
    odd = [{"step": 1, "optimizer": {"name": "A", "kind": kind}} for kind in (None, 1)]
    with pytest.raises(CheckpointError, match="stages of the pipeline disagree on 'optimizer.kind': found .None, 1."):
        agreed(odd, [0, 1])
    lacking = [{"step": 1, "optimizer": {"name": "A", "more": [1]}}, {"step": 1, "optimizer": {"name": "B"}}]
    assert agreed(lacking, [0, 1])["optimizer"] == {"name": "A+B", "more": [1]}


def test_what_json_changes_is_no_change(tmp_path: Path) -> None:
    """Tuples come back as lists, at any depth, and NaN is not equal to itself."""
    path = write_checkpoint(tmp_path, *SPLITS)
    settings = {"betas": (0.9, 0.95), "parts": [(1, 2), (3, 4)], "d": float("nan"), "clip": float("inf")}
    now = {"base_lr": [float("nan")], "optimizer": {"name": "AdamW", "groups": [settings]}}
    manifest = replace(Manifest.read(path), scalars={"step": 7, **now})
    read = Manifest.decode(manifest.encode(), "manifest")
    state: Any = SimpleNamespace(placed=SimpleNamespace(plan=sw.Plan()), scalars=lambda: now)
    assert changed(read, state, [of_stage(state)]) == ()
    other = {"base_lr": [0.1], "optimizer": {"name": "AdamW", "groups": [settings | {"betas": (0.9, 0.99)}]}}
    state.scalars = lambda: other
    assert [line.partition(":")[0] for line in changed(read, state, [of_stage(state)])] == [
        "base_lr",
        "optimizer.groups.betas[1]",
    ]


@pytest.mark.parametrize("metric", [10**400, "1", b"1", True, [1], 1j, torch.ones(2)])
def test_a_metric_that_is_no_number(metric: Any) -> None:
    with pytest.raises(UsageError, match="metric: found .*needed one number"):
        number_of(metric)


def test_a_setting_that_is_nan_does_not_move() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": [parameter], "d": float("nan"), "betas": (0.9, 0.95)}]
    optimizer = cast(NamedOptimizer, SimpleNamespace(param_groups=groups, kind="AdamW"))  # it asks no more of one
    values = GroupValues(optimizer, scheduled=True)
    assert values.moved() == [{}]
    groups[0]["d"] = 0.5
    assert values.moved() == [{"d": 0.5}]


class Around(torch.optim.Optimizer):
    """Slow weights around another optimizer, whose state is its own: as Lookahead is commonly written."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


def around(shares: bool, until: int, path: Path, loads: bool = False) -> list[float]:
    with sw.open_mesh(sw.Plan()) as mesh:
        placed = sw.apply(lambda: nn.Linear(8, 1), sw.Plan(), mesh, seed=1)
        optimizer = Around(inner := torch.optim.Adam(placed.parameters(), lr=0.01))
        if shares:
            optimizer.state = inner.state
        state, store = sw.TrainState(placed, optimizer, sw.loader(ROWS, 8, mesh)), sw.Store(path)
        assert not loads or store.load_latest(state) is not None
        losses = [m.loss for m in sw.steps(state, loss_fn, until=until)]
        store.save(state)
        return losses


def test_state_of_an_optimizer_within_an_optimizer_is_shared_or_refused(tmp_path: Path) -> None:
    """It was in no checkpoint, and the proof of a resume said that all was there."""
    words = "state of 2 parameters lies in the Adam that it holds as 'inner'"
    told = pytest.warns(UserWarning, match="no checkpoint will hold this run: .*" + words)
    with told, pytest.raises(ModelError, match=words):
        around(False, 2, tmp_path / "refused")
    whole = around(True, 5, tmp_path / "whole")
    around(True, 3, tmp_path / "cut")
    assert around(True, 5, tmp_path / "cut", loads=True) == whole[3:]
