"""The private torch names that this folder uses, and nothing else. Each has a test that fails when torch moves it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake_group(num_ranks: int, rank: int) -> None:
    """Make this process a rank of a group that nobody else is in: `FakeStore`, whose import registers "fake"."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)


def forget_meshes() -> None:
    """Empty DTensor's caches: of sharding propagation and of how to redistribute.

    Their keys hold meshes, equal where ranks and names are equal: neither the group nor this process's own rank
    counts. Results hold the mesh of the first call, so the next world would be given coordinates of the last one.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _gen_transform_infos.cache_clear()
