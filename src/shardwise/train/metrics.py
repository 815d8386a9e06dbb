"""`MetricsLog`: records of a run as JSON lines, written by rank zero; and what a record's numbers are made of."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from shardwise.errors import UsageError
from shardwise.extras import optional_module
from shardwise.journal import append_line, read_metrics
from shardwise.records import say
from shardwise.train.kept.rundir import write_text

PEAK_FLOPS: Mapping[str, float] = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "V100": 1.25e14,
    "T4": 6.5e13,
}
"""Dense matrix multiplications per second in half precision, from the makers' data sheets. First match wins."""


class MetricsLog:
    """Appends one JSON object per line; each is on disk's way before `write` returns.

    A record that cannot be written, as on a full disk, is left out and does not end the run; the first one is said.

    Args:
        path: the `.jsonl` file; its directory must exist.
        after_step: keep only older records up to this step: what a resumed run does again is not there twice.
        tensorboard: also write scalars for TensorBoard into this directory (extra `tensorboard`).

    Raises:
        UsageError: the file cannot be opened for writing.
        ConfigError: TensorBoard is asked for and not installed.

    Example:
        >>> with MetricsLog(Path("metrics.jsonl")) as log:  # doctest: +SKIP
        ...     log.write({"step": 1, "loss": 5.5})
    """

    def __init__(self, path: Path, *, after_step: int | None = None, tensorboard: Path | None = None) -> None:
        if tensorboard is not None:
            optional_module("tensorboard", extra="tensorboard", need="train.tensorboard")
        try:
            if after_step is not None and path.exists():
                _cut(path, after_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write the metrics to {path}: {error.strerror or error}") from error
        self._board = _board(tensorboard)
        self._has_failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that are not finite are written as null: JSON has none."""
        try:
            append_line(self._file, finite(record))
        except OSError as error:
            if not self._has_failed:
                say(
                    f"shardwise: metrics are not written: {error.strerror or error} ({self._file.name}); training goes "
                    "on, and later records are tried"
                )
            self._has_failed = True
        try:
            for key, value in record.items() if self._board is not None else ():
                if isinstance(value, int | float) and key != "step":
                    self._board.add_scalar(key, value, record.get("step"))
        except OSError as error:  # its writer has ended
            self._board = None
            _say_no_board(error)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _board(folder: Path | None) -> Any:
    if folder is None:
        return None
    module = optional_module("torch.utils.tensorboard", extra="tensorboard", need="train.tensorboard")
    try:
        return module.SummaryWriter(str(folder))
    except OSError as error:
        _say_no_board(error)
        return None


def _say_no_board(error: OSError) -> None:
    say(f"shardwise: TensorBoard gets no more records: {error.strerror or error}; training goes on")


def _cut(path: Path, after_step: int) -> None:
    """Leave out records after a step. They are the last ones, unless a run has gone back: then no room is needed.

    Who is killed here loses no record.
    """
    lines = [
        line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
    ]  # none cut by a crash
    keep = [line for line, row in zip(lines, read_metrics(path), strict=False) if row["step"] <= after_step]
    are_first = keep == lines[: len(keep)]
    os.truncate(path, sum(map(len, keep if are_first else lines)))
    if are_first:
        return
    try:
        write_text(path, b"".join(keep).decode())
    except UsageError as error:
        say(f"shardwise: records of steps after {after_step} stay in the metrics: {error}; training goes on")


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same for JSON, which has no infinities and NaN: None in their place."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the device, or this process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's rate in half precision; None where it is not known (a CPU, fp32, a device not in the table)."""
    if device.type != "cuda" or precision not in ("bf16", "bf16-pure", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for key, rate in PEAK_FLOPS.items() if key in name), None)
