"""What every rank of a local job runs: a script or module as `__main__`, its first failure kept for the launcher.

`python -m shardwise.launch.entry --script train.py a b` is `python train.py a b`. With `--report RANK FILE PID` in
front an exception goes to that file in place of the terminal, so that one message is printed and not one per rank.
Imports no torch: the script does, or does not.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shardwise.errors import ExitCode, OutOfMemoryError, ShardwiseError

_PR_SET_PDEATHSIG = 1
_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: (.*)")
"""What torch says of it, in any line of the main thread, or in the cause of what waits for its batch."""


@dataclass(frozen=True)
class Reporting:
    """Who this rank is to the launcher that started it."""

    rank: int
    path: Path
    launcher_pid: int


def main(argv: list[str]) -> int:
    """Run a target as this process; the exit code.

    Args:
        argv: `--report RANK FILE PID` or nothing, then `--script PATH` or `--module NAME`, then the target's words.
    """
    reporting, argv = _reporting(argv)
    try:
        try:
            _run(argv, reporting)
        except Exception as error:  # the script's own
            return _report(error, reporting)
    except KeyboardInterrupt:  # in the report, too
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def report(error: ShardwiseError, argv: list[str]) -> int:
    """For a rank that cannot be started with these words: leave the error where it would; its exit code."""
    return _report(error, _reporting(argv)[0])


def _reporting(argv: list[str]) -> tuple[Reporting | None, list[str]]:
    """To whom this is told, and the words after that."""
    if argv[0] != "--report":
        return None, argv
    return Reporting(int(argv[1]), Path(argv[2]), int(argv[3])), argv[4:]


def _run(argv: list[str], reporting: Reporting | None) -> None:
    kind, target, args = argv[0], argv[1], argv[2:]
    if reporting is not None:
        _prepare(reporting)
    sys.argv = [target, *args]
    if kind == "--module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        try:
            runpy.run_path(target, run_name="__main__")
        except SyntaxError as error:  # of a file that is no text Python does not say which it is
            error.filename = error.filename or target
            raise


def _prepare(reporting: Reporting) -> None:
    # the launcher held signals back while it started us, and that is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)  # whole lines: ranks share the terminal
    faulthandler.enable(2)  # a crash in native code says where in Python it was
    die_with_parent(reporting.launcher_pid, signal.SIGTERM)


def _report(error: Exception, reporting: Reporting | None) -> int:
    """Write the error for the launcher; without one (torchrun), print it."""
    text = "".join(traceback.format_exception(type(error), error, _below_runpy(error)))
    killed = _killed_worker(error, text)
    known = killed is not None or isinstance(error, ShardwiseError)
    code = error.exit_code if isinstance(error, ShardwiseError) else ExitCode.RANK_FAILED
    if reporting is None:
        sys.stderr.write(f"{type(error).__name__}: {killed or error}\n" if known else text)
        return code
    record = {
        "rank": reporting.rank,
        "type": type(error).__name__,
        "message": killed or str(error),
        "exit_code": int(code),
        "known": known,
        "killed": killed is not None,
        "halving": error.halving if isinstance(error, OutOfMemoryError) else None,
        "traceback": text,
        "time_s": time.time(),
    }
    part = reporting.path.with_suffix(".part")
    part.write_text(json.dumps(record), encoding="utf-8")
    part.replace(reporting.path)  # the launcher never reads half a record
    return code


def _killed_worker(error: Exception, text: str) -> str | None:
    """What to say where a process that reads for this rank was killed; None: something else went wrong."""
    found = _WORKER.search(text) if str(error).startswith("DataLoader worker (pid") else None
    if found is None:
        return None
    hint = " (often the kernel, out of memory: see `dmesg`)" if found[2].startswith("Killed") else ""
    return f"a data worker of it, process {found[1]}, was ended by a signal: {found[2].strip(' .')}{hint}"


def _below_runpy(error: Exception) -> TracebackType | None:
    """The traceback from the user's first frame on; None, without frames, where the script did not compile."""
    frame = error.__traceback__
    while frame is not None and (
        "runpy" in frame.tb_frame.f_code.co_filename or frame.tb_frame.f_code in (main.__code__, _run.__code__)
    ):
        frame = frame.tb_next
    return frame


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Get a signal when the parent ends: one that is killed cannot clean up (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    # SystemExit, so that multiprocessing's and torch's exit handlers run
    sys.exit(main(sys.argv[1:]))
