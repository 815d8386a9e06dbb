"""A child process that can get only so much more memory: what reads hostile files there must not need more."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path


def in_little_memory(work: Callable[[], object], room_bytes: int) -> None:
    """Run it in a fork that may add so much address space; what it raises is an `AssertionError` here."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + room_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            work()
        except BaseException:
            os.write(writing, traceback.format_exc()[-8000:].encode(errors="replace"))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0 and not said, said
