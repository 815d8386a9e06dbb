"""`Subject`: what is verified, and one run of it in forked processes with a witness."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.diagnose.verifying.trace import Trace, read_trace
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.findings import Finding
from shardwise.launch.echo import is_echo
from shardwise.launch.entry import main as run_entry
from shardwise.launch.environment import BACKEND, HOST, WITNESS
from shardwise.launch.forked import World, WorldError
from shardwise.launch.variables import set_variables, variables
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.train.guards.witness import Request, write_request

OUT = "{out}"
"""In a script's words: a fresh directory of each run."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A script, or a module that is run as one, and the words that it gets for a plan."""

    target: str
    """A script's path, or a module's dotted name when `is_module`."""
    name: str = ""
    """What reports call it; empty: the target."""
    is_module: bool = False
    words: tuple[str, ...] = ()
    """Words after the plan; `{out}` in one stands for a fresh directory."""
    arguments: Callable[[Plan, Path], Sequence[str]] | None = None
    """All words, given the plan and an empty directory of the run; None: the plan, then `words`."""
    function: Callable[[Plan], object] | None = None
    """A function at a module's top level that trains under a plan, in place of a script."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    spec: ModelSpec | None = None
    """Sizes of the model before it was shrunk, for the constraints; None: not known before it runs."""
    findings: Callable[[Plan], Sequence[Finding]] | None = None
    """What the model cannot do under a plan, found without running it; None: running it shows it."""
    notes: tuple[str, ...] = ()
    """What reports say of it: that it was shrunk, and how."""

    @property
    def title(self) -> str:
        """What reports call it."""
        return self.name or self.target

    def words_for(self, plan: Plan, directory: Path) -> tuple[str, ...]:
        """What one run gets as `sys.argv[1:]`."""
        if self.arguments is not None:
            return tuple(self.arguments(plan, directory))
        return (str(plan), *(word.replace(OUT, str(directory / "out")) for word in self.words))


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why a run left nothing to compare."""

    kind: str
    """Class of the error, `hang`, or `no-step`."""
    message: str
    rank: int | None = None
    traceback: str = ""
    """Of an error that is not one of Shardwise's own."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a subject."""

    plan: Plan
    request: Request
    threads: int = 1
    timeout_s: float = 300.0
    device: str = "cpu"


def record(subject: Subject, run: Run, directory: Path, world: World) -> Trace | Failed:
    """Run a subject under a plan and read what its ranks recorded.

    Args:
        subject: what is run.
        run: how.
        directory: an empty one; everything the run leaves goes there.
        world: processes to run it in.

    Cost: as many steps as the request says, on `plan.world` processes of this machine.
    """
    directory.mkdir(parents=True)
    write_request(run.request, directory)
    words = subject.words_for(run.plan, directory)
    call = _Call(subject.target, subject.is_module, subject.function, run, words, str(directory))
    variables = {**subject.environment, WITNESS: str(directory)}
    if run.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # scripts take the accelerator that they see
    try:
        world(run.plan.world, _run, call, timeout_s=run.timeout_s, **variables)
    except WorldError as error:
        return _failure(directory, run, str(error))
    trace = read_trace(directory, run.plan.world)
    if trace is None:
        return Failed(
            kind="no-step",
            message=f"{subject.title} ended without a step of shardwise (steps() or make_step()); its output:\n"
            f"{_tail(directory, 0)}",
        )
    return trace


@dataclass(frozen=True)
class _Call:
    target: str
    is_module: bool
    function: Callable[[Plan], object] | None
    run: Run
    words: tuple[str, ...]
    directory: str


def _run(call: _Call) -> None:
    """One rank: the target as `__main__`, its output in a file."""
    rank = int(variables()["RANK"])
    path = Path(call.directory)
    with (path / f"output{rank}.txt").open("w", encoding="utf-8") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(call.run.threads)
        if call.run.device != "cpu" and torch.accelerator.device_count() < call.run.plan.world:
            set_variables({BACKEND: HOST})  # asked here: a process that has counted devices cannot fork ranks
        try:
            code: object = _called(call, rank) if call.function else _entered(call, rank)
        except SystemExit as stop:
            code = stop.code
        if code not in (None, 0):
            raise LaunchError(f"ended with {code}")


def _entered(call: _Call, rank: int) -> int:
    kind = "--module" if call.is_module else "--script"
    report = ["--report", str(rank), str(Path(call.directory, f"error{rank}.json")), str(os.getppid())]
    return run_entry([*report, kind, call.target, *call.words])


def _called(call: _Call, rank: int) -> int:
    assert call.function is not None
    try:
        call.function(call.run.plan)
    except Exception as error:  # the script's own, for whoever reads the record
        record = {
            "rank": rank,
            "type": type(error).__name__,
            "message": str(error),
            "known": isinstance(error, ShardwiseError),
            "traceback": "".join(traceback.format_exception(error)),
            "time_s": time.time(),
        }
        Path(call.directory, f"error{rank}.json").write_text(json.dumps(record), encoding="utf-8")
        raise
    return 0


def _failure(directory: Path, run: Run, text: str) -> Failed:
    """The first rank's error that is not an echo of another's."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("error*.json"))]
    errors.sort(key=lambda e: e["time_s"])
    echoes = [e for e in errors if is_echo(e["message"]) and not e["known"]]
    own = [e for e in errors if e not in echoes]
    if own:
        return _raised(own[0])
    died = re.search(r"rank (\d+):\nthe process died \(exit code (.*)\)", text)
    if died:
        rank = int(died[1])
        said = f"the process ended with exit code {died[2]} (-9: killed, often out of memory); its output:\n"
        return Failed(kind="died", message=said + _tail(directory, rank), rank=rank)
    for number, how in re.findall(r"rank (\d+):\n(?:(?!\nrank ).)*?LaunchError: (ended with .*)", text, re.DOTALL):
        rank = int(number)
        if not any(rank == e["rank"] for e in echoes):
            return Failed(kind="ended", message=f"it {how.strip()}; its output:\n{_tail(directory, rank)}", rank=rank)
    if echoes and "Traceback" in text:  # else it hung, and who was ended last has lost the others
        return _raised(echoes[0])
    waiting = [rank for rank in range(run.plan.world) if f"rank {rank}:\n" in text]
    return Failed(
        kind="hang",
        message=f"ranks {', '.join(map(str, waiting))} did not end within {run.timeout_s:g} s: they wait for each "
        f"other in different collectives, or the model is too large for this machine; last output:\n"
        f"{_tail(directory, waiting[0] if waiting else 0)}",
    )


def _raised(error: dict[str, Any]) -> Failed:
    trace = "" if error["known"] else error["traceback"]
    return Failed(kind=error["type"], message=error["message"], rank=error["rank"], traceback=trace)


def _tail(directory: Path, rank: int, lines: int = 12) -> str:
    path = directory / f"output{rank}.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    crash = text.find("Current thread 0x") if "Fatal Python error" in text else -1  # its frames, the innermost first
    shown = text.splitlines()[-lines:] if crash < 0 else text[crash:].splitlines()[:lines]
    return "\n".join(f"    {line}" for line in shown) or "    (none)"
