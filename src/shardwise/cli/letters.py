"""What is printed where the terminal or the pipe has no UTF-8: the nearest plain letters, never an error."""

from __future__ import annotations

import codecs
import io
import sys

PLAIN = {"█": "#", "·": "."}
"""Letters of bars, and what stands for them."""


def plain_letters() -> None:
    """Let standard output and error output write what they have no letter for as the nearest plain one, else as `?`.

    Without it a locale such as C ends a verb in the middle of its table, and so does a path that is no UTF-8.
    """
    codecs.register_error("shardwise.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or "utf" not in stream.encoding.lower()):
            stream.reconfigure(errors="shardwise.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "only writing asks"
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end
