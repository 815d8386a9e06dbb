"""Every error that Shardwise raises on purpose, and the exit code that each one gives a command.

    ShardwiseError
    |- UsageError          a call, a flag or a file that cannot mean anything        exit 2
    |  |- ConfigError      a configuration key or value
    |  `- DataError        an input file: empty, missing, binary, truncated
    |- PlanError           a plan that cannot be parsed or is refused                exit 1
    |- ModelError          a module that the plan cannot be applied to               exit 1
    |- LaunchError         world size, rendezvous, ports, launcher's variables       exit 3
    |- CheckpointError     a store that cannot be written, or read                   exit 4
    |- NonFiniteError      a loss or gradient that is not finite, policy `raise`     exit 5
    |- LockedError         a run's directory that another run is using               exit 7
    |- ChangedError        a resume whose settings change the maths, not allowed     exit 8
    |- SpikeError          more spikes of the loss than the policy's limit           exit 9
    |- OutOfMemoryError    a model, or its smallest step, that does not fit          exit 10
    `- ReplicaError        copies of a parameter that differ between ranks           exit 11

A message has five parts: what failed, where (name, axis, rank), what was found, what is needed, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What a `shardwise` command returns to the shell. Documented in docs/exit-codes.md."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    LAUNCH = 3
    CHECKPOINT = 4
    NON_FINITE = 5
    RANK_FAILED = 6
    """A rank died, or raised what is no `ShardwiseError`."""
    LOCKED = 7
    CHANGED = 8
    SPIKE = 9
    OUT_OF_MEMORY = 10
    REPLICAS_DIFFER = 11
    INTERNAL = 70
    INTERRUPTED = 130
    """Ctrl-C: the step was finished and a checkpoint saved, when a store was given."""
    KILLED = 137
    """A second signal, or the grace period was over: ended at once, nothing saved since the last checkpoint."""
    PREEMPTED = 138
    """SIGUSR1, a scheduler's warning: the step was finished and a checkpoint saved, when a store was given."""
    TERMINATED = 143
    """SIGTERM: the step was finished and a checkpoint saved, when a store was given."""


class ShardwiseError(Exception):
    """The root: catch this to catch everything that Shardwise refuses."""

    exit_code: ExitCode = ExitCode.REFUSED


class UsageError(ShardwiseError):
    """A call, a flag or a file that cannot mean anything."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """A configuration key or value that is unknown, of the wrong type or out of range."""


class DataError(UsageError):
    """An input file that is empty, missing, binary, truncated or malformed."""


class PlanError(ShardwiseError):
    """A plan that cannot be parsed, or that the constraints refuse."""


class ModelError(ShardwiseError):
    """A module that the plan cannot be applied to.

    `row` is the id of a limit that docs/constraints.md lists under "Modules"; empty: what is wrong is the module's own.
    """

    def __init__(self, text: str, *, row: str = "") -> None:
        """`text` says what failed; a `row` is written before it."""
        super().__init__(f"[{row}] {text}" if row else text)
        self.row = row


class LaunchError(ShardwiseError):
    """World size, rendezvous, ports and launcher's variables."""

    exit_code = ExitCode.LAUNCH


class CheckpointError(ShardwiseError):
    """A store that cannot be written or read."""

    exit_code = ExitCode.CHECKPOINT


class NonFiniteError(ShardwiseError):
    """A loss or gradient that is not finite, under the policy `raise` or `stop`."""

    exit_code = ExitCode.NON_FINITE


class LockedError(ShardwiseError):
    """A run's directory that another run is using."""

    exit_code = ExitCode.LOCKED


class ChangedError(ShardwiseError):
    """A resume whose settings change the maths of the run, without leave."""

    exit_code = ExitCode.CHANGED


class SpikeError(ShardwiseError):
    """More spikes of the loss, or of the gradient norm, than the policy's limit."""

    exit_code = ExitCode.SPIKE


class OutOfMemoryError(ShardwiseError):
    """A step that does not fit into memory, however small its micro-batch; or parameters, or an optimizer's state.

    With `halving` it is no end: it asks the supervisor of `--recover` for processes whose micro-batches are half as
    large. Its keys are `step`, `ran_out` (the error), `rows_before`, `rows` and `halvings`, that one included.
    """

    exit_code = ExitCode.OUT_OF_MEMORY

    def __init__(self, text: str, *, halving: Mapping[str, Any] | None = None) -> None:
        """`text` says what failed."""
        super().__init__(text)
        self.halving = halving


class ReplicaError(ShardwiseError):
    """Copies of a parameter that differ between ranks which must hold the same."""

    exit_code = ExitCode.REPLICAS_DIFFER
