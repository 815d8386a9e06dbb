"""Memory of the host for what is saved and loaded: in huge pages, where there are any, the first touch costs less."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def host_memory(num_bytes: int, *, pinned: bool = False) -> Tensor:
    """Bytes of the host, pinned for copies from and to an accelerator, or in huge pages."""
    if pinned or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def in_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a tensor on the CPU that nobody has written to yet.

    Where the kernel has none, nothing changes. Small tensors are left alone: the kernel counts each stretch of memory
    that is treated differently, and a process may have 65,530.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size >= _WORTH:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


_LIBC = ctypes.CDLL(None)
_WORTH = 4 * 1024 * 1024
"""Two huge pages of most processors: one lies within it, wherever it begins."""
