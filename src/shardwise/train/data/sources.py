"""Text from files: plain text, jsonl and parquet, globs, and the Python standard library's own sources.

Whatever is wrong with a file is an error that names it and, for text, the line.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.extras import optional_module
from shardwise.findings import nearest

STDLIB = "stdlib"
STDLIB_BYTES = 8_000_000
"""Bytes of the standard library that are read when nothing else is said."""
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
_JSON_LINES = (".jsonl", ".ndjson")
_NOT_TEXT = {".json": "one JSON object per line, named .jsonl", ".gz": "the unpacked file", ".zst": "the unpacked file"}


@dataclass(frozen=True)
class SourceFile:
    """A file to read."""

    path: Path
    name: str
    """The same on every machine for the standard library; the path as given for other files."""
    optional: bool
    """Found by a pattern: left out, and said so, where it is empty."""
    stdlib: bool = False


@dataclass(frozen=True)
class Document:
    """A piece of text that belongs together: a text file, a line of jsonl, a row of parquet."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A file that a pattern found and that was left out."""

    name: str
    reason: str


def find_files(sources: Sequence[str | Path], stdlib_bytes: int = STDLIB_BYTES) -> list[SourceFile]:
    """The files that sources stand for: paths in the order given, each pattern's files sorted by name.

    Of the standard library, files are taken in order until they reach `stdlib_bytes`.

    Raises:
        DataError: a file is missing, is a directory, or a pattern matches nothing.
    """
    if not sources:
        raise DataError(f"data: no source given; needed: a file, a glob, or {STDLIB!r}; give one")
    files: list[SourceFile] = []
    for source in sources:
        files += _stdlib_files(stdlib_bytes) if source == STDLIB else _find(str(source))
    return files


def read_documents(file: SourceFile, text_field: str) -> Iterator[Document | Skipped]:
    """The documents of one file.

    Raises:
        DataError: empty, binary, not UTF-8, truncated, malformed, or without the field.
    """
    suffix = file.path.suffix.lower()
    if suffix in _NOT_TEXT:
        raise DataError(
            f"data file {file.path}: {suffix} is not read; needed: text, .jsonl or .parquet; give {_NOT_TEXT[suffix]}"
        )
    try:
        if file.path.stat().st_size == 0:
            yield _empty(file)
        elif suffix == ".parquet":
            yield from _parquet(file, text_field)
        elif suffix in _JSON_LINES:
            yield from _json_lines(file, text_field)
        else:
            yield from _text(file)
    except OSError as error:
        raise DataError(
            f"data file {file.path}: cannot be read: {error.strerror or error}; needed: a file this user may read; "
            "check its permissions and the disk"
        ) from error


def _find(source: str) -> list[SourceFile]:
    path = Path(source).expanduser()
    if path.is_dir():
        raise DataError(
            f"data source {source}: is a directory; needed: files; give a pattern such as {source.rstrip('/')}/**/*.txt"
        )
    if path.exists():
        return [SourceFile(path, source, optional=False)]
    if not has_magic(source):
        folder = path.parent
        near = (
            nearest(path.name, sorted(p.name for p in folder.iterdir())) if folder.is_dir() else f"no folder {folder}"
        )
        raise DataError(f"data source {source}: no such file; needed: a file, a glob, or {STDLIB!r}; {near}")
    matches = sorted(match for match in glob(str(path), recursive=True) if Path(match).is_file())
    if not matches:
        raise DataError(
            f"data source {source}: the pattern matches no file, seen from {Path.cwd()}; needed: at least one; "
            "correct the pattern (** goes into folders), and quote it so that the shell leaves it alone"
        )
    return [SourceFile(Path(match), match, optional=True) for match in matches]


def _stdlib_files(num_bytes: int) -> list[SourceFile]:
    """The standard library's `.py` files but its tests, sorted by name relative to its folder."""
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, folders, found in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in found if name.endswith(".py")]
    names.sort()
    if not names:
        raise DataError(
            f"data source {STDLIB!r}: {root} holds no .py files; needed: a Python installation with its sources; "
            "give text files in its place"
        )
    files: list[SourceFile] = []
    for name in names:
        if num_bytes <= 0:
            break
        files.append(SourceFile(root / name, name, optional=True, stdlib=True))
        num_bytes -= files[-1].path.stat().st_size
    return files


def _empty(file: SourceFile) -> Skipped:
    if not file.optional:
        raise DataError(f"data file {file.path}: is empty; needed: at least one character of text; give another file")
    return Skipped(file.name, "empty")


def _text(file: SourceFile) -> Iterator[Document | Skipped]:
    content = file.path.read_bytes()
    try:
        text = _decode(content, file.path)
    except DataError:
        if not file.stdlib:
            raise
        yield Skipped(file.name, "not UTF-8")
        return
    yield Document(file.name, text) if text else _empty(file)


def _decode(content: bytes, path: Path, line: int = 1) -> str:
    """UTF-8 text, without a byte-order mark; `line` is that of the first byte."""
    at = content.find(b"\0")
    what = "a NUL byte"
    if at < 0:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            at, what = error.start, f"byte 0x{content[error.start]:02x}, which is no UTF-8 ({error.reason})"
    raise DataError(
        f"data file {path}, line {line + content.count(10, 0, at)}: found {what} at offset {at}"
        f"{' of the line' if line > 1 else ''}: binary data, or another encoding; needed: UTF-8 text; convert it "
        "(iconv -t utf-8), or leave the file out"
    )


def _json_lines(file: SourceFile, field: str) -> Iterator[Document | Skipped]:
    found = False
    with file.path.open("rb") as lines:
        for number, content in enumerate(lines, start=1):
            line = _decode(content, file.path, number).strip()
            if line:
                found = True
                yield Document(f"{file.name}:{number}", _field(line, field, file.path, number, content.endswith(b"\n")))
    if not found:
        yield _empty(file)


def _field(line: str, field: str, path: Path, number: int, complete: bool) -> str:
    where = f"data file {path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        cut = "" if complete else "; the last line has no end: the file looks truncated"
        raise DataError(
            f"{where}: no JSON: {error.msg} at column {error.colno}{cut}; needed: one JSON object per line; "
            "repair the line, or copy the file again"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: found a JSON {type(row).__name__}; needed: an object with the key {field!r}; convert the file"
        )
    if field not in row:
        raise DataError(
            f"{where}: no key {field!r}; needed: a key that holds the text; {nearest(field, list(row))}; set text_field"
        )
    return _checked_text(row[field], field, where)


def _checked_text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {field!r} holds {'nothing' if value is None else type(value).__name__}; needed: text; "
            "repair or remove the row, or set text_field to another key"
        )
    return value


def _parquet(file: SourceFile, field: str) -> Iterator[Document | Skipped]:
    library = optional_module("pyarrow.parquet", extra="data", need=f"data file {file.path}")
    arrow_error: type[Exception] = optional_module("pyarrow", extra="data", need="parquet").ArrowException
    row = 0
    try:
        with library.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"data file {file.path}: no column {field!r}; needed: a column of text; "
                    f"{nearest(field, names)}; set text_field"
                )
            for batch in table.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield Document(
                        f"{file.name}:{row}", _checked_text(value, field, f"data file {file.path}, row {row}")
                    )
    except (arrow_error, OSError) as error:
        raise DataError(
            f"data file {file.path}: pyarrow cannot read it after row {row}: {error}; needed: a complete parquet file; "
            "truncated, or not parquet: copy or write it again"
        ) from error
    if row == 0:
        yield _empty(file)
