"""A verb in processes that a launcher has started: what it does and says, and none of them imports torch again."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from shardwise.cli.main import main
from shardwise.testing.world import World


def typed(world: World, folder: Path, words: Sequence[str], ranks: int = 1) -> CompletedProcess[str]:
    """`shardwise WORDS` under torchrun: each process is a rank and starts none; what the first one was."""
    first, *_ = world(ranks, ran, str(folder), list(words), TORCHELASTIC_RUN_ID="x")
    assert isinstance(first, CompletedProcess)
    return first


def ran(folder: str, words: list[str]) -> CompletedProcess[str]:
    """In this process: its exit code, and what it said."""
    os.chdir(folder)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())
