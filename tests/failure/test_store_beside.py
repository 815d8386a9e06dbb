"""What a save beside training copies late: the optimizer waits for it, and a change by other means is found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from shardwise.checkpoint import snapshot
from shardwise.checkpoint.store import Store
from shardwise.errors import CheckpointError
from tests.plain import Plain


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each late copy takes a while."""
    copy = snapshot._copy

    def slowly(source: Tensor, target: Tensor) -> None:
        time.sleep(0.05)
        copy(source, target)

    monkeypatch.setattr(snapshot, "_copy", slowly)


def optimizer_of(state: Plain) -> torch.optim.Optimizer:
    """A torch optimizer whose steps change what the state holds as the optimizer's own."""
    changed = [tensor.requires_grad_() for name, tensor in state.content.items() if name.startswith("optim.")]
    optimizer = torch.optim.SGD(changed, lr=1.0)
    for tensor in changed:
        tensor.grad = torch.ones_like(tensor)
    return optimizer


def test_a_step_waits_until_the_optimizers_state_is_copied(slow: None, tmp_path: Path) -> None:
    state, store = Plain(), Store(tmp_path / "store")
    state.advance()
    optimizer = optimizer_of(state)
    asked = len(_global_optimizer_pre_hooks)
    saving = store.save_async(state)
    assert len(_global_optimizer_pre_hooks) == asked + 1
    optimizer.step()
    store.wait()
    assert not store.take_findings()
    assert saving.held_up_s > 0.05 and not saving.previous_held_up_s
    found = Plain()
    Store(tmp_path / "store").load_latest(found)
    assert found.is_of(1) and not state.is_of(1)
    assert len(_global_optimizer_pre_hooks) == asked, "nobody asks any more"
    assert store.save_async(state).previous_held_up_s == saving.held_up_s
    store.wait()


def test_a_change_by_other_means_fails_the_save_and_does_not_tear_it(slow: None, tmp_path: Path) -> None:
    state, store = Plain(), Store(tmp_path / "store")
    state.advance()
    store.save(state)
    state.advance()
    saving = store.save_async(state)
    state.content["optim.w.exp_avg"].add_(1.0)
    with pytest.raises(CheckpointError, match="optim.w.exp_avg to host memory: it changed meanwhile"):
        saving.wait()
    [finding] = store.take_findings() or [store.wait(), *store.take_findings()][1:]
    assert "the run goes on" in str(finding)
    found = Plain()
    Store(tmp_path / "store").load_latest(found)
    assert found.is_of(1)
    store.save(state)
    Store(tmp_path / "store").load_latest(found)
    assert found.step == 2


def test_parameters_may_change_at_once(slow: None, tmp_path: Path) -> None:
    state, store = Plain(), Store(tmp_path / "store")
    state.advance()
    store.save_async(state)
    state.content["model.w"].zero_()
    store.wait()
    assert not store.take_findings()
    found = Plain()
    Store(tmp_path / "store").load_latest(found)
    assert found.is_of(1)


def test_what_stands_in_the_way_of_a_name_is_said(tmp_path: Path) -> None:
    (tmp_path / "store" / "latest").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"Is a directory \(.*/store/\.latest\.\w+ -> .*/store/latest\)"):
        Store(tmp_path / "store").save(Plain())


def test_two_stores_at_one_place_save_one_after_the_other(slow: None, tmp_path: Path) -> None:
    """Who begins a save clears up there: the other store's, that went on, was removed."""
    state, stores = Plain(), [Store(tmp_path / "store", keep=9) for _ in range(2)]
    (tmp_path / "link").symlink_to("store")
    found, state.run_id = Plain(), "ab" * 16
    for store in (*stores, Store(tmp_path / "link", keep=9)):
        state.advance()
        store.save_async(state)
    assert len(stores[0].checkpoints()) == 2, "the third one goes on"
    Store(tmp_path / "store").load_latest(found)
    assert found.step == 3 and not any(store.take_findings() for store in stores)


def test_what_is_known_of_checkpoints_goes_with_them(tmp_path: Path) -> None:
    state, store = Plain(), Store(tmp_path / "store", keep=2)
    for _ in range(8):
        state.advance()
        store.save(state)
    assert len(store._directory._known) <= 3
