"""`Line`: what the processes of a launcher say to each other, a line of JSON at a time over a socket. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from socket import AF_UNIX, IPPROTO_TCP, TCP_NODELAY, socket
from typing import Any

LONGEST = 64 << 20
"""Bytes of a message: more is no message of ours."""


class Line:
    """One end of a connection.

    >>> from socket import socketpair
    >>> here, there = map(Line, socketpair())
    >>> here.send({"do": "order"})
    >>> there.receive()
    [{'do': 'order'}]
    """

    def __init__(self, connection: socket) -> None:
        """See the class."""
        self.socket = connection
        if connection.family != AF_UNIX:  # what is said is short, and waited for
            connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._received, self._kept = b"", list[dict[str, Any]]()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: nobody listens any more.
        """
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    @property
    def has_kept(self) -> bool:
        """Whether there is something to receive that the socket does not show."""
        return bool(self._kept)

    def first(self) -> dict[str, Any]:
        """One message; those that have come with it are received later. Errors: see `receive`."""
        while not (found := self.receive()):
            pass
        self._kept = found[1:]
        return found[0]

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come whole; blocks when nothing has come.

        Raises:
            EOFError: nobody speaks any more.
            OSError: the connection is broken.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        piece = self.socket.recv(1 << 16)
        if not piece:
            raise EOFError
        if b"\n" not in piece:
            self._received += piece
            if len(self._received) > LONGEST:
                raise OSError(f"a message of more than {LONGEST} bytes")
            return []
        *lines, self._received = (self._received + piece).split(b"\n")
        return [json.loads(line) for line in lines]
