"""State of an optimizer in lists, tuples and dicts, and state that is made late: stored by name, under any plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import World
from shardwise.train.updates.state_values import filled, forms, frame, leaves

ROWS = [
    (torch.randn(8, generator=torch.Generator().manual_seed(i)).double(), torch.ones(1).double()) for i in range(64)
]


def loss_fn(output: Tensor, batch: Any) -> sw.Loss:
    return sw.mean_over((output - batch[1]).square())


def net() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(8, 1)))


class Base(torch.optim.Optimizer):
    """Steps by what it remembers of a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.of(parameter.grad, self.state[parameter]), alpha=-group["lr"])


class Nested(Base):
    """Past gradients in a list that grows, a pair of a row and a number, a dict, and one that is empty."""

    def of(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {
                "past": [],
                "pair": (grad.square().mean(-1), 0),
                "by": {"mean": grad.clone(), "b": 2.5, "of": [None]},
            }
            state |= {"none": [], "last": None, "counts": [0]}
        assert state["none"] == [] and state["last"] is None and state["by"]["of"] == [None]
        row, count = state["pair"]
        assert type(count) is int and type(state["by"]["b"]) is float and type(state["counts"]) is list
        state["pair"] = (row * 0.9 + grad.square().mean(-1) * 0.1, count + 1)
        state["counts"] = [*state["counts"], count][-3:]
        state["past"] = [*state["past"], grad.clone()][-3:]
        state["by"]["mean"].mul_(0.9).add_(grad)
        state["by"]["b"] *= 1.5
        scale = (state["pair"][0] + 1).sqrt()
        return (
            sum(state["past"]) / (scale.unsqueeze(-1) if grad.dim() > 1 else scale) + state["by"]["mean"] * 0.01 * count
        )


class Late(Base):
    """From the second step on, a mean of each row, a square as large as the rows, a number and a pair."""

    def of(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["n"] = state.get("n", 0) + 1
        if state["n"] < 2:
            return grad
        if state["n"] == 2:
            state["row"], state["factor"], state["past"] = grad.square().mean(-1), 1.0, ([grad.clone(), 0.5],)
            state["eye"] = torch.eye(grad.shape[-1], 3, dtype=torch.float64)
        state["row"].mul_(0.9).add_(grad.square().mean(-1), alpha=0.1)
        state["factor"] *= 0.9
        state["eye"].mul_(1.01)
        ((last, share),) = state["past"]
        state["past"] = ([grad.clone(), share * 0.9],)
        scale = (state["row"] + float(state["eye"][0, 0])).sqrt()
        return (grad + last * share) * state["factor"] / (scale.unsqueeze(-1) if grad.dim() > 1 else scale)


class LateMean(Base):
    """None at first, and then a mean."""

    def of(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"n": 0, "mean": None}
        state["n"] += 1
        if state["n"] > 2:
            state["mean"] = grad.clone() if state["mean"] is None else state["mean"] * 0.9 + grad
        return grad if state["mean"] is None else state["mean"]


class Later(Base):
    """From the sixth step on, a mean, whose first value is of that step."""

    def of(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["n"] = state.get("n", 0) + 1
        if state["n"] > 5:
            state.setdefault("means", [torch.zeros_like(grad)])[0].lerp_(grad, 0.5)
        return state["means"][0] if "means" in state else grad


KINDS = {kind.__name__: kind for kind in (Nested, Late, LateMean, Later)}


def started(mesh: sw.Mesh, plan: sw.Plan, kind: Callable[..., Any]) -> sw.TrainState:
    rules = {"0.0": "column", "1.0": "row", "2.0": "replicate"} if plan.axes.tp > 1 else None
    placed = sw.apply(net, plan, mesh, seed=1, rules=rules)
    return sw.TrainState(placed, kind(placed.parameters()), sw.loader(ROWS, plan.batch, mesh, global_size=8, seed=5))


def go(state: sw.TrainState, until: int) -> list[float]:
    return [m.loss for m in sw.steps(state, loss_fn, until=until)]


def run(words: str, name: str, path: str, stops: tuple[int, ...], saves: bool) -> list[list[float]]:
    """Losses after each of some stops: of a run that is saved there, or of runs that go on from there."""
    plan, found = sw.Plan.parse(f"{words} / fp64"), []
    with sw.open_mesh(plan) as mesh:
        whole = started(mesh, plan, KINDS[name])
        for stop in stops:
            state, store = whole if saves else started(mesh, plan, KINDS[name]), sw.Store(f"{path}/{stop}")
            if saves:
                go(state, stop)
                store.save(state)
            else:
                assert store.load_latest(state) is not None
                found.append(go(state, 6))
        return [go(whole, 6)] if saves else found


STOPS, PIPE = (1, 3, 4), "pp2 / 1f1b mb2"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("saved", "loaded"), [("dp1", "fsdp2"), ("fsdp2", "fsdp2"), ("tp2", "dp1"), ("fsdp2", "pp2 / 1f1b mb2")]
)
def test_state_is_stored_by_names_and_goes_on(world: World, tmp_path: Path, name: str, saved: str, loaded: str) -> None:
    [truth] = run("dp1", name, str(tmp_path / "truth"), STOPS, True)
    for [last] in world(sw.Plan.parse(saved).world, run, saved, name, str(tmp_path / "s"), STOPS, True):
        assert last == pytest.approx(truth, rel=1e-11)
    for runs in world(sw.Plan.parse(loaded).world, run, loaded, name, str(tmp_path / "s"), STOPS, False):
        for stop, losses in zip(STOPS, runs, strict=True):
            assert len(losses) == 6 - stop
            assert losses[-2:] == (last if saved == loaded else pytest.approx(truth, rel=1e-11))


@pytest.mark.parametrize("name", KINDS)
def test_a_state_goes_back_to_before_it_had_made_some(name: str, tmp_path: Path) -> None:
    """As a rewind does: what was made since is not there, and none of it is left as memory held it."""
    plan = sw.Plan.parse("dp1 / fp64")
    with sw.open_mesh(plan) as mesh:
        state, store = started(mesh, plan, KINDS[name]), sw.Store(tmp_path / "s")
        go(state, 1)
        first = store.save(state).path
        losses = go(state, 5)
        store.load(state, first)
        assert go(state, 5) == losses


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"a": 1, "b.c": 2.5, "l": [1, [2, (3,)], {"x": [], "y": {"z": None}}]},
        {"l": ((), [[]]), "m": {"k": [None, 3, None]}},
    ],
)
def test_names_of_nested_state_are_undone(state: dict[str, Any]) -> None:
    assert filled(frame(state), {k: v for k, v in leaves(state).items() if v is not None}) == state


