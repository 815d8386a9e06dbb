"""The errors of a rank that lost a peer: true, but not the cause."""

from __future__ import annotations

import re

_ECHO = re.compile(r"onnection (?:was )?(?:closed|reset)|roken pipe|gloo/transport|remote (?:process|peer)|Abort", re.I)


def is_echo(message: str) -> bool:
    """Whether an error's message says no more than that another rank is gone.

    >>> is_echo("Connection closed by peer [127.0.0.1]:3469"), is_echo("labels")
    (True, False)
    """
    return bool(_ECHO.search(message))
