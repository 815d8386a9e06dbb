"""The private torch names of the train folder: each test fails loudly when torch moves one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.parallel.mesh import open_mesh
from shardwise.parallel.torch_private import empty_as
from shardwise.testing.world import World
from shardwise.train.torch_private import (
    clamp_all,
    copy_all,
    has_step_hooks,
    is_mean,
    is_norm_of_all,
    local_of,
    mean_of_labels,
    norms,
    scale_all,
    shard_like,
    step_unseen,
)
from tests.parity.placing import LAYOUTS, place


def test_scale_and_clamp_in_place() -> None:
    tensors = [torch.tensor([1.0, -5.0]), torch.tensor(4.0)]
    scale_all(tensors, 2.0)
    assert [t.tolist() for t in tensors] == [[2.0, -10.0], 8.0]
    clamp_all(tensors, 3.0)
    assert [t.tolist() for t in tensors] == [[2.0, -3.0], 3.0]


def test_norms_of_a_list() -> None:
    assert [n.tolist() for n in norms([torch.tensor([3.0, -4.0]), torch.tensor(2.0)])] == [5.0, 2.0]


def test_hooks_of_an_optimizer_and_the_norm_that_clipping_takes() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert not has_step_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    weight.grad, seen = torch.ones(2), list[object]()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend([args[0]] if is_norm_of_all(func) else [])
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert seen == [[weight.grad]]


def test_the_mean_of_labels_that_a_loss_was_made_of() -> None:
    logits = torch.zeros(4, 3, requires_grad=True)
    labels, weights, take = torch.tensor([0, -1, 2, -1]), torch.ones(3), torch.nn.functional.cross_entropy
    assert mean_of_labels(take(logits * 2, labels, ignore_index=-1) + logits.sum() * 0.1) == (2, 4, False)
    assert mean_of_labels(take(logits, labels.clamp(0), weight=weights)) == (0, 4, True)
    assert mean_of_labels(take(logits.view(1, 3, 4), labels.view(1, 4), ignore_index=-1)) == (2, 4, False)
    assert mean_of_labels(take(logits, labels, ignore_index=-1, reduction="sum")) is None
    assert mean_of_labels(logits.square().mean()) is None and mean_of_labels(torch.zeros(())) is None


def test_a_mean_that_nothing_has_multiplied() -> None:
    values, take = torch.ones(4, 3, requires_grad=True), torch.nn.functional
    labels = torch.tensor([0, 1, 2, 0])
    for mean in [values.mean(), take.mse_loss(values, values.detach()), take.cross_entropy(values, labels)]:
        assert is_mean(mean) and is_mean(mean + values.mean() + 1.0) and is_mean(mean.double())
        assert not is_mean(mean * 2) and not is_mean(mean + values.sum()) and not is_mean(mean.detach())


def test_copy_into_other_tensors() -> None:
    targets = [torch.zeros(2), torch.tensor(0, dtype=torch.int64)]
    copy_all(targets, [torch.tensor([3.0, -4.0]), torch.tensor(2)])
    assert [t.tolist() for t in targets] == [[3.0, -4.0], 2]
    copy_all([], [])


def test_a_step_that_no_hook_sees() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    weight.grad = torch.ones(2)
    step_unseen(optimizer)
    assert weight.tolist() == [0.0, 0.0] and not seen
    optimizer.step()
    assert seen == ["pre", "post"]


def test_local_of_shares_storage(world: World) -> None:
    assert all(world(2, locals_are_shards))
    plain = torch.ones(2, requires_grad=True)
    assert local_of(plain).data_ptr() == plain.data_ptr() and not local_of(plain).requires_grad


def locals_are_shards() -> bool:
    with open_mesh(LAYOUTS["fsdp2"]) as mesh:
        parameters = [p for p in place("fsdp2", mesh).parameters() if isinstance(p, DTensor)]
        return bool(parameters) and all(local_of(p).data_ptr() == p.to_local().data_ptr() for p in parameters)


def rewrap(layout: str) -> bool:
    with open_mesh(LAYOUTS[layout]) as mesh:
        for parameter in place(layout, mesh).parameters():
            assert isinstance(parameter, DTensor)
            local = parameter.to_local().detach()
            for shard in (local, local.double()):
                again = shard_like(shard, parameter)
                assert again.shape == parameter.shape and again.placements == parameter.placements
                assert again.dtype == shard.dtype and again.to_local().data_ptr() == shard.data_ptr()
                assert torch.equal(again.full_tensor().float(), parameter.full_tensor())
            empty = empty_as(parameter)
            assert isinstance(empty, DTensor) and (empty.shape, empty.dtype) == (parameter.shape, parameter.dtype)
            assert empty.placements == parameter.placements and empty.to_local().data_ptr() != local.data_ptr()
    return True


def test_shard_like_keeps_layout_and_storage(world: World) -> None:
    assert all(world(2, rewrap, "fsdp2")) and all(world(4, rewrap, "fsdp2tp2"))
