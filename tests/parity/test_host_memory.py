"""Memory for what is saved and loaded."""

from __future__ import annotations

import pytest
import torch

from shardwise.parallel.host_memory import host_memory, in_huge_pages


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 2**22 + 4096, 3 * 2**22 + 5])
def test_what_is_asked_for_holds_what_is_written(num_bytes: int) -> None:
    for memory in (host_memory(num_bytes), torch.empty(num_bytes, dtype=torch.uint8)):
        in_huge_pages(memory)
        assert memory.numel() == num_bytes and bool((memory.fill_(7) == 7).all())


def test_what_is_there_already_stays() -> None:
    around = torch.arange(5 * 2**20)
    in_huge_pages(around[3:-3])
    assert torch.equal(around, torch.arange(5 * 2**20))
