"""Files of records, one JSON object a line: appended to while a run goes on, read by the starts after it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.records import RecordError, check_types, say


def append_line(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append a record as one line of JSON, whole or not at all: half of one could not be read when others follow.

    Args:
        file: opened unbuffered, for appending.
        record: plain data.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    end, line = os.fstat(file.fileno()).st_size, f"{json.dumps(record)}\n".encode()
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def add_record(path: Path, record: Mapping[str, Any]) -> None:
    """The same at the end of a file. Where that fails, as on a full disk, it is said, and the run goes on."""
    try:
        with path.open("a+b", buffering=0) as file:
            end_line(file)
            append_line(file, record)
    except OSError as error:
        text = f"{path} lacks a record: {error.strerror or error}; the run goes on, and later ones are tried"
        say(f"shardwise: {text}")


def end_line(file: FileIO) -> None:
    """Have a file of records end with a whole line; half of one, which a crash of the machine left, is cut off.

    Raises:
        OSError: it cannot be read or written.
    """
    size = os.fstat(file.fileno()).st_size
    if not size or os.pread(file.fileno(), 1, size - 1) == b"\n":
        return
    file.seek(0)
    last = file.readall().rpartition(b"\n")[2]
    if last.lstrip(b"\0")[:1] not in (b"{", b"") or _parsed(last) is not None:
        file.write(b"\n")  # what a person wrote
        return
    file.truncate(size - len(last))
    say(f"shardwise: {file.name}: its last line was half written when the machine ended, and is cut off: {last[:80]!r}")


def _parsed(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        return row if isinstance(row := json.loads(line), dict) else None
    return None


def read_records(path: Path, check: Callable[[dict[str, Any]], None] = lambda _: None) -> list[dict[str, Any]]:
    """The records of a file; a last line that was cut by a crash is left out.

    Args:
        path: the file.
        check: raises a `RecordError` where a record is not what is needed.

    Raises:
        UsageError: it cannot be read, a line before the last one is no record, or `check` refuses one.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); needed a file of records; give it back"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if not isinstance(row := json.loads(line), dict):
                raise ValueError(f"a {type(row).__name__}")
            check(row)
            rows.append(row)
        except RecordError as error:
            raise UsageError(f"{path}:{number}: {error}; repair or remove the line") from None
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise UsageError(
                    f"{path}:{number}: found no JSON record ({str(error)[:100]}); repair or remove the line"
                ) from None
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of steps and evaluations; a last line that was cut by a crash is left out.

    Raises:
        UsageError: as `read_records`; what is read of a record is of another type.
    """
    return read_records(path, partial(check_types, types=_METRICS))


def read_events(path: Path, event: str) -> list[dict[str, Any]]:
    """The records of one kind of event; a last line that was cut by a crash is left out.

    Raises:
        UsageError: as `read_records`; what is read of a record is of another type.
    """
    return [row for row in read_records(path, _check_event) if row["event"] == event]


_METRICS = {"step": int, "loss": float | None, "eval_loss": float | None, "step_s": float | None}
_EVENTS: Mapping[str, Mapping[str, Any]] = {
    "quarantine": {"rows": tuple[int, ...] | None, "nth": int | None},
    "changed": {"changes": tuple[str, ...]},
    "weights": {"asked": str},
    "elastic": {"plan": str},
}
"""What starts read of the records of those before them."""
_MOST_ROWS = 2**24
"""Of a window."""


def _check_event(row: dict[str, Any]) -> None:
    check_types(row, {"event": str})
    check_types(row, _EVENTS.get(row["event"], {}))
    rows = row.get("rows", ()) if row["event"] == "quarantine" else None
    if rows is not None and not (len(rows) == 2 and 0 <= rows[0] < rows[1] <= rows[0] + _MOST_ROWS):
        raise RecordError(("rows",), f"found {rows}, needed the first position of a window and that behind its last")
