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
    `- RankFailure         another rank failed; carries the first failure's text     exit 6

A message has five parts: what failed, where (name, axis, rank), what was found, what is needed, what to do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a `shardwise` command returns to the shell. Documented in docs/exit-codes.md."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    LAUNCH = 3
    CHECKPOINT = 4
    NON_FINITE = 5
    RANK_FAILED = 6
    INTERNAL = 70
    INTERRUPTED = 130
    """Ctrl-C: the step was finished and a checkpoint saved, when a store was given."""
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
    """A module that the plan cannot be applied to."""


class LaunchError(ShardwiseError):
    """World size, rendezvous, ports and launcher's variables."""

    exit_code = ExitCode.LAUNCH


class CheckpointError(ShardwiseError):
    """A store that cannot be written or read."""

    exit_code = ExitCode.CHECKPOINT


class NonFiniteError(ShardwiseError):
    """A loss or gradient that is not finite, under the policy `raise` or `stop`."""

    exit_code = ExitCode.NON_FINITE


class RankFailure(ShardwiseError):
    """Another rank failed; the message is the first failure's."""

    exit_code = ExitCode.RANK_FAILED
