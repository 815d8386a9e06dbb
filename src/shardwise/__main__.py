"""The command: `shardwise`, and `python -m shardwise`."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> None:
    """Run a verb. Ctrl-C while the command line is being imported ends the process by that signal, without a word.

    Where Ctrl-C is ignored, as by a shell for what runs in the background, it stays so.
    """
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module("shardwise.cli.main").main
    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
