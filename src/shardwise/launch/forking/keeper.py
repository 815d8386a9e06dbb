"""`keep_store`: the process that holds the store in which a set of ranks meets; forked where torch is imported already.

So the launcher needs no torch, and the port is held from the moment on that it is known: no race for a free one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its type stubs

from shardwise.launch.entry import die_with_parent
from shardwise.launch.job import ADDRESS
from shardwise.train.kept.outliving import call_process

_BACKLOG = 4096
"""Ranks that connect at the same moment; the kernel takes the smaller of this and its own limit."""


def open_store(address: str, port: int) -> TCPStore:
    """A store in which ranks meet, held by this process. On the address of one machine nobody else can connect to it.

    torch's own listener takes connections on every interface, whatever the address is.

    Args:
        address: of this host, where ranks look for it.
        port: the wanted one; 0: a free one.

    Raises:
        OSError, RuntimeError: it cannot listen there.
    """
    with socket.socket() as listener:
        descriptor = None
        if address == ADDRESS:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just used
            listener.bind((address, port))
            listener.listen(_BACKLOG)
            port, descriptor = listener.getsockname()[1], listener.detach()  # torch closes it with the store
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=descriptor,
        )


def keep_store(address: str, port: int, told: int, parent: int) -> NoReturn:
    """Open a store, say where, and hold it until this process is ended, or its parent is gone.

    Args:
        address: where ranks look for it.
        port: the wanted one; 0: a free one.
        told: file that gets a line of JSON: the port, and the problem, if there is one.
        parent: the process without which it ends.
    """
    die_with_parent(parent, signal.SIGKILL)
    problem = None
    try:
        call_process("store")
        store = open_store(address, port)
        port = store.port
    except Exception as error:  # whatever it is, the launcher says it
        problem = f"{address}:{port or 'a free port'}: {str(error).splitlines()[0]}"
    os.write(told, json.dumps({"port": port, "problem": problem}).encode() + b"\n")
    os.close(told)
    if problem is None:
        signal.pause()  # its threads serve
    os._exit(0)
