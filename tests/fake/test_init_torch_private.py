"""What initialisation uses of torch's private names, each against what it is used for."""

import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from shardwise.parallel import torch_private
from shardwise.parallel.init import init_model


def test_storage_key_is_one_per_storage_and_another_for_another() -> None:
    for device in ("cpu", "meta"):
        a, b = torch.empty(4, device=device), torch.empty(4, device=device)
        assert (
            torch_private.storage_key(a)
            == torch_private.storage_key(a.view(2, 2))
            == torch_private.storage_key(a.detach())
        )
        assert torch_private.storage_key(a) != torch_private.storage_key(b)


def truncated(layer: nn.Linear) -> None:
    nn.init.trunc_normal_(layer.weight, mean=3.0, std=0.02, a=2.9, b=3.1)


def orthogonal(layer: nn.Linear) -> None:
    nn.init.orthogonal_(layer.weight, gain=9.0)


def sparse(layer: nn.Linear) -> None:
    nn.init.sparse_(layer.weight, sparsity=0.5)


@pytest.mark.parametrize(("fill", "norm"), [(truncated, 3 * 32), (orthogonal, 9 * 32**0.5), (sparse, 0.01 * 512**0.5)])
def test_initialisers_that_do_nothing_on_meta_are_still_seen(fill, norm: float) -> None:  # type: ignore[no-untyped-def]
    def build() -> nn.Module:
        layer = nn.Linear(32, 32)
        fill(layer)
        return layer

    assert float(init_model(build).weight.detach().norm()) == pytest.approx(norm, rel=0.1)
    assert float(init_model(lambda: nn.Linear(32, 32)).weight.detach().norm()) != pytest.approx(norm, rel=0.1)


def test_skipped_init_ignores_other_code() -> None:
    assert torch_private.skipped_init(sys._getframe()) is None


def test_strided_shard_factor() -> None:
    assert torch_private.strided_shard_factor(_StridedShard(0, split_factor=4)) == 4
    assert torch_private.strided_shard_factor(Shard(0)) is None
    assert torch_private.strided_shard_factor(Replicate()) is None


def test_refresh_rebuilds_what_a_recurrent_module_derives() -> None:
    module = nn.LSTM(2, 2)
    module._parameters["weight_ih_l0"] = nn.Parameter(torch.zeros(8, 2))
    torch_private.refresh(module)
    assert module._flat_weights[0] is module.weight_ih_l0


def test_run_backward_takes_several_roots_one_of_them_a_leaf() -> None:
    weight, numbers = nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.zeros(2))
    loss = weight.square().sum()
    torch_private.run_backward((loss, numbers), (torch.ones_like(loss), torch.tensor([5.0, 7.0])))
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 6.0]
    assert numbers.grad is not None and numbers.grad.tolist() == [5.0, 7.0]


def test_swap_tensors_exchanges_values_and_keeps_objects() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
    torch_private.swap_tensors(a, b)
    assert a.shape == (3,) and b.shape == (2,)


def test_operation_mode_sees_aten_operations() -> None:
    class Seen(torch_private.OperationMode):  # type: ignore[misc]
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.ones(2)
    assert seen.names == ["aten.ones.default"]