def test_a_list_that_grew_takes_what_has_a_name() -> None:
    assert filled({"l": [None]}, {"l.0": 1, "l.1": 2, "l.2": 3}) == {"l": [1, 2, 3]}
    state = {"a.b": 1, "a.c": [4], "l": [([1, {"x": 2}],)], "d": {"l": [3]}}
    assert filled({}, leaves(state), forms(state)) == state
    with pytest.raises(KeyError):
        filled({"l": [None]}, {"l.0.1": 1})
    assert filled({"d": {"a": [None]}}, {"d.a.0": 1, "d.a.1": 2, "d.b": 3, "e": 4}) == {
        "d": {"a": [1, 2], "b": 3},
        "e": 4,
    }


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("keep_every", [1, 4, 100])
def test_a_rewind_ends_as_if_the_samples_had_never_been_there(name: str, keep_every: int) -> None:
    """Kept is the state before the first step, or one with less, or as much, as there is when it goes back."""
    plan, rows = sw.Plan.parse("dp1 / fp64"), list(ROWS)
    rows[48:56] = [(x, 1e6 * y) for x, y in rows[48:56]]  # the seventh window
    protect = sw.Protect(policy="rewind", min_history=4, keep_every=keep_every)
    ends = []
    with sw.open_mesh(plan) as mesh:
        for never in (False, True):
            placed = sw.apply(net, plan, mesh, seed=1)
            data = sw.loader(rows, plan.batch, mesh, global_size=8, shuffle=False)
            if never:
                data.quarantine(48, 56)
            state = sw.TrainState(placed, KINDS[name](placed.parameters()), data)
            seen = [m for m in sw.steps(state, loss_fn, until=8, options=sw.StepOptions(protect=protect))]
            assert any(m.skipped for m in seen) is not never
            ends.append({m.step: m.loss for m in seen} | {n: t.tolist() for n, t in state.tensors().items()})
    assert ends[0] == ends[1]
