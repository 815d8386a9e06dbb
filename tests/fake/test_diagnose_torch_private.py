"""What `diagnose/tracing/torch_private.py` takes from torch is still there, and still means what it meant."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.diagnose.tracing import torch_private
from shardwise.diagnose.tracing.ledger import Ledger
from shardwise.testing import fake_world


def test_tensors_without_memory() -> None:
    with torch_private.fake_tensors():
        tensor = torch.ones(1 << 40)
        assert torch_private.is_fake(tensor) and tensor.device.type == "cpu" and tensor.nbytes == 1 << 42
        with pytest.raises(torch_private.NEEDS_VALUES):
            tensor.nonzero()
        with torch_private.real_tensors():
            assert torch.ones(2).tolist() == [1, 1]
        assert torch_private.is_plain(type(tensor)) and torch_private.is_plain(torch.nn.Parameter)
    assert not torch_private.is_fake(torch.ones(2))


def test_groups_and_work() -> None:
    with fake_world(4):
        group = dist.new_group([0, 1])
        found = torch_private.group_of(group.boxed())
        assert found is not None and found.group_name == group.group_name
        assert torch_private.group_of(3) is None
        assert torch_private.group_named(group.group_name).size() == 2
    tensor = torch.ones(3)
    held = weakref.ref(tensor.untyped_storage())
    work = torch_private.work_that_holds([tensor])
    del tensor
    gc.collect()
    assert held() is not None
    del work
    assert held() is None


def test_buckets_are_put_in_order_once() -> None:
    with fake_world(2):
        module = DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
        torch_private.rebuild_buckets(module)  # nothing is known yet: nothing happens


def test_operations_that_are_answered() -> None:
    seen = []

    class Spy(Ledger):
        def execute(self, func, args, kwargs):  # type: ignore[no-untyped-def]
            seen.append(func)
            return super().execute(func, args, kwargs)

    with Spy():
        torch.ones(()).item()
    assert torch_private.READ_NUMBER in seen
    assert torch_private.AWAIT.name() == "_c10d_functional::wait_tensor"
    assert torch_private.REDUCE_SCATTER.name() == "c10d::_reduce_scatter_base_"


def test_the_ledger_counts_storages() -> None:
    with Ledger() as ledger:
        ledger.begin()
        kept = torch.ones(256)
        view = kept.view(16, 16)
        other = kept + 1
        del other
        assert ledger.total == 1024 and ledger.peaks["update"].num_bytes == 2048
        kept.untyped_storage().resize_(0)
        ledger.begin()
        assert ledger.total == 0 and view.shape == (16, 16)


def test_a_padded_shard_is_known_by_its_storage() -> None:
    """Without it each look at a shard pads it into another tensor, as shapes have no address."""
    with fake_world(3, rank=2):
        mesh = init_device_mesh("cpu", (3,))
        with torch_private.fake_tensors():
            module = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
            group = module._get_fsdp_state()._fsdp_param_group
            assert group is not None
            weight, _ = group.fsdp_params

            def storage() -> int:
                return torch_private.storage_key(weight._sharded_param_data.untyped_storage())

            before = storage()
            with torch_private.shards_known_by_storage():
                weight.reset_sharded_param()
                assert storage() == before
            weight.reset_sharded_param()
            assert storage() != before
